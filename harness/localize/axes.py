"""The values of a matrix's axes under which calls are refused or raise, in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

Conditions = Mapping[str, str]
"""Axis -> value of one call, as `assay.harness.attention.matrix.Case.condition`."""


@dataclass(frozen=True)
class Split:
    """The values of an axis that some call of interest has, those that only others have, and those of calls that were not made."""

    name: str
    inside: tuple[str, ...]
    outside: tuple[str, ...]
    unknown: tuple[str, ...] = ()


def by_axis(
    some: Sequence[Conditions], others: Sequence[Conditions], not_made: Sequence[Conditions] = ()
) -> list[Split]:
    """Split the values of each axis; numbers in order of size, words in order of appearance."""
    everything = [*some, *others]
    splits = []
    for name in dict.fromkeys(name for conditions in everything for name in conditions):
        values = sorted(
            dict.fromkeys(conditions[name] for conditions in everything if name in conditions), key=_by_size
        )
        inside = {conditions.get(name) for conditions in some}
        unknown = dict.fromkeys(conditions[name] for conditions in not_made if conditions[name] not in values)
        splits.append(
            Split(
                name,
                tuple(v for v in values if v in inside),
                tuple(v for v in values if v not in inside),
                tuple(unknown),
            )
        )
    return splits


def _by_size(value: str) -> tuple[int, str]:
    # Words compare equal, and sorted() is stable.
    return (int(value), "") if value.isdecimal() else (-1, "")


def confining(
    some: Sequence[Conditions], others: Sequence[Conditions], not_made: Sequence[Conditions] = ()
) -> list[Split]:
    """Find one axis, else two, whose values cover all calls of interest and none of the others.

    Of several, the choice with the fewest values: the simplest explanation. Empty if there are no others, or no axis or pair of
    axes separates them. Axes with a value that only calls have which were not made are left out with these.
    """
    if not others:
        return []
    narrow = [axis for axis in by_axis(some, others, not_made) if axis.inside and axis.outside and not axis.unknown]
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


def words(axes: Collection[Split]) -> str:
    """Describe the axes: "head_dim is 128 and dtype is not float32"; whichever values are fewer."""
    return " and ".join(
        f"{axis.name} is not {' or '.join(axis.outside)}"
        if len(axis.outside) < len(axis.inside)
        else f"{axis.name} is {' or '.join(axis.inside)}"
        for axis in axes
    )
