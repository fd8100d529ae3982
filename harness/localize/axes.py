"""The values of a matrix's axes under which calls fail, in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from assay.harness.evidence.kernel_result import Axis

Conditions = Mapping[str, str]
"""Axis -> value of one call, as `assay.harness.attention.matrix.Case.condition`."""


def by_axis(
    failing: Sequence[Conditions], right: Sequence[Conditions], left_out: Sequence[Conditions] = ()
) -> list[Axis]:
    """Group results by axis; numbers in order of size, words in order of appearance. Calls that are left out were not made."""
    everything = [*failing, *right]
    names = dict.fromkeys(name for conditions in everything for name in conditions)
    axes = []
    for name in names:
        values = sorted(
            dict.fromkeys(conditions[name] for conditions in everything if name in conditions), key=_by_size
        )
        counts = {
            value: tuple(sum(conditions.get(name) == value for conditions in some) for some in (failing, everything))
            for value in values
        }
        bad = {value: (wrong, all_) for value, (wrong, all_) in counts.items() if wrong}
        unknown = tuple(
            value for value in dict.fromkeys(conditions[name] for conditions in left_out) if value not in values
        )
        axes.append(Axis(name=name, failing=bad, right=tuple(v for v in values if v not in bad), unknown=unknown))
    return axes


def _by_size(value: str) -> tuple[int, str]:
    # Words compare equal, and sorted() is stable.
    return (int(value), "") if value.isdecimal() else (-1, "")


def confining(
    failing: Sequence[Conditions], right: Sequence[Conditions], left_out: Sequence[Conditions] = ()
) -> list[Axis]:
    """Find one axis, else two, whose failing values cover all failing calls and no correct one.

    Of several, the choice with the fewest values: the simplest explanation. Empty if no call is correct, or no axis or pair of axes
    separates them. Axes with a value that only calls have which were not made are left out with these.
    """
    if not right:
        return []
    narrow = _telling(by_axis(failing, right, left_out))
    for count in (1, 2):
        exact = [
            chosen
            for chosen in combinations(narrow, count)
            if not any(holds(chosen, conditions) for conditions in right)
        ]
        if exact:
            return list(min(exact, key=lambda chosen: sum(len(a.failing) + len(a.right) for a in chosen)))
    return []


def narrowing(
    failing: Sequence[Conditions],
    right: Sequence[Conditions],
    names: Collection[str],
    left_out: Sequence[Conditions] = (),
) -> list[Axis]:
    """Find the axes of these names with a value that never fails: a necessary condition of the failure, perhaps not sufficient."""
    return [axis for axis in _telling(by_axis(failing, right, left_out)) if axis.name in names]


def _telling(some: Sequence[Axis]) -> list[Axis]:
    return [axis for axis in some if axis.failing and axis.right and not axis.unknown]


def holds(axes: Collection[Axis], conditions: Conditions) -> bool:
    """Return True if a call has a failing value in each of these axes."""
    return all(conditions.get(axis.name) in axis.failing for axis in axes)


def words(axes: Collection[Axis]) -> str:
    """Describe the axes: "head_dim is 128 and dtype is not float32"; lists failing or correct values, whichever are fewer."""
    return " and ".join(
        f"{axis.name} is not {' or '.join(axis.right)}"
        if len(axis.right) < len(axis.failing)
        else f"{axis.name} is {' or '.join(axis.failing)}"
        for axis in axes
    )


def located(
    failing: Sequence[Conditions], right: Sequence[Conditions], left_out: Sequence[Conditions] = ()
) -> tuple[tuple[Axis, ...], str]:
    """Group cases by axis, and describe where those that fail lie; nothing where all of them do, or none."""
    if not (failing and right):
        return (), ""
    return tuple(by_axis(failing, right, left_out)), words(confining(failing, right, left_out))
