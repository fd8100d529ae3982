"""The model that both servers load: found and checked before they start, so that both load the same files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.evals.tiny_model.families import FAMILIES, SOURCE, tiny_model
from assay.harness.errors import EvidenceError, UsageError
from assay.harness.reading import regular_file, whole_file
from assay.harness.sides import BUILTIN_MODEL, flag_values

TINY_MODEL = SOURCE
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# Endings of the names of tensors that are scales of stored K and V, as SGLang knows them.
_KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale")
# Configuration fields of models whose layers keep states: Qwen3-Next, Falcon-H1 and Granite, Nemotron-H, LFM2.
_OF_STATES = ("full_attention_interval", "linear_conv_kernel_dim", "mamba_d_state", "ssm_state_size", "conv_L_cache")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def is_hub_name(name: str) -> bool:
    """Return True if a model's name has the form of a hub name, OWNER/NAME, and is not a path."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def resolve_model(name: str, engine_args: Sequence[str] = ()) -> Path:
    """Find the folder of a model: the named one, or the snapshot of a hub model, downloaded if necessary.

    Args:
        name: "tiny" for the model that ships with assay, "tiny-gemma2" for the same in layers of another family, a folder, or a hub
            name ("meta-llama/Llama-3.1-8B-Instruct").
        engine_args: the servers' flags; with ``--load-format dummy`` no weights are needed.

    Raises:
        UsageError: the folder or hub model does not exist, or the folder lacks a configuration, tokenizer or weights, or one of
            them is damaged.
    """
    builtin, _, family = name.partition("-")
    if builtin == BUILTIN_MODEL and family in FAMILIES:
        folder = tiny_model(family)
    else:
        folder = TINY_MODEL if name == BUILTIN_MODEL else Path(name).expanduser()
    if not folder.exists():
        if not is_hub_name(name):
            raise UsageError(f"--model {name}: no such folder.", "a model folder or a hub name", "check the path")
        folder = _download(name)
    _refuse_pipes(folder, name)
    tokenizers = [folder / file for file in _TOKENIZERS if (folder / file).exists()]
    dummy = flag_values(tuple(engine_args)).get("--load-format") == "dummy"
    whole = dummy or any(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    around = f"name {folder.parent}" if (folder.parent / "config.json").exists() else "name that folder, or a hub name"
    for right, problem, expected, do in (
        (folder.is_dir(), "is a file", "the folder with config.json and the weights", around),
        ((folder / "config.json").exists(), "has no config.json", "a folder as save_pretrained writes it", "check the path"),
        (tokenizers, "has no tokenizer", f"one of {', '.join(_TOKENIZERS)}", "save the tokenizer next to the weights"),
        (whole, "has no weights", f"files that match one of {', '.join(_WEIGHTS)}",
         "finish the download, or --engine-arg=--load-format=dummy"),
    ):  # fmt: skip
        if not right:
            raise UsageError(f"--model {name} {problem}.", expected, do)
    for path in (folder / "config.json", *tokenizers):
        if path.suffix == ".json":
            _read_json(path, name)
    for path in [] if dummy else sorted(folder.glob("*.safetensors")):
        with _opened(path, name):
            pass
    return folder.resolve()


def _refuse_pipes(folder: Path, name: str) -> None:
    """Refuse a folder with pipes or devices, for which an engine would wait forever. Raises UsageError."""
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            if path.exists() and not path.is_dir():
                regular_file(path)
        except EvidenceError as error:
            raise UsageError(f"--model {name}: {error.found}", error.expected, error.do) from None


def _read_json(path: Path, name: str) -> dict[str, Any]:
    """Read a file of a model, as a JSON object. Raises UsageError if it is not valid."""
    try:
        document = json.loads(whole_file(path))
    except FileNotFoundError:
        raise UsageError(
            f"{path.name} of --model {name} does not exist.", "a folder as save_pretrained writes it", "check the path"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        problem = f"cannot be read as JSON: {error}"
    else:
        if isinstance(document, dict):
            return document
        problem = f"is {type(document).__name__}, not an object"
    raise UsageError(
        f"{path.name} of --model {name} {problem}.",
        "a JSON object, as save_pretrained writes it",
        f"download {path.name} again, or fix it",
    )


@contextmanager
def _opened(path: Path, name: str) -> Iterator[Any]:
    """Open a safetensors file, whose header must state its size. Raises UsageError."""
    import safetensors

    try:
        with safetensors.safe_open(path, "np") as file:
            yield file
    except (safetensors.SafetensorError, OSError) as error:
        lfs = path.open("rb").read(8) == b"version "
        raise UsageError(
            f"{path.name} of --model {name} {'is a pointer of Git LFS' if lfs else f'cannot be read: {error}'}.",
            "a whole safetensors file",
            f"download {path.name} again",
        ) from None


@dataclass(frozen=True)
class ModelShape:
    """The size of a model, as its configuration states it.

    Attributes:
        vocabulary: size of the vocabulary.
        context: longest sequence, in tokens.
        q_heads: query heads of a layer, or 0 if the configuration does not state it.
        kv_heads: key and value heads of a layer, 1 if it reads latents, or 0 if not stated.
        head_dim: size of a head, of the latents if a layer reads them, or 0 if not stated.
        dtype: dtype of the weights, such as "bfloat16", or empty if not stated.
        layers: number of layers, or 0 if not stated.
        recurrent: whether some layers keep a state instead of keys and values.
        asks: features that its layers ask for beyond plain attention, by name, with the configuration line that says so. Windows as
            long as the context ask for nothing. A KV cache in FP8 is "stored_kv", and the checkpoint's scales for it "KV scales".
    """

    vocabulary: int
    context: int
    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: str = ""
    layers: int = 0
    recurrent: bool = False
    asks: Mapping[str, str] = field(default_factory=dict)

    @property
    def asked(self) -> tuple[str, ...]:
        """Return the values of `asks` in the words of calls that ask for the same: "window 4096", "sinks near 0"."""
        numbers = ("window", "softcap")
        values = {name: f"{float(self.asks[name].rpartition(': ')[2]):.12g}" for name in numbers if name in self.asks}
        return (*(f"{name} {value}" for name, value in values.items()), *["sinks near 0"] * ("sinks" in self.asks))


def configuration(model: Path) -> dict[str, Any]:
    """Read the ``config.json`` of the model in a folder, with the settings of its text model instead of the whole.

    Raises:
        UsageError: it cannot be read, or is not a JSON object.
    """
    config = _read_json(model / "config.json", str(model))
    return {**config, **config.get("text_config", {})}


def model_shape(model: Path, flags: tuple[str, ...] = ()) -> ModelShape:
    """Read the shape of the model in a folder from its ``config.json``.

    Args:
        flags: the server's flags; ``--kv-cache-dtype`` decides which features layers ask for.

    Raises:
        UsageError: the configuration has no ``vocab_size`` or no ``max_position_embeddings``.
    """
    config = configuration(model)
    heads, hidden = int(config.get("num_attention_heads") or 0), int(config.get("hidden_size") or 0)
    latents = int(config.get("kv_lora_rank") or 0) and int(config["kv_lora_rank"]) + int(config["qk_rope_head_dim"])
    try:
        return ModelShape(
            vocabulary=int(config["vocab_size"]),
            context=int(config["max_position_embeddings"]),
            q_heads=heads,
            kv_heads=1 if latents else int(config.get("num_key_value_heads") or heads),
            head_dim=latents or int(config.get("head_dim") or (hidden // heads if heads else 0)),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
            layers=int(config.get("num_hidden_layers") or 0),
            recurrent=any(name in config for name in _OF_STATES),
            asks=_asks(config) | _asked_of_cache(model, config, flags),
        )
    except KeyError as error:
        raise UsageError(
            f"{model / 'config.json'} has no {error.args[0]}.",
            "vocab_size and max_position_embeddings",
            "add it, or name another --model",
        ) from None


def _asks(config: Mapping[str, Any]) -> dict[str, str]:
    """Read the features that layers ask for from a configuration, by the names of Gemma, gpt-oss, Mistral, Grok and DeepSeek."""
    kinds = config.get("layer_types") or []
    window = int(config.get("sliding_window") or 0)
    has_windows = "sliding_attention" in kinds if kinds else config.get("use_sliding_window", True)
    lines = {
        "softcap": ("attn_logit_softcapping", config.get("attn_logit_softcapping")),
        "window": (
            "sliding_window",
            window if has_windows and window < int(config.get("max_position_embeddings") or 0) else 0,
        ),
        "sinks": ("model_type", "gpt_oss" if config.get("model_type") == "gpt_oss" else ""),
        "temperature": ("attn_temperature_len", config.get("attn_temperature_len")),
        "mla": ("kv_lora_rank", config.get("kv_lora_rank")),
    }
    return {feature: f"{name}: {value}" for feature, (name, value) in lines.items() if value}


def _asked_of_cache(model: Path, config: Mapping[str, Any], flags: tuple[str, ...]) -> dict[str, str]:
    """Read the feature that a KV cache in FP8 asks for. A cache in the model's dtype asks for none.

    SGLang's default, "auto", is FP8 for checkpoints whose quantisation says so.
    """
    name, value = "--kv-cache-dtype", flag_values(flags).get("--kv-cache-dtype", "auto")
    if value == "auto":
        name, value = _cache_of_checkpoint(model, config)
    if not value.lower().startswith("fp8"):
        return {}
    asked = {"stored_kv": f"{name}: {value}"}
    for path in sorted(model.glob("*.safetensors")):
        with _opened(path, str(model)) as file:
            tensors: list[str] = list(file.keys())
        if scale := next((tensor for tensor in tensors if tensor.endswith(_KV_SCALES)), ""):
            return asked | {"KV scales": f"{scale}, for {name}: {value}"}
    return asked


def _cache_of_checkpoint(model: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the field with which a checkpoint asks for a KV cache in FP8, as SGLang 0.5.23 reads it, and its value; or empty ones.

    ModelOpt has a ``kv_cache_quant_algo``, or a ``kv_cache_scheme`` of 8-bit floats, in ``config.json`` or in a separate file.
    Of compressed-tensors, SGLang takes the scales but leaves the cache in the model's dtype.
    """
    quantised, apart = config.get("quantization_config") or {}, model / "hf_quant_config.json"
    if not quantised and apart.is_file():
        quantised = _read_json(apart, str(model))
        quantised = quantised.get("quantization") or quantised
    if algorithm := quantised.get("kv_cache_quant_algo"):
        return "kv_cache_quant_algo", str(algorithm)
    scheme = quantised.get("kv_cache_scheme") or {}
    of_8_bits = isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    if of_8_bits and quantised.get("quant_method") != "compressed-tensors":
        return "kv_cache_scheme", "fp8"
    return "", ""


def _download(name: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, ignore_patterns=["original/*", "*.pth"]))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"--model {name} is neither a local folder nor a model on the hub: {reason}",
            "a model folder, or a hub model that this machine can reach",
            "check the name, log in to the hub, or name a folder",
        ) from None
