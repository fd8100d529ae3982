"""The calls that every commit's kernel computes: recorded calls or the op-level matrix, chosen once and saved for the probes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
from pydantic import TypeAdapter
from safetensors import safe_open

from assay.harness.attention.call import INPUTS, AttentionCall, CallSpec
from assay.harness.attention.matrix import cases
from assay.harness.conditions import CACHED_PREFIX
from assay.harness.errors import UsageError
from assay.harness.files import write_whole

FILE = "calls.safetensors"


ProbeCall = tuple[AttentionCall, dict[str, str]]
"""A call and its condition, axis -> value."""
_LEGENDS = TypeAdapter(list[tuple[CallSpec, dict[str, str]]])
"""What the calls of a file are, beside their tensors."""


def matrix_calls(seed: int) -> list[ProbeCall]:
    """Make the op-level matrix: calls on synthetic data, those of the seed case first."""
    return [(case.make(), case.condition) for case in cases(seed=seed)]


def recorded_calls(calls: Sequence[AttentionCall]) -> list[ProbeCall]:
    """Read the calls of a replay pack; their condition is phase, bucket of the longest cached prefix, and batch size."""
    return [(call, _condition(call)) for call in sorted(calls, key=lambda call: (call.layer, call.phase))]


def choose_calls(calls: Sequence[ProbeCall], conditions: Sequence[str], limit: int) -> list[ProbeCall]:
    """Select the calls to probe with.

    Args:
        calls: all calls.
        conditions: ``axis=value``; a call must meet one value of each axis that is named.
        limit: at most this many, spread evenly; 0 for all.

    Raises:
        UsageError: an axis or value does not exist, or no call is left.
    """
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
    return {
        "phase": call.phase,
        "prefix": CACHED_PREFIX.label(max(call.prefixes)),
        "batch": "1" if len(call.lens_q) == 1 else "> 1",
    }


def write_calls(path: Path, calls: Sequence[ProbeCall]) -> None:
    """Save calls for the probes, which then need neither the pack nor the matrix."""
    tensors = {
        f"{i}.{name}": tensor.contiguous() for i, (call, _) in enumerate(calls) for name, tensor in call.tensors.items()
    }
    legends = _LEGENDS.dump_json([(call.spec, condition) for call, condition in calls]).decode()
    write_whole(path, safetensors.torch.save(tensors, {"legends": legends}))


def read_calls(path: Path, device: str) -> list[ProbeCall]:
    """Load what `write_calls` saved, onto a device."""
    with safe_open(path, "pt", device=device) as file:
        names = set(file.keys())
        return [
            (
                AttentionCall(**{n: file.get_tensor(f"{i}.{n}") for n in INPUTS if f"{i}.{n}" in names}, spec=spec),
                condition,
            )
            for i, (spec, condition) in enumerate(_LEGENDS.validate_json(file.metadata()["legends"]))
        ]
