"""The fingerprint of an SGLang process, taken from its ModelRunner: RoPE tables, weights, resolved implementations, arguments.

A part that cannot be read is not observed, with the reason: whatever happens here, the server goes on.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from assay.evals.probe_texts import CHATS, TEXTS
from assay.harness.engines.inside.attachment import ControlReader
from assay.harness.engines.inside.process_fingerprint import describe_process, rank
from assay.harness.engines.sglang import arguments
from assay.harness.evidence.fingerprint import OF_PROCESS, Fingerprint, Resolved, Tokens
from assay.harness.fingerprint.folder_readings import (
    beside_config,
    generation_of,
    overridden,
    settings_of,
    tokens_of,
)
from assay.harness.fingerprint.in_model import digest, dtype_name, held_floats, layer_of, ranges_of, ropes_of
from assay.harness.fingerprint.weights import weights_of

_BY_LAYER = {"RadixAttention": "attention", "RadixLinearAttention": "linear attention"}


def describe(runner: Any) -> Fingerprint:
    """Take the fingerprint of the process of a ModelRunner."""
    parts: dict[str, Callable[[], Any]] = {
        "tokens": lambda: _tokens(runner.server_args),
        "generation": lambda: generation_of(str(runner.server_args.model_path)),
        "rope": lambda: ropes_of(runner.model, _config(runner), _called(runner)),
        "config": lambda: _settings(runner),
        "weights": lambda: weights_of(runner.model),
        "adapters": lambda: _adapters(runner),
        "quantisation": lambda: _quantisation(runner),
        "experts": _experts,
        "backends": lambda: _backends(runner),
        "arguments": lambda: resolved_arguments(runner.server_args),
    }
    import sglang

    return describe_process("sglang", sglang.__version__, str(runner.server_args.model_path), str(runner.device), parts)


class FingerprintWriter:
    """Writes the fingerprint of a ModelRunner's process into the server's folder, once for each label that the control names."""

    def __init__(self, runner: Any, folder: Path) -> None:
        self._runner, self._folder = runner, folder
        self._reader = ControlReader(folder)
        self._written = ""

    def after(self, batch: Any) -> None:
        """Write it after a pass of a request, whose position ids the fingerprint has, if the control asks for it.

        With data-parallel attention, a request belongs to one rank, and the others go through the model with an idle batch.
        """
        label = self._reader.latest().control.fingerprint
        if not label or label == self._written or not (getattr(batch, "rids", None) or batch.forward_mode.is_idle()):
            return
        self._written = label
        made = describe(self._runner)
        positions = getattr(batch, "positions", None)
        if isinstance(positions, Tensor):
            made = made.model_copy(update={"positions": tuple(map(int, positions.flatten().tolist()))})
        OF_PROCESS.write(self._folder, made, process=f"{label}-{rank():04}")


def _tokens(server_args: Any) -> Tokens:
    """Have a tokenizer, loaded as the server loads its own, make the ids of the corpus."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    settled = _settled(server_args)
    path = str(settled.get("tokenizer_path") or settled["model_path"])
    named = {name: settled[name] for name in ("tokenizer_mode", "tokenizer_backend") if settled.get(name)}
    tokenizer = get_tokenizer(path, trust_remote_code=bool(settled.get("trust_remote_code")), **named)
    made = tokens_of(tokenizer, TEXTS, CHATS, path)
    if given := str(settled.get("chat_template") or ""):
        told: dict[str, Any] = {
            "chats": {},
            "refused": {},
            "digests": {name: digest for name, digest in made["digests"].items() if name != "template"},
        }  # a template that is not a Jinja file is SGLang's code
        if given.endswith(".jinja"):
            tokenizer.chat_template = Path(given).read_text().strip("\n").replace("\\n", "\n")  # as SGLang reads it
            told = tokens_of(tokenizer, {}, CHATS, path)
        made |= {name: told[name] for name in ("chats", "refused", "digests")}  # clients render with the model's own
    return Tokens(**made)


