"""Measurement of a commit -> good, bad or skip; and what changed between two of them."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.drivers.bisect.commits.state import BisectSpec, Change, Measurement, Outcome, ProbeOutcome

_MOST_PROBES = 5
_LEAD = 2


def settled(outcomes: Sequence[Outcome], spec: BisectSpec) -> Outcome | None:
    """Classify a commit by the outcomes of its probes, or return None if it must be probed again.

    One outcome must lead by two. An accuracy run repeats its questions until they decide, so one run is enough. A commit that
    cannot be probed, or that no outcome leads clearly after `_MOST_PROBES`, is skipped.
    """
    lead = outcomes.count("bad") - outcomes.count("good")
    if abs(lead) >= (1 if spec.measure_with == "accuracy" else _LEAD):
        return "bad" if lead > 0 else "good"
    return "skip" if "skip" in outcomes or len(outcomes) >= _MOST_PROBES else None


def outcome_of(measurement: Measurement, spec: BisectSpec) -> ProbeOutcome:
    """Classify a measurement."""
    if measurement.status != "measured":
        bad = measurement.status in ("raised", "died") and spec.raises == "bad"
        return ProbeOutcome(outcome="bad" if bad else "skip", status=measurement.status, reason=measurement.reason)
    if measurement.regression is not None:
        return ProbeOutcome(outcome="bad" if measurement.regression else "good")
    if not measurement.rows:
        return ProbeOutcome(outcome="skip", status="no call")
    row = max(measurement.rows, key=lambda row: max(row.own) / row.bound)
    worst, own = max(row.own) / row.bound, max(row.own)
    where = f"{row.call}, head {row.own.index(own)}"
    return ProbeOutcome(outcome="bad" if worst > 1 else "good", worst=worst, own=own, where=where)


def changes(commit: Measurement, before: Measurement | None) -> tuple[Change, ...]:
    """List what fails at a commit but not before it, by layer, head and each axis of the conditions.

    Args:
        commit: measurement of the commit.
        before: measurement of its parent; None if it was not measured.
    """
    failing, earlier = _values(commit, only_failing=True), _values(before, only_failing=True) if before else {}

    def listed(values: set[str]) -> tuple[str, ...]:
        return tuple(sorted(values, key=lambda value: (int(value), "") if value.isdigit() else (-1, value)))

    listed_changes = []
    for axis, values in _values(commit, only_failing=False).items():
        wrong, known = failing.get(axis, set()), earlier.get(axis, set())
        listed_changes.append(
            Change(axis=axis, failing=listed(wrong), values=listed(values), new=listed(wrong - known))
        )
    return tuple(listed_changes)


def _values(measurement: Measurement, *, only_failing: bool) -> dict[str, set[str]]:
    """Group the values of each axis that were measured, or those with a failing call."""
    values: dict[str, set[str]] = {}
    for row in measurement.rows:
        heads = {str(head) for head, own in enumerate(row.own) if not only_failing or own > row.bound}
        for axis, value in row.condition.items():
            values.setdefault(axis, set()).update({value} if heads else ())
        values.setdefault("head", set()).update(heads)
    return values
