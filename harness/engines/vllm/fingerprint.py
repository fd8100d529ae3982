"""The fingerprint of a vLLM worker, taken from its model runner: RoPE tables, weights, resolved implementations, settings."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from assay.evals.probe_texts import CHATS, TEXTS
from assay.harness.engines.inside.control import EVIDENCE
from assay.harness.engines.inside.process_fingerprint import describe_process, rank
from assay.harness.engines.vllm.meter import served_by
from assay.harness.evidence.fingerprint import OF_PROCESS, Fingerprint, Resolved, Tokens
from assay.harness.fingerprint.folder_readings import (
    beside_config,
    generation_of,
    overridden,
    settings_of,
    tokens_of,
)
from assay.harness.fingerprint.in_model import dtype_name, held_floats, layer_of, ranges_of, ropes_of
from assay.harness.fingerprint.weights import weights_of


def describe(runner: Any) -> Fingerprint:
    """Take the fingerprint of the process of a model runner."""
    config, model = runner.vllm_config, runner.get_model()
    folder = str(config.model_config.model)
    parts: dict[str, Callable[[], Any]] = {
        "tokens": lambda: _tokens(config.model_config),
        "generation": lambda: generation_of(folder),
        "rope": lambda: ropes_of(model, _config(config.model_config)),
        "config": lambda: _settings(config.model_config) | held_floats(model),
        "weights": lambda: weights_of(model),
        "adapters": lambda: _none_of(config.lora_config, "adapters of a vLLM server are not read"),
        "quantisation": lambda: _quantisation(runner, model),
        "experts": lambda: _none_of(config.parallel_config.enable_eplb, "vLLM's balanced experts are not read"),
        "backends": lambda: _backends(config, model),
    }
    import vllm

    return describe_process("vllm", vllm.__version__, folder, str(runner.device), parts)


def write(runner: Any, label: str) -> str:
    """Write the fingerprint of a worker's process into the server's folder under a label, and return the engine's name."""
    made = describe(runner)
    OF_PROCESS.write(Path(os.environ[EVIDENCE]), made, process=f"{label}-{rank():04}")
    return made.engine


def _tokens(model: Any) -> Tokens:
    """Have a tokenizer, loaded as the server loads its own, make the ids of the corpus."""
    from transformers import AutoTokenizer

    path = str(model.tokenizer)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=bool(model.trust_remote_code))
    return Tokens(**tokens_of(tokenizer, TEXTS, CHATS, path))


def _config(model: Any) -> Mapping[str, Any]:
    """Read the model's ``config.json`` as it is on disk, with the overrides of ``--hf-overrides``."""
    path = Path(str(model.model)) / "config.json"
    overrides = model.hf_overrides if isinstance(model.hf_overrides, dict) else {}
    return overridden(json.loads(path.read_text()) if path.is_file() else {}, overrides)


def _settings(model: Any) -> dict[str, str]:
    folder = Path(str(model.model))
    beside = beside_config(str(folder), code=folder.is_dir() and bool(model.trust_remote_code))
    return settings_of(model.hf_config.to_dict() | beside)


def _none_of(given: Any, why: str) -> dict[str, str]:
    """Return what a model has without a feature, or raise if it has the feature."""
    if given:
        raise NotImplementedError(why)
    return {}


def _quantisation(runner: Any, model: Any) -> dict[str, str]:
    asked = _config(runner.vllm_config.model_config).get("quantization_config") or {}
    scheme = {f"checkpoint.{key}": json.dumps(value, sort_keys=True) for key, value in asked.items()}
    scheme["method"] = str(runner.vllm_config.model_config.quantization or "")
    scheme["weights"] = dtype_name(runner.vllm_config.model_config.dtype)
    scheme["kv cache"] = dtype_name(getattr(runner, "kv_cache_dtype", None))
    scales = [
        f"{float(layer._k_scale_float):g}/{float(layer._v_scale_float):g}"
        for layer in model.modules()
        if getattr(layer, "_k_scale_float", None) is not None
    ]
    scheme["kv scales"] = " ".join(scales) if set(scales) - {"1/1"} else ""
    return {name: value for name, value in scheme.items() if value}


def _backends(config: Any, model: Any) -> tuple[Resolved, ...]:
    rows: dict[tuple[str, str, str], list[int]] = {}

    def add(path: str, operation: str, name: str, phase: str = "") -> None:
        layer = layer_of(path)
        rows.setdefault((operation, phase, name), []).extend([] if layer is None else [layer])

    for path, layer in config.compilation_config.static_forward_context.items():
        for phase, name in _attention(layer):
            add(path, "attention", name, phase)
    for path, module in model.named_modules():
        kind, method = type(module).__name__, getattr(module, "quant_method", None)
        if method is not None and "Attention" not in kind:
            of = "embedding" if "Embedding" in kind or "LMHead" in kind else "moe" if "MoE" in kind else "gemm"
            add(path, of, type(method).__name__)
        elif (forward := getattr(module, "_forward_method", None)) is not None:
            add(path, kind, str(getattr(forward, "__name__", forward)))
    return tuple(
        Resolved(operation=operation, phase=phase, layers=ranges_of(layers), runs=name)
        for (operation, phase, name), layers in rows.items()
    )


def _attention(layer: Any) -> Iterator[tuple[str, str]]:
    """Yield each phase and who computes it: a kernel, or a backend with the instruction set that it computes with on a CPU."""
    isa = getattr(getattr(layer, "impl", None), "isa", "") or getattr(layer, "isa", "")
    for phase, name in served_by(layer).items():
        own = isa and name == layer.attn_backend.get_name()
        yield phase, f"{name} ({isa})" if own else name
