"""Measurement of a commit -> good, bad or skip; and what changed between two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from assay.harness.drivers.bisect.commits.state import (
    BisectSpec,
    CallErrors,
    Change,
    Measurement,
    Outcome,
    ProbeOutcome,
)
from assay.harness.text import percent

MOST_PROBES = 5
_LEAD = 2
# With --against good: the largest acceptable multiple of the good revision's own error.
_TIMES = 2.0


def settled(outcomes: Sequence[Outcome], spec: BisectSpec) -> Outcome | None:
    """Classify a commit by the outcomes of its probes, or return None if it must be probed again.

    One outcome must lead by two. An accuracy run repeats its questions until they decide, so one run is enough. A commit that
    cannot be probed, or that no outcome leads clearly after `MOST_PROBES`, is skipped.
    """
    lead = outcomes.count("bad") - outcomes.count("good")
    if abs(lead) >= (1 if spec.measure_with == "accuracy" else _LEAD):
        return "bad" if lead > 0 else "good"
    return "skip" if "skip" in outcomes or len(outcomes) >= MOST_PROBES else None


def outcome_of(measurement: Measurement, spec: BisectSpec, good: Sequence[Measurement]) -> ProbeOutcome:
    """Classify a measurement.

    Args:
        measurement: the measurement.
        spec: the limits that apply.
        good: measurements of the good revision, needed where `spec.against` is "good".
    """
    if measurement.status in ("raised", "died") and spec.raises == "bad":
        return ProbeOutcome(outcome="bad", reason=f"{measurement.status}: {measurement.reason}")
    if measurement.status != "measured":
        return ProbeOutcome(outcome="skip", reason=f"{measurement.status}: {measurement.reason}")
    if measurement.regression is not None:
        return ProbeOutcome(outcome="bad" if measurement.regression else "good")
    ratios = [
        (ratio, row, head) for row, heads in _multiples(measurement, spec, good) for head, ratio in enumerate(heads)
    ]
    if not ratios:
        return ProbeOutcome(outcome="skip", reason="no call was computed")
    worst, row, head = max(ratios, key=lambda ratio: ratio[0])
    where = f"{row.call}, head {head}: own error {percent(row.own[head])}"
    return ProbeOutcome(outcome="bad" if worst > 1 else "good", worst=worst, where=where)


def _multiples(
    measurement: Measurement, spec: BisectSpec, good: Sequence[Measurement]
) -> list[tuple[CallErrors, tuple[float, ...]]]:
    """Compute the own error of each call and head, as a multiple of its limit; above 1 it is out of bounds.

    Against the good revision, the limit is `_TIMES` its largest own error for that call and head, but at least what rounding
    explains: summing in another order is no regression.
    """
    known = _largest(good) if spec.against == "good" else {}
    by_row = []
    for row in measurement.rows:
        before = known.get(row.number)
        limits = [row.bound] * len(row.own) if before is None else [max(_TIMES * e, row.rounding) for e in before]
        by_row.append((row, tuple(own / limit for own, limit in zip(row.own, limits, strict=True))))
    return by_row


def _largest(measurements: Sequence[Measurement]) -> Mapping[int, list[float]]:
    largest: dict[int, list[float]] = {}
    for row in (row for measurement in measurements for row in measurement.rows):
        before = largest.get(row.number, list(row.own))
        largest[row.number] = [max(pair) for pair in zip(before, row.own, strict=True)]
    return largest


def changes(
    commit: Measurement, before: Measurement | None, spec: BisectSpec, good: Sequence[Measurement]
) -> tuple[Change, ...]:
    """List what fails at a commit but not before it, by layer, head and each axis of the conditions.

    Args:
        commit: measurement of the commit.
        before: measurement of its parent; None if it was not measured.
        spec: the limits that apply.
        good: measurements of the good revision.
    """
    failing, values = _failing(commit, spec, good)
    earlier = _failing(before, spec, good)[0] if before is not None else {}
    return tuple(
        Change(
            axis=axis,
            failing=tuple(v for v in all_values if v in failing.get(axis, ())),
            values=all_values,
            new=tuple(v for v in all_values if v in failing.get(axis, ()) and v not in earlier.get(axis, ())),
        )
        for axis, all_values in values.items()
    )


def _failing(
    measurement: Measurement, spec: BisectSpec, good: Sequence[Measurement]
) -> tuple[dict[str, set[str]], dict[str, tuple[str, ...]]]:
    """Group by axis the values with a failing call, and all values."""
    failing: dict[str, set[str]] = {}
    values: dict[str, set[str]] = {}
    for row, heads in _multiples(measurement, spec, good):
        out = [head for head, ratio in enumerate(heads) if ratio > 1]
        axes = {"layer": [str(row.layer)], **{axis: [value] for axis, value in row.condition.items()}}
        for axis, named in {**axes, "head": [str(h) for h in range(len(heads))]}.items():
            values.setdefault(axis, set()).update(named)
        for axis, named in {**axes, "head": [str(h) for h in out]}.items():
            if out:
                failing.setdefault(axis, set()).update(named)
    return failing, {axis: tuple(sorted(seen, key=_natural)) for axis, seen in values.items()}


def _natural(value: str) -> tuple[int, str]:
    return (int(value), "") if value.isdigit() else (-1, value)
