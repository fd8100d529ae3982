"""The known signatures, and their recognition."""

from __future__ import annotations

from typing import Any

from assay.harness.attention.adapters.adapter import Adapted, Adapter, Parameters
from assay.harness.attention.adapters.flash_attn import BATCHED_KVCACHE, FLASH_ATTN, PACKED_KVCACHE, UNIFIED_ATTENTION
from assay.harness.attention.adapters.flashinfer import PAGED_DECODE, PAGED_PREFILL, RAGGED_PREFILL
from assay.harness.attention.adapters.paged import PAGED_CACHE, PAGED_CACHE_DECODE
from assay.harness.attention.adapters.sdpa import SDPA
from assay.harness.attention.adapters.sglang_triton import DECODE, EXTEND
from assay.harness.attention.call import KernelRefused
from assay.harness.text import did_you_mean

_ADAPTERS: tuple[Adapter, ...] = (
    FLASH_ATTN, SDPA, UNIFIED_ATTENTION, EXTEND, DECODE, PAGED_PREFILL, RAGGED_PREFILL, PAGED_DECODE, PACKED_KVCACHE,
    BATCHED_KVCACHE, PAGED_CACHE, PAGED_CACHE_DECODE,
)  # fmt: skip
"""All of them. The first whose parameters a function has is its own."""


def adapted(function: Any, name: str = "") -> Adapted:
    """Make a kernel of a function with a known signature.

    Args:
        function: the function, or a class with `plan` and `run`.
        name: name of its signature, or an empty string to recognise it by its parameters. A function of ``**kwargs`` must be named.

    Raises:
        KernelRefused: no signature has this name, or the function has none of them.
    """
    names = tuple(dict.fromkeys(adapter.name for adapter in _ADAPTERS))
    if name and name not in names:
        near = did_you_mean(name, names).rstrip("?")
        raise KernelRefused(f"no signature is named {name!r}{near and ', ' + near}; known are {', '.join(names)}")
    parameters = Parameters.of(function)
    tried = [adapter for adapter in _ADAPTERS if name in ("", adapter.name)]
    for adapter in tried:
        named = name and parameters.any_name
        if not adapter.unknown(parameters) and (named or not adapter.missing(parameters)):
            return Adapted(function, adapter, parameters)
    nearest = min(tried, key=lambda adapter: len(adapter.missing(parameters)) / len(adapter.passes))
    missing, unknown = nearest.missing(parameters), nearest.unknown(parameters)
    why = [f"it lacks {', '.join(missing)}"] if missing else []
    why += [f"it requires {', '.join(unknown)}, which that does not have"] if unknown else []
    raise KernelRefused(f"of the signatures {', '.join(names)}, the nearest is {nearest.name}: {' and '.join(why)}")
