"""Differences between two servers' arguments, beyond those that must differ."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from assay.harness.evidence.envelope import EngineLimits
from assay.harness.sides import hide, hide_flags, is_secret

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
ABSENT = "absent"


def settled(info: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce a server's ``/server_info`` to the fields that stay the same while it runs, without its secrets."""
    return {key: _plain(key, value) for key, value in info.items() if key not in _VOLATILE | _OWN_KEYS}


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


def _plain(name: str, value: Any) -> Any:
    """Return an argument without secrets, nested ones included."""
    if isinstance(value, Mapping):
        return {key: _plain(str(key), inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(name, inner) for inner in value]
    if name == "launch_command" and isinstance(value, str):
        return " ".join(hide_flags(value.split(" ")))
    if isinstance(value, str) or (is_secret(name) and not isinstance(value, bool | None)):
        return hide(name, str(value))
    return value


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
    return {
        name: (left.get(name, ABSENT), right.get(name, ABSENT))
        for name in sorted(left.keys() | right.keys())
        if left.get(name, ABSENT) != right.get(name, ABSENT) and name.partition(".")[0] not in treated
    }


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


def flat(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a server's arguments leaf by leaf, named with dots, without its identity and its state."""
    leaves: dict[str, str] = {}
    for key, value in arguments.items():
        if not prefix and key in _VOLATILE | _OWN_KEYS | _IDENTITY_KEYS:
            continue
        if isinstance(value, Mapping) and value:
            leaves |= flat(value, f"{prefix}{key}.")
        else:
            plain = _plain(key, value)
            leaves[f"{prefix}{key}"] = (
                plain if isinstance(plain, str) else json.dumps(plain, sort_keys=True, default=str)
            )
    return leaves
