"""The calls that every commit's kernel computes: recorded calls or the op-level matrix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.matrix import cases
from assay.harness.checks.replay import choose
from assay.harness.conditions import CACHED_PREFIX
from assay.harness.errors import UsageError
from assay.harness.evidence.pack import read_pack

ProbeCall = tuple[AttentionCall, dict[str, str]]
"""A call and its condition, axis -> value."""


def chosen_calls(pack: str, conditions: Sequence[str], limit: int) -> list[ProbeCall]:
    """Make the calls to probe with, the same at every commit.

    Args:
        pack: folder of a replay pack; empty for the op-level matrix.
        conditions: ``axis=value``; a call must meet one value of each axis that is named.
        limit: at most this many, spread evenly; 0 for all.

    Raises:
        UsageError: an axis or value does not exist, or no call is left.
    """
    if pack:
        recorded = [case.call for case in choose(read_pack(Path(pack)))]
        calls = [(call, _condition(call)) for call in sorted(recorded, key=lambda call: (call.layer, call.phase))]
    else:
        calls = [(case.make(), case.condition) for case in cases(seed=0)]
    wanted: dict[str, set[str]] = {}
    for asked in conditions:
        axis, _, value = asked.partition("=")
        known = sorted({condition[axis] for _, condition in calls if axis in condition})
        if value not in known:
            axes = ", ".join(sorted({axis for _, condition in calls for axis in condition}))
            raise UsageError(
                f"--condition {asked} matches no call.",
                f"{axis}= one of {', '.join(known)}" if known else f"axis=value, with axis one of {axes}",
                "choose another condition",
            )
        wanted.setdefault(axis, set()).add(value)
    met = [call for call in calls if all(call[1].get(axis) in values for axis, values in wanted.items())]
    if not met:
        raise UsageError(f"no call meets {' and '.join(conditions)}.", "at least one", "give fewer conditions")
    return [met[i * len(met) // limit] for i in range(limit)] if 0 < limit < len(met) else met


def _condition(call: AttentionCall) -> dict[str, str]:
    prefix, batch = CACHED_PREFIX.label(max(call.prefixes)), "1" if len(call.lens_q) == 1 else "> 1"
    return {"phase": call.phase, "prefix": prefix, "batch": batch}
