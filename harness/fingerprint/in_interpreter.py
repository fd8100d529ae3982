"""A model's files as an interpreter's own packages read them: ``PYTHON in_interpreter.py MODEL PROBES``, a file of JSON.

It runs by its path in the Python of a side, which need not have assay, and imports nothing but the standard library, transformers
and, for RoPE, torch. What it prints last is one line of JSON; what it cannot read is named in ``not_observed``, with the reason.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def main(model: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Read the files of a model.

    Args:
        asked: ``texts``, ``chats``, the names of ``packages``, and whether code that comes with the model is trusted.
    """
    trusted = bool(asked.get("trust_remote_code"))
    return observed({
        "packages": lambda: versions(asked["packages"]),
        "tokens": lambda: tokens_of(_tokenizer(model, trusted), asked["texts"], asked["chats"], model),
        "generation": lambda: generation_of(model),
        "config": lambda: settings_of(_resolved(model, trusted) | beside_config(model, code=trusted)),
        "rope": lambda: _ropes(model, trusted),
    })  # fmt: skip


def observed(parts: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Observe parts, and say under ``not_observed`` why one was not, and under ``seconds`` how long each took."""
    read: dict[str, Any] = {"not_observed": {}, "seconds": {}}
    for part, observe in parts.items():
        begun = time.perf_counter()
        try:
            read[part] = observe()
        except Exception as error:  # whatever these packages raise; assay's own errors have a first part
            said = getattr(error, "found", "") or f"{type(error).__name__}: {error}"
            read["not_observed"][part] = " ".join(said.split())[:200]
        read["seconds"][part] = round(time.perf_counter() - begun, 4)
    return read


def versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of packages that are installed, and that of Python."""
    installed = {"python": platform.python_version()}
    for name in names:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def _tokenizer(model: str, trusted: bool) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, trust_remote_code=trusted)