def _config(runner: Any) -> Mapping[str, Any]:
    """Read the model's ``config.json`` as it is on disk, and override it as SGLang does; without the file the result is empty."""
    path = Path(str(runner.server_args.model_path)) / "config.json"
    read: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return overridden(read, _overrides(runner))


def _settings(runner: Any) -> dict[str, str]:
    """Return a model's settings: its resolved configuration, and the floats that its layers hold, as the epsilon of a norm."""
    folder = Path(str(runner.server_args.model_path))
    beside = beside_config(
        str(folder), code=folder.is_dir() and bool(getattr(runner.server_args, "trust_remote_code", False))
    )
    settings = settings_of(runner.model_config.hf_config.to_dict() | beside)
    settings |= held_floats(runner.model)
    return settings


def _called(runner: Any) -> str:
    return "config.json with --json-model-override-args" if _overrides(runner) else "config.json"


def _overrides(runner: Any) -> dict[str, Any]:
    given: dict[str, Any] = json.loads(getattr(runner.server_args, "json_model_override_args", None) or "{}")
    return given


def _adapters(runner: Any) -> dict[str, str]:
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        return {}
    adapters = {}
    for uid, adapter in manager.loras.items():
        reference = manager.lora_refs.get(uid)
        total, size = hashlib.sha256(), 0.0
        for layer in adapter.layers:
            for name, weight in sorted(layer.weights.items()):
                total.update(name.encode() + digest(weight).encode())
                size += float(weight.double().square().sum()) if "lora_B" in name else 0.0
        adapters[str(getattr(reference, "lora_name", None) or uid)] = (
            f"{total.hexdigest()[:16]}, scaling {adapter.scaling:g}, norm of B {size**0.5:.4g}"
        )
    return adapters


def _quantisation(runner: Any) -> dict[str, str]:
    config = _config(runner)
    asked = config.get("quantization_config") or {}
    scheme = {f"checkpoint.{key}": json.dumps(value, sort_keys=True) for key, value in asked.items()}
    scheme["method"] = str(getattr(runner.model_config, "quantization", None) or "")
    scheme["weights"] = dtype_name(getattr(runner.model_config, "dtype", None))
    scheme["kv cache"] = dtype_name(getattr(runner, "kv_cache_dtype", None))
    scales = [
        f"{float(module.k_scale_float):g}/{float(module.v_scale_float):g}"
        for _, module in runner.model.named_modules()
        if getattr(module, "k_scale_float", None) is not None and getattr(module, "v_scale_float", None) is not None
    ]
    scheme["kv scales"] = " ".join(scales) if set(scales) - {"1/1"} else ""
    return {name: value for name, value in scheme.items() if value}


def _experts() -> dict[str, str]:
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    metadata = get_global_expert_location_metadata()
    if metadata is None:
        return {}
    mapped = metadata.physical_to_logical_map_cpu
    in_order = torch.arange(mapped.shape[1])
    return {
        str(layer): "in order" if bool((row == in_order).all()) else digest(row) for layer, row in enumerate(mapped)
    }


def _backends(runner: Any) -> tuple[Resolved, ...]:
    rows: dict[tuple[str, str, str], list[int]] = {}

    def add(operation: str, phase: str, name: str, layer: int | None) -> None:
        rows.setdefault((operation, phase, name), []).extend([] if layer is None else [layer])

    for path, module in runner.model.named_modules(remove_duplicate=False):
        for operation, phase, name in _implementations(runner, module):
            add(operation, phase, name, layer_of(path))
    for operation, name in _shared(runner):
        add(operation, "", name, None)
    return tuple(
        Resolved(operation=operation, phase=phase, layers=ranges_of(layers), runs=name)
        for (operation, phase, name), layers in rows.items()
    )


