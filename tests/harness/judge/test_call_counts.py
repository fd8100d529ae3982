from __future__ import annotations

from typing import Any

from assay.harness.evidence.counters import CallCount
from assay.harness.judge.call_counts import call_summaries
from assay.reports.words import counted_calls


def count(calls: int, **kind: Any) -> CallCount:
    fields = {"backend": "triton", "kernel": "triton", "phase": "decode", "cached_prefix": True} | kind
    return CallCount(**fields, calls_by_layer={0: calls, 1: calls})


def test_ways_of_calling_one_kernel_are_added_up_and_listed() -> None:
    counts = [
        count(3, captured=True, compiled=True),
        count(4, compiled=True),
        count(5),
        count(6, phase="extend", cached_prefix=False),
    ]
    extend, decode = call_summaries(counts)
    assert (extend.calls, extend.calls_with_cached_prefix, extend.layers) == (12, 0, 2)
    assert (decode.calls, decode.calls_in_graphs, decode.calls_compiled) == (24, 6, 14)
    assert counted_calls(decode) == "decode: triton 24 calls, 6 of them in CUDA graphs, 14 of them compiled"
    assert counted_calls(extend) == "extend: triton 12 calls"
