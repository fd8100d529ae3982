"""The calls that every commit's kernel computes: recorded calls or the op-level matrix."""

from __future__ import annotations

from pathlib import Path

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.matrix import cases
from assay.harness.checks.replay import choose
from assay.harness.conditions import CACHED_PREFIX
from assay.harness.evidence.pack import read_pack

ProbeCall = tuple[AttentionCall, dict[str, str]]
"""A call and its condition, axis -> value."""


def chosen_calls(pack: str, limit: int) -> list[ProbeCall]:
    """Make the calls to probe with, the same at every commit.

    Args:
        pack: folder of a replay pack; empty for the op-level matrix.
        limit: at most this many, spread evenly; 0 for all.
    """
    if pack:
        recorded = [case.call for case in choose(read_pack(Path(pack)))]
        calls = [(call, _condition(call)) for call in sorted(recorded, key=lambda call: (call.layer, call.phase))]
    else:
        calls = [(case.make(), case.condition) for case in cases(seed=0)]
    return [calls[i * len(calls) // limit] for i in range(limit)] if 0 < limit < len(calls) else calls


def _condition(call: AttentionCall) -> dict[str, str]:
    prefix, batch = CACHED_PREFIX.label(max(call.prefixes)), "1" if len(call.lens_q) == 1 else "> 1"
    return {"phase": call.phase, "prefix": prefix, "batch": batch}
