"""The arguments of SGLang's servers, and those that differ beyond the treatment."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from assay.harness.engines.arguments import differing, leaves, plain
from assay.harness.evidence.envelope import EngineLimits

# A server's state, not its arguments. max_total_num_tokens follows from the memory that was free at start-up, which depends on
# the other server; the flag behind it, max_total_tokens, is compared. hicache_object_layout repeats arguments, such as page_size.
_VOLATILE = frozenset({"internal_states", "startup_time", "status", "max_total_num_tokens", "hicache_object_layout"})
# Keys with which requests are sent; a server started by assay has its own.
_OWN_KEYS = frozenset({"api_key", "admin_api_key"})
# A server's identity: its address and its name.
_IDENTITY_KEYS = frozenset({"port", "served_model_name", "launch_command"})
# SGLang may fill these in with the server's own backend: then they are the requested difference, not a second one.
_TREATMENT_KEYS = ("prefill_attention_backend", "decode_attention_backend", "mm_attention_backend")
# Arguments that name a model, or that the engine reads from it.
_MODEL_KEYS = {"model_path", "tokenizer_path", "context_length", "dtype"}


def settled(info: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce a server's ``/server_info`` to the fields that stay the same while it runs, without its secrets."""
    return {key: plain(key, value) for key, value in info.items() if key not in _VOLATILE | _OWN_KEYS}


def limits_of(arguments: Mapping[str, Any], context: int) -> EngineLimits:
    """Return a server's limits, by the arguments that it reports; `context` is the model's, in tokens."""
    chunk = int(arguments.get("chunked_prefill_size") or 0)
    return EngineLimits(
        context_tokens=int(arguments.get("context_length") or context),
        chunk_tokens=chunk if chunk > 0 else None,
        page_tokens=int(arguments.get("page_size") or 1),
        prefix_cache=not arguments.get("disable_radix_cache"),
        mixed=bool(arguments.get("enable_mixed_chunk")),
    )


def numerics(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return what decides the numbers of any engine, in neutral names."""
    return {
        "dtype": str(arguments.get("dtype") or "auto").removeprefix("torch."),
        "kv_cache_dtype": str(arguments.get("kv_cache_dtype") or "auto"),
        "quantization": str(arguments.get("quantization") or "none"),
        "tensor_parallel": str(arguments.get("tp_size") or 1),
    }


def differences(
    reference: Mapping[str, Any], candidate: Mapping[str, Any], asked: Collection[str] = ()
) -> dict[str, tuple[str, str]]:
    """Return the arguments that differ, as (reference, candidate) by name, or nothing if only the treatment differs.

    `asked` names the settings that should differ (`assay.harness.sides.treatment`), beyond the backend. Nested arguments
    are compared leaf by leaf and named with dots: ``cuda_graph_config.decode.backend``. An argument that SGLang derives from the
    backend, for example its page size, is listed: it is a second difference.
    """
    left, right = flat(_without_treatment(reference)), flat(_without_treatment(candidate))
    treated = _arguments_of(asked)
    return differing(left, right, {name for name in left | right if name.partition(".")[0] in treated})


def _arguments_of(asked: Collection[str]) -> set[str]:
    """Return the names of the arguments that settings of a side become: "--page-size" is "page_size"."""
    flags = {name.removeprefix("--").replace("-", "_") for name in asked if name.startswith("--")}
    version = set() if {"interpreter", "packages"}.isdisjoint(asked) else {"version"}  # of SGLang itself
    return flags | version | (_MODEL_KEYS if "model" in asked else set())


def _without_treatment(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments without the server's own backend, and with null for those that only repeat it."""
    own = arguments.get("attention_backend")
    others = {key: value for key, value in arguments.items() if key != "attention_backend"}
    return {key: None if key in _TREATMENT_KEYS and value == own else value for key, value in others.items()}


def flat(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return a server's arguments leaf by leaf, named with dots, without its identity and its state."""
    return leaves(arguments, _VOLATILE | _OWN_KEYS | _IDENTITY_KEYS)
