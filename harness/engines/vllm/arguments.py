"""The arguments of vLLM's servers, as ``/server_info`` has them by section, and those that differ beyond the treatment."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from assay.harness.engines.arguments import differing, leaves, plain
from assay.harness.evidence.envelope import EngineLimits

# Arguments of one server: its identity, its addresses, and its state.
_OF_ONE = frozenset({
    "instance_id", "served_model_name", "compilation_time", "encoder_compilation_time", "traced_files", "static_forward_context",
    "enabled_custom_ops", "disabled_custom_ops", "local_cache_dir", "cache_dir", "debug_dump_path", "num_gpu_blocks",
    "kv_cache_size_tokens", "kv_cache_max_concurrency", "effective_attention_block_size", "hf_token",
})  # fmt: skip
_ADDRESS = ("_port", "_port_list", "_ip", "_addr")
# Sections that change no number and that nobody compares.
_BESIDE = frozenset({"observability_config", "profiler_config", "logging_config", "structured_outputs_config"})
# The model, and what vLLM reads from it.
_MODEL_KEYS = frozenset({"model", "tokenizer", "max_model_len", "dtype"})
_BACKEND = "attention_config.backend"


def settled(info: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce a server's ``/server_info`` to the fields that stay the same while it runs, without its secrets."""
    config = info.get("vllm_config", info)
    return {name: _section(value) for name, value in config.items() if name not in _OF_ONE | _BESIDE}


def _section(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return plain("", value)
    kept = {key: inner for key, inner in value.items() if key not in _OF_ONE and not str(key).endswith(_ADDRESS)}
    return {key: plain(str(key), inner) for key, inner in kept.items()}


def flat(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return a server's arguments leaf by leaf, named with dots: "cache_config.block_size"."""
    return leaves(arguments)


def differences(
    reference: Mapping[str, Any], candidate: Mapping[str, Any], asked: Collection[str] = ()
) -> dict[str, tuple[str, str]]:
    """Return the arguments that differ, as (reference, candidate) by name, or nothing if only the treatment differs.

    `asked` names the settings that should differ (`assay.harness.sides.treatment`), beyond the backend.
    """
    left, right = flat(reference), flat(candidate)
    flags = {name.removeprefix("--").removeprefix("no-").replace("-", "_") for name in asked if name.startswith("--")}
    flags |= _MODEL_KEYS if "model" in asked else set()
    treated = {name for name in left | right if flags & set(name.split("."))}
    return differing(left, right, treated | {_BACKEND})


def limits_of(arguments: Mapping[str, Any], context: int) -> EngineLimits:
    """Return a server's limits, by the arguments that it reports; `context` is the model's, in tokens.

    A pass holds prefill and decode sequences together, so calls may always be mixed.
    """
    cache, scheduler = arguments.get("cache_config", {}), arguments.get("scheduler_config", {})
    chunked = scheduler.get("enable_chunked_prefill", True)
    return EngineLimits(
        context_tokens=int(arguments.get("model_config", {}).get("max_model_len") or context),
        chunk_tokens=int(scheduler.get("max_num_batched_tokens") or 0) or None if chunked else None,
        page_tokens=int(cache.get("block_size") or 1),
        prefix_cache=bool(cache.get("enable_prefix_caching", True)),
        mixed=False,  # a call with sequences in both phases is observed as two (`assay.harness.engines.vllm.engine_call`)
    )


def numerics(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return what decides the numbers of any engine, in neutral names."""
    model = arguments.get("model_config", {})
    return {
        "dtype": str(model.get("dtype") or "auto").removeprefix("torch."),
        "kv_cache_dtype": str(arguments.get("cache_config", {}).get("cache_dtype") or "auto"),
        "quantization": str(model.get("quantization") or "none"),
        "tensor_parallel": str(arguments.get("parallel_config", {}).get("tensor_parallel_size") or 1),
    }
