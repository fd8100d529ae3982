"""The arguments of a server of transformers. They say how it computes, which no other engine's arguments can contradict."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from assay.harness.engines.arguments import differing, leaves
from assay.harness.evidence.envelope import EngineLimits


def settled(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the server says of itself, which never changes."""
    return dict(info)


def flat(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments as text, by name."""
    return leaves(arguments)


def differences(
    reference: Mapping[str, Any], candidate: Mapping[str, Any], asked: Collection[str] = ()
) -> dict[str, tuple[str, str]]:
    """Return the arguments that differ beyond the settings `asked` to differ: (reference, candidate) by name."""
    model = {"model_path"} if "model" in asked else set()
    return differing(flat(reference), flat(candidate), {name.lstrip("-").replace("-", "_") for name in asked} | model)


def limits_of(arguments: Mapping[str, Any], context: int) -> EngineLimits:
    """Return a server's limits: those of the model, as it neither splits prompts nor batches requests."""
    return EngineLimits(context_tokens=context, chunk_tokens=None, page_tokens=1, prefix_cache=True, mixed=False)


def numerics(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return what decides the numbers of any engine, in neutral names."""
    return {
        "dtype": str(arguments["dtype"]), "kv_cache_dtype": "auto", "quantization": "none", "tensor_parallel": "1",
    }  # fmt: skip