def written_ids(model: str, texts: Mapping[str, str], bare: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return the ids that ``tokenizer.json`` gives by itself, of the texts where they are others than `bare`; none without it."""
    path = os.path.join(model, "tokenizer.json")
    if not os.path.exists(path):
        return {}
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(path)
    ids = {name: own.encode(text, add_special_tokens=False).ids for name, text in texts.items()}
    return {name: given for name, given in ids.items() if name in bare and given != list(bare[name])}


def tokens_of(tokenizer: Any, texts: Mapping[str, str], chats: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the ids that a tokenizer of transformers makes of texts and chats, by the fields of the record ``Tokens``."""
    told, retold, refused = {}, {}, {}
    for name, (messages, tools) in chats.items():
        arguments = {"add_generation_prompt": True, **({"tools": tools} if tools else {})}
        try:
            text = tokenizer.apply_chat_template(copy.deepcopy(messages), tokenize=False, **arguments)
        except Exception as error:  # a template may refuse roles and tools, as it chooses
            refused[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        told[name] = tokenizer(text, add_special_tokens=False)["input_ids"]
        retold[name] = tokenizer(text)["input_ids"]
    bare = {name: tokenizer(text, add_special_tokens=False)["input_ids"] for name, text in texts.items()}
    return {
        "tokenizer": type(tokenizer).__name__,
        "bos": tokenizer.bos_token_id,
        "eos": [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
        "texts": {name: tokenizer(text)["input_ids"] for name, text in texts.items()},
        "bare": bare,
        "written": written_ids(model, texts, bare),
        "chats": told,
        "refused": refused if told else {},
        "retold": retold,
        "digests": _digests_of(model, getattr(tokenizer, "chat_template", None)),
    }


# Files that hold a tokenizer without ``tokenizer.json``.
_TOKENIZERS = ("tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "merges.txt", "vocab.txt")


def _digests_of(model: str, template: Any) -> dict[str, str]:
    """Return digests of a chat template, and of what a tokenizer computes from as its files have it, by part."""
    written = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    made = {"template": _digest(written.strip("\n").replace("\\n", "\n").encode())}  # as SGLang reads one
    path = os.path.join(model, "tokenizer.json")
    if not os.path.exists(path):
        for name in filter(lambda name: os.path.exists(os.path.join(model, name)), _TOKENIZERS):
            with open(os.path.join(model, name), "rb") as file:
                made[name] = _digest(file.read())
        return made
    with open(path, encoding="utf-8") as file:
        whole = json.load(file)
    algorithm = {name: value for name, value in (whole.get("model") or {}).items() if value is not None}
    parts = {
        name: whole.get(name) for name in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    }
    parts["vocabulary"] = algorithm.pop("vocab", None)
    merges = algorithm.pop("merges", None) or []  # "a b" in older files, ["a", "b"] in newer ones
    parts["merges"] = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in merges]
    parts["algorithm"] = algorithm
    return made | {name: _digest(json.dumps(value, sort_keys=True).encode()) for name, value in parts.items()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def generation_of(model: str) -> dict[str, str]:
    """Return the defaults of generation that a model's folder states, as JSON by name."""
    path = os.path.join(model, "generation_config.json")
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        written = json.load(file)
    return {
        name: json.dumps(value, sort_keys=True)
        for name, value in sorted(written.items())
        if name != "transformers_version" and not name.startswith("_")
    }


# Settings of a configuration that are names, or change nothing that is served.
_NO_SETTING = re.compile(
    r"(^|\.)(_?name_or_path|id2label|label2id|(transformers|sglang)_version|_\w+|context_len|use_cache|initializer_\w+|output_\w+|"
    r"return_dict\w*|\w*dropout\w*|\w*pdrop)(\.|$)"
)


def settings_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a model's configuration by their names with dots, as text; dtypes by the names of transformers 5."""
    read = {name: value for name, value in _leaves(config) if not _NO_SETTING.search(name)}
    return {
        re.sub(r"(^|\.)torch_dtype$", r"\1dtype", name): value.removeprefix("torch.") for name, value in read.items()
    }


def beside_config(model: str, *, code: bool) -> dict[str, Any]:
    """Return what other files of a folder say of how a model computes: ModelOpt's quantisation, and digests of its `code`."""
    made: dict[str, Any] = {}
    path = os.path.join(model, "hf_quant_config.json")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as written:
            made["hf_quant_config"] = json.load(written).get("quantization")
    for name in sorted(os.listdir(model)) if code else ():
        if name.endswith(".py"):
            with open(os.path.join(model, name), "rb") as file:
                made[f"code.{name}"] = _digest(file.read())
    return made


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield what is set in a configuration."""
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _leaves(member, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value, default=str)


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config.json`` with what ``--json-model-override-args`` sets, as SGLang overrides it."""
    made = dict(config)
    parameters = made.get("rope_parameters")
    if parameters and "rope_theta" in overrides:  # SGLang may not see it beside these: it is asked for all the same
        made["rope_parameters"] = {name: value for name, value in parameters.items() if name != "rope_theta"}
    for key, value in overrides.items():
        name = "rope_parameters" if key == "rope_scaling" and parameters else key
        current = made.get(name)
        made[name] = {**current, **value} if isinstance(current, dict) and isinstance(value, dict) else value
    return made


def _resolved(model: str, trusted: bool) -> dict[str, Any]:
    from transformers import AutoConfig

    return dict(AutoConfig.from_pretrained(model, trust_remote_code=trusted).to_dict())


def _ropes(model: str, trusted: bool) -> list[dict[str, Any]]:
    """Return the frequencies of each rotary embedding that the model's own class makes; its weights are never made."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model, trust_remote_code=trusted)
    try:
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
    except ValueError:
        with torch.device("meta"):
            made = AutoModel.from_config(config, trust_remote_code=trusted)
    tables = []
    seen = set()
    for path, module in made.named_modules():
        own = getattr(module, "config", None)
        if "Rotary" not in type(module).__name__ or own is None or re.search("visual|vision", path):
            continue
        on_cpu = type(module)(config=own)
        for name, frequencies in on_cpu.named_buffers():
            if not name.endswith("inv_freq") or "original" in name:
                continue
            kind = name.removesuffix("inv_freq").rstrip("_")
            scale = getattr(on_cpu, f"{kind}_attention_scaling" if kind else "attention_scaling", 1.0)
            key = (type(module).__name__, kind, tuple(frequencies.tolist()))
            if key not in seen:
                seen.add(key)
                tables.append({
                    "name": f"{path}.{kind}" if kind else path,
                    "kind": type(module).__name__,
                    "layers": kind or ("sliding_attention" if path.endswith("_local") else ""),
                    "dtype": str(frequencies.dtype).replace("torch.", ""),
                    "frequencies": frequencies.double().tolist(),
                    "scale": float(scale),
                })  # fmt: skip
    return tables


if __name__ == "__main__":
    with open(sys.argv[2], encoding="utf-8") as probes:
        print("\n" + json.dumps(main(sys.argv[1], json.load(probes))), flush=True)
    os._exit(0)  # imports may leave threads behind that would be waited for
