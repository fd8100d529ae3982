"""Covering arrays of mixed strength: few rows that contain every wanted combination of values.

Rows are built greedily, as in AETG (Cohen et al., IEEE Transactions on Software Engineering 23(7), 1997): a row begins with a
missing combination, and takes for each other axis the value that adds most.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class AxisPart:
    """The relevant part of an axis: its value, or a coarser word for it.

    Attributes:
        axis: the axis.
        of: value -> its relevant part.
    """

    axis: str
    of: Callable[[Any], Hashable] = lambda value: value


def covering(
    axes: Mapping[str, Sequence[Any]],
    groups: Collection[tuple[AxisPart, ...]],
    seed: int = 0,
    covered: Collection[Row] = (),
    allowed: Callable[[Row], bool] | None = None,
) -> list[Row]:
    """Return the rows that cover every combination of values of the features of each group.

    Args:
        axes: axis -> its values; at least one each.
        groups: features whose values are combined fully, of different axes in each group.
        seed: the random seed; the same seed gives the same rows.
        covered: existing rows, whose pairs need not be covered again.
        allowed: whether a row with open axes can be completed; by default any can. Pairs that occur in no such row are left out.

    Returns:
        Rows, axis -> value. The first ones cover most.
    """
    chance = random.Random(seed)
    table = [
        (group, set(product(*(dict.fromkeys(map(feature.of, axes[feature.axis])) for feature in group))))
        for group in groups
    ]
    missing = dict(enumerate(table))
    of_axis = {
        axis: [n for n, (group, _) in missing.items() if axis in {feature.axis for feature in group}] for axis in axes
    }

    for group, left in table:
        left -= {values for values in left if not _possible(dict(zip(group, values, strict=True)), axes, allowed, {})}
    words = {combination: repr(combination) for _, left in table for combination in left}

    def gains(row: Row, axis: str, values: Sequence[Any]) -> list[int]:
        """Count, for each value of the axis, the missing combinations with the axis that the row would cover."""
        counts = [0] * len(values)
        for group, left in (missing[number] for number in of_axis[axis]):
            if not left or any(feature.axis != axis and feature.axis not in row for feature in group):
                continue
            of_value = next(feature.of for feature in group if feature.axis == axis)
            place = next(at for at, feature in enumerate(group) if feature.axis == axis)
            others = [feature.of(row[feature.axis]) if feature.axis != axis else None for feature in group]
            before, after = tuple(others[:place]), tuple(others[place + 1 :])
            for number, value in enumerate(values):
                counts[number] += (*before, of_value(value), *after) in left
        return counts

    def settle(row: Row) -> None:
        for group, left in missing.values():
            left.discard(tuple(feature.of(row[feature.axis]) for feature in group))

    for known in covered:
        settle(known)
    rows: list[Row] = []
    used = {(axis, value): 0 for axis, values in axes.items() for value in values}
    while any(left for _, left in missing.values()):
        group, left = max(missing.values(), key=lambda tuples: len(tuples[1]))
        wanted = dict(zip(group, min(left, key=lambda values: words[tuple(values)]), strict=True))
        row: Row = {}
        for axis in (*(feature.axis for feature in group), *chance.sample(list(axes), len(axes))):
            if axis in row:
                continue
            fitting = [
                value
                for value in axes[axis]
                if all(feature.of(value) == wish for feature, wish in wanted.items() if feature.axis == axis)
                and _possible(wanted, axes, allowed, row | {axis: value})
            ]
            tried = chance.sample(fitting, len(fitting))
            counts = gains(row, axis, tried) if len(tried) > 1 else [0]
            best = zip(counts, [-used[axis, value] for value in tried], strict=True)
            row[axis] = max(zip(best, tried, strict=True), key=lambda scored: scored[0])[1]
        settle(row)
        for axis, value in row.items():
            used[axis, value] += 1
        rows.append(row)
    return rows


def _possible(
    wanted: Mapping[AxisPart, Hashable],
    axes: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool] | None,
    row: Row,
) -> bool:
    """Return True if a partial row is allowed, and can take the wanted values on its open axes."""
    if allowed is None or not allowed(row):
        return allowed is None
    choices = {
        feature.axis: [value for value in axes[feature.axis] if feature.of(value) == wish]
        for feature, wish in wanted.items()
        if feature.axis not in row
    }
    return any(allowed(row | dict(zip(choices, chosen, strict=True))) for chosen in product(*choices.values()))
