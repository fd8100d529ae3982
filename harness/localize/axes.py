"""Under which values of a matrix's axes something fails: the condition of whole calls, in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

Conditions = Mapping[str, str]
"""Axis -> value of one call, as `assay.harness.attention.matrix.Case.condition`."""


@dataclass(frozen=True)
class Axis:
    """What became of the calls by one axis.

    Attributes:
        name: the axis.
        failing: value -> (calls that fail, calls), of the values with a failing call, in order of first appearance.
        right: values without one.
    """

    name: str
    failing: dict[str, tuple[int, int]]
    right: tuple[str, ...]


def by_axis(failing: Sequence[Conditions], right: Sequence[Conditions]) -> list[Axis]:
    """The calls by each axis, values in order (numbers by size, words as they come)."""
    everything = [*failing, *right]
    names = dict.fromkeys(name for one in everything for name in one)
    found = []
    for name in names:
        values = sorted(dict.fromkeys(one[name] for one in everything if name in one), key=_by_size)
        counts = {
            value: tuple(sum(one.get(name) == value for one in some) for some in (failing, everything))
            for value in values
        }
        bad = {value: (wrong, all_) for value, (wrong, all_) in counts.items() if wrong}
        found.append(Axis(name, bad, tuple(value for value in values if value not in bad)))
    return found


def _by_size(value: str) -> tuple[int, str]:
    # Words have no order of their own: sorted() keeps them as they come.
    return (int(value), "") if value.isdecimal() else (-1, "")


def confining(failing: Sequence[Conditions], right: Sequence[Conditions]) -> list[Axis]:
    """One axis, or failing that two, whose failing values hold of all that fails and of nothing that is right.

    Of several, those with the fewest values: the simplest explanation. Empty if nothing is right, or no axis or pair is enough.
    """
    if not right:
        return []
    narrow = [axis for axis in by_axis(failing, right) if axis.failing and axis.right]
    for count in (1, 2):
        exact = [chosen for chosen in combinations(narrow, count) if not any(holds(chosen, one) for one in right)]
        if exact:
            return list(min(exact, key=lambda chosen: sum(len(a.failing) + len(a.right) for a in chosen)))
    return []


def narrowing(failing: Sequence[Conditions], right: Sequence[Conditions], names: Collection[str]) -> list[Axis]:
    """Axes of these names in which some value has no failing call: necessary for a failure, perhaps not enough."""
    return [axis for axis in by_axis(failing, right) if axis.name in names and axis.failing and axis.right]


def holds(axes: Collection[Axis], one: Conditions) -> bool:
    """Whether a call has a failing value in each of these axes."""
    return all(one.get(axis.name) in axis.failing for axis in axes)


def words(axes: Collection[Axis]) -> str:
    """Axes in words: "head_dim 128 and dtype not float32"; the shorter of the values that fail and of those that do not."""
    return " and ".join(
        f"{axis.name} not {' or '.join(axis.right)}"
        if len(axis.right) < len(axis.failing)
        else f"{axis.name} {' or '.join(axis.failing)}"
        for axis in axes
    )