def _implementations(runner: Any, module: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the implementations that a module runs: operation, phase and name."""
    kind = type(module).__name__
    if operation := _BY_LAYER.get(kind):
        for phase in ("extend", "decode"):
            yield operation, phase, _attention(runner, phase)
    method = getattr(module, "quant_method", None)
    if method is not None:
        chosen = [type(scheme).__name__] if (scheme := getattr(module, "scheme", None)) is not None else []
        chosen += _chosen(method)
        yield _quantised(kind), "", type(method).__name__ + (f" ({', '.join(chosen)})" if chosen else "")
    # A method may be a module too; its children are named with its layer.
    if "quant_method" not in vars(module) and not kind.endswith("Method") and (forward := _forward_of(module)):
        yield kind, "", forward


def _forward_of(operation: Any) -> str:
    """Name the method that an operation runs on this device, perhaps chosen at its first call, or return an empty string."""
    if not hasattr(operation, "_forward_method"):
        return ""
    method = operation._forward_method or getattr(operation, "_resolve_forward_method", lambda: None)()
    return "" if method is None else str(getattr(method, "__name__", method))


# Attributes of a quantisation method that hold the function which multiplies, as SGLang chose it for "auto".
_PRODUCTS = ("w8a8_block_fp8_linear", "w8a8_mxfp8_linear")


def _chosen(method: Any) -> Iterator[str]:
    """Yield a quantisation method's choices where an argument says "auto": the runner of experts, the function of a product."""
    for name in _PRODUCTS:
        if function := getattr(method, name, None):
            yield getattr(getattr(function, "func", function), "__name__", type(function).__name__)
    forward = _forward_of(method)
    runner = getattr(method, "_aiter_runner", None) or getattr(method, "runner", None)
    if forward.endswith(("_cpu", "_native")):  # it does not ask the runner
        yield forward
    elif backend := getattr(runner, "runner_backend", None):
        yield str(getattr(backend, "value", backend))
    dense = getattr(sys.modules.get(type(method).__module__), "get_bf16_gemm_backend", None)
    if dense and type(method).__name__ == "UnquantizedLinearMethod" and not dense().is_auto():
        yield dense().value


def _quantised(kind: str) -> str:
    """Name the operation whose numbers a module's quantisation method decides, by the module's class."""
    if kind in _BY_LAYER:
        return "kv cache"  # an attention layer has no weights: its method scales K and V
    if "MoE" in kind:
        return "moe"
    return "embedding" if "Embedding" in kind or "LMHead" in kind else "gemm"


def _attention(runner: Any, phase: str) -> str:
    """Name the attention backend of a phase as SGLang does; a kernel by its title."""
    name = getattr(runner, f"{'prefill' if phase == 'extend' else 'decode'}_attention_backend_str", None)
    return str(name or type(runner.attn_backend).__name__)


def _shared(runner: Any) -> Iterator[tuple[str, str]]:
    """Yield implementations that belong to no layer: operation and name."""
    settled = resolved_arguments(runner.server_args)
    yield "sampler", settled.get("sampling_backend", "")
    if settled.get("moe_runner_backend"):
        yield "moe runner", settled["moe_runner_backend"]
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        yield "all-reduce", "none: one process"
        return
    custom = [
        type(getattr(group, name)).__name__
        for name in ("ca_comm", "pynccl_comm", "qr_comm", "torch_symm_mem_comm", "pymscclpp_comm")
        if getattr(group, name, None) is not None and not getattr(getattr(group, name), "disabled", False)
    ]
    yield "all-reduce", ", ".join(custom) or "torch.distributed"


def resolved_arguments(server_args: Any) -> dict[str, str]:
    """Return the arguments of a server as SGLang resolved them, leaf by leaf.

    Objects that show only their address, such as a parsed configuration, are left out.
    """
    settled = _settled(server_args).items()
    shown = {key: value for key, value in settled if getattr(type(value), "__repr__", None) != object.__repr__}
    return arguments.flat({key: value for key, value in shown.items() if not key.startswith("_")})


def _settled(server_args: Any) -> Mapping[str, Any]:
    read: Mapping[str, Any] = (
        server_args.resolved_dict() if hasattr(server_args, "resolved_dict") else vars(server_args)
    )
    return read
