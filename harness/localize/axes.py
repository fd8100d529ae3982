"""Finds the values of a matrix's axes under which calls are refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

Conditions = Mapping[str, str]
"""Axis -> value of one call, as `assay.harness.attention.matrix.Case.condition`."""


@dataclass(frozen=True)
class Split:
    """The values of an axis that calls of interest have, and the values that only other calls have."""

    name: str
    inside: tuple[str, ...]
    outside: tuple[str, ...]


def by_axis(some: Sequence[Conditions], others: Sequence[Conditions]) -> list[Split]:
    """Split the values of each axis: numbers by size, words by first appearance."""
    everything = [*some, *others]
    splits = []
    for name in dict.fromkeys(name for conditions in everything for name in conditions):
        values = sorted(
            dict.fromkeys(conditions[name] for conditions in everything if name in conditions), key=_by_size
        )
        inside = {conditions.get(name) for conditions in some}
        splits.append(Split(name, tuple(v for v in values if v in inside), tuple(v for v in values if v not in inside)))
    return splits


def _by_size(value: str) -> tuple[int, str]:
    # Words compare equal, and sorted() is stable.
    return (int(value), "") if value.isdecimal() else (-1, "")


def confining(some: Sequence[Conditions], others: Sequence[Conditions]) -> list[Split]:
    """Find one axis, else two, whose values cover all calls of interest and none of the others.

    Returns:
        The choice with the fewest values, which is the simplest explanation; or an empty list if there are no other calls, or no
        axis or pair of axes separates them.
    """
    if not others:
        return []
    narrow = [axis for axis in by_axis(some, others) if axis.inside and axis.outside]
    for count in (1, 2):
        exact = [
            chosen
            for chosen in combinations(narrow, count)
            if not any(holds(chosen, conditions) for conditions in others)
        ]
        if exact:
            return list(min(exact, key=lambda chosen: sum(len(a.inside) + len(a.outside) for a in chosen)))
    return []


def holds(axes: Collection[Split], conditions: Conditions) -> bool:
    """Return True if a call has a value of interest on each of these axes."""
    return all(conditions.get(axis.name) in axis.inside for axis in axes)
