"""What every commit's kernel is asked: recorded calls, or the op-level matrix; chosen once and written down for the probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from safetensors import safe_open

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.matrix import cases
from assay.harness.conditions import CACHED_PREFIX
from assay.harness.errors import UsageError
from assay.harness.files import write_whole
from assay.harness.localize.diagnose import describe

FILE = "calls.safetensors"
_INPUTS = tuple(name for name in TENSORS if name != "reference")


@dataclass(frozen=True)
class ProbeCall:
    """A call and the condition that it stands for, axis -> value in words."""

    call: AttentionCall
    condition: dict[str, str]

    @property
    def name(self) -> str:
        """How tables call it."""
        return describe(self.call)


class _Legend(Record):
    layer: int
    phase: str
    scale: float
    causal: bool
    condition: dict[str, str]


class _Legends(Record):
    calls: tuple[_Legend, ...]


def matrix_calls(seed: int) -> list[ProbeCall]:
    """The op-level matrix: calls on made-up data, those of the seed case first."""
    return [ProbeCall(case.make(), case.condition) for case in cases(seed=seed)]


def recorded_calls(calls: Sequence[AttentionCall]) -> list[ProbeCall]:
    """Calls of a replay pack, with phase, bucket of the longest cached prefix and batch as their condition."""
    return [ProbeCall(call, _condition(call)) for call in sorted(calls, key=lambda call: (call.layer, call.phase))]


def choose_calls(found: Sequence[ProbeCall], conditions: Sequence[str], most: int) -> list[ProbeCall]:
    """Those of some calls that are asked.

    Args:
        found: all calls.
        conditions: ``axis=value``; a call must meet one value of each axis that is named.
        most: at most so many, spread evenly; 0 for all.

    Raises:
        UsageError: no such axis or value, or no call is left.
    """
    wanted: dict[str, set[str]] = {}
    for condition in conditions:
        axis, _, value = condition.partition("=")
        known = sorted({asked.condition[axis] for asked in found if axis in asked.condition})
        if value not in known:
            axes = ", ".join(sorted({a for asked in found for a in asked.condition}))
            raise UsageError(
                f"--condition {condition} holds of no call.",
                f"{axis}= one of {', '.join(known)}" if known else f"axis=value, with one of the axes {axes}",
                "choose another condition",
            )
        wanted.setdefault(axis, set()).add(value)
    met = [asked for asked in found if all(asked.condition.get(axis) in values for axis, values in wanted.items())]
    if not met:
        raise UsageError(
            f"no call meets {' and '.join(conditions)}.", "at least one", "ask for fewer conditions at once"
        )
    return [met[i * len(met) // most] for i in range(most)] if 0 < most < len(met) else met


def _condition(call: AttentionCall) -> dict[str, str]:
    return {
        "phase": call.phase,
        "prefix": CACHED_PREFIX.label(max(call.prefixes)),
        "batch": "1" if len(call.lens_q) == 1 else "> 1",
    }


def write_calls(path: Path, calls: Sequence[ProbeCall]) -> None:
    """Write calls for the probes, which then need neither the pack nor the matrix."""
    tensors = {
        f"{i}.{name}": getattr(asked.call, name).contiguous() for i, asked in enumerate(calls) for name in _INPUTS
    }
    legends = _Legends(
        calls=tuple(
            _Legend(
                layer=a.call.layer, phase=a.call.phase, scale=a.call.scale, causal=a.call.causal, condition=a.condition
            )
            for a in calls
        )
    )
    part = path.with_name(path.name + ".part")
    try:
        safetensors.torch.save_file(tensors, part, {"legends": legends.model_dump_json()})
        part.replace(path)
    except OSError as error:
        raise EvidenceError(f"{path} cannot be written: {error.strerror}.", "room on the disk", "make room") from error


def read_calls(path: Path, device: str) -> list[ProbeCall]:
    """Calls that `write_calls` wrote, on a device."""
    with safe_open(path, "pt", device=device) as file:
        legends = _Legends.model_validate_json(file.metadata()["legends"])
        return [
            ProbeCall(
                AttentionCall(
                    **{name: file.get_tensor(f"{i}.{name}") for name in _INPUTS},
                    scale=one.scale, causal=one.causal, layer=one.layer, phase=one.phase,
                ),
                one.condition,
            )
            for i, one in enumerate(legends.calls)
        ]  # fmt: skip
