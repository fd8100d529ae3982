"""Sums of errors by cell (layer, head, condition): the layout in which errors are added up, stored and judged. Pure functions.

Sums over queries, calls, cells and processes can be merged by adding; ratios cannot. A missing cell was not observed; it does not
mean an error of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from assay.harness.conditions import CACHED_PREFIX, PHASES, PLACE, POSITION, Buckets

Floats = NDArray[np.float64]
_Integers = NDArray[np.int64]
CONDITIONS = {"phase": PHASES, "prefix": CACHED_PREFIX.labels, "position": POSITION.labels, "batch": PLACE}
"""Dimensions of a cell besides layer and head, with their labels in order. Tables hold indices into the labels."""
DIMENSIONS = ("layer", "head", *CONDITIONS)
_SHAPE = tuple(len(labels) for labels in CONDITIONS.values())
CONDITION_COUNT = math.prod(_SHAPE)
SUMS = ("difference", "size", "compared", "nonfinite", "undefined", "along", "square")
"""The last axis of an array of sums over the elements of an output a and the expected output b: |a - b|, |b| and the count where
both are finite; the count where only one is; the count where b is undefined, which is not compared; (a - b) b and b^2."""
DISTANCE = SUMS[:5]
"""The columns for the distance between two outputs. The other two show whether one output is a multiple of the other."""
QUERY = ("difference", "bound", "size", "position", "prefix")
"""The last axis of an array of single queries: the sum of |output - truth| over head_dim, and the largest sum that noise explains;
the sum of |truth|; the position in the sequence, including its cached prefix, and the prefix."""
_DIFFERENCE, _SIZE, _COMPARED, _NONFINITE, UNDEFINED, _ALONG, _SQUARE = range(len(SUMS))
_Array = TypeVar("_Array", bound=Any)


def ratio(difference: _Array, size: _Array) -> _Array:
    """Compute the relative L1 elementwise: 0 where nothing differs, infinite where only the size is zero.

    The figure of arXiv 2410.02367, section 4.4.

    Args:
        difference: sum of |candidate - reference|; a numpy array or a torch tensor, as is `size`.
        size: sum of |reference|.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient: _Array = difference / (size + (difference == 0))
    return quotient


def sums_of(candidate: NDArray[np.floating], reference: NDArray[np.floating], axes: tuple[int, ...]) -> Floats:
    """Sum the errors of two outputs over some axes, float64 [remaining axes, 5]: the columns of `DISTANCE`."""
    a, b = candidate.astype(np.float64), reference.astype(np.float64)
    defined = np.isfinite(b)
    both = defined & np.isfinite(a)
    a, b = np.where(both, a, 0.0), np.where(both, b, 0.0)
    parts = (np.abs(a - b), np.abs(b), both, defined & ~both, ~defined)
    return np.stack([part.sum(axes, dtype=np.float64) for part in parts], -1)


def relative_l1(sums: Floats) -> Floats:
    """Compute |output - expected| / |expected|: infinite where an element is not finite, NaN where nothing was compared."""
    error = np.where(sums[..., _NONFINITE] > 0, np.inf, ratio(sums[..., _DIFFERENCE], sums[..., _SIZE]))
    return np.where(elements(sums) > 0, error, np.nan)


def gain(sums: Floats) -> Floats:
    """Compute the output's slope on the expected output, minus 1: sum (a - b) b / sum b^2. It is 0.001 if all is 0.1 % too large.

    This is least squares through the origin. It can show a gain that an L1 bound misses, because noise of either sign cancels.
    Infinite where an element of the output is not finite, NaN where the truth is zero or nothing was compared.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        gains = np.where(sums[..., _SQUARE] > 0, sums[..., _ALONG] / sums[..., _SQUARE], np.nan)
    return np.where(sums[..., _NONFINITE] > 0, np.inf, gains)


def elements(sums: Floats) -> Floats:
    """Count the elements that were compared or should have been."""
    counts: Floats = sums[..., _COMPARED] + sums[..., _NONFINITE]
    return counts


def excess(queries: Floats) -> Floats:
    """Compute error / bound for single queries, [..., 5] -> [...]; 0 where there is no error."""
    off, bound = queries[..., QUERY.index("difference")], queries[..., QUERY.index("bound")]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(off == 0, 0.0, off / bound)


def condition_numbers(phase: str, new: Sequence[int], prefix: Sequence[int]) -> _Integers:
    """Return the condition of each query in a call, int64 [sum(new)], as an index into the product of `CONDITIONS`."""
    place = np.full(len(new), PLACE.index("between"))
    place[0], place[-1] = PLACE.index("first"), PLACE.index("last")
    if len(new) == 1:
        place[0] = PLACE.index("only")
    positions = np.concatenate([np.arange(n) for n in new])
    parts = (
        np.full(len(positions), PHASES.index(phase)),
        np.repeat(_bucket(np.asarray(prefix), CACHED_PREFIX), new),
        _bucket(positions, POSITION),
        np.repeat(place, new),
    )
    return np.ravel_multi_index(parts, _SHAPE).astype(np.int64)


def _bucket(values: NDArray[np.int_], buckets: Buckets) -> NDArray[np.int_]:
    return np.searchsorted(buckets.starts, values, side="right") - 1


def cell_index(layer: int, heads: Sequence[int], conditions: Sequence[int] | _Integers) -> _Integers:
    """Make the index of a layer's cells, conditions first: int64 [conditions, heads, 6], the columns of `DIMENSIONS`."""
    index = np.empty((len(conditions), len(heads), len(DIMENSIONS)), np.int64)
    index[..., 0], index[..., 1] = layer, heads
    index[..., 2:] = np.stack(np.unravel_index(np.asarray(conditions, np.int64), _SHAPE), axis=1)[:, None]
    return index


@dataclass(frozen=True)
class RoleErrors:
    """The errors of a role's outputs against the truth, by cell: over sampled queries of every call, and for the worst query.

    All are summed over the same queries of the same calls, so a cell's own error can be compared with the errors of honest
    implementations of the declared noise family.

    Attributes:
        own: float64 [cells, 7], the columns of `SUMS`.
        dropped: the same, for the largest contribution of weights that the family may leave out; 0 if it leaves out none.
        honest: float64 [cells, members, 7]: honest implementations of its noise family, which leave out no weights.
        worst: float64 [cells, 5], the columns of `QUERY`: the query whose error is the largest multiple of its bound.
    """

    own: Floats
    dropped: Floats
    honest: Floats
    worst: Floats

    @classmethod
    def none(cls, cells: int = 0) -> Self:
        """Return cells without any comparison with the truth."""
        sums = np.zeros((cells, len(SUMS)))
        return cls(sums, sums, np.zeros((cells, 0, len(SUMS))), np.zeros((cells, len(QUERY))))

    def each(self, change: Callable[[Floats], Floats]) -> RoleErrors:
        """Apply a function to every array."""
        return RoleErrors(*(change(getattr(self, field.name)) for field in fields(self)))


@dataclass(frozen=True)
class ErrorTable:
    """The errors of a candidate and of a reference, one row per cell.

    Attributes:
        index: int64 [cells, 6], the columns of `DIMENSIONS`: layer and head by number, the others as indices into `CONDITIONS`; -1
            for a dimension that a row covers. Head -1, all heads together, has only worst queries.
        apart: float64 [cells, 5], the columns of `DISTANCE`: the candidate's output against the reference's, over all queries.
        candidate: the candidate's errors against the truth.
        reference: the reference's errors against the truth.
    """

    index: _Integers
    apart: Floats
    candidate: RoleErrors
    reference: RoleErrors

    @classmethod
    def of(
        cls, index: _Integers, apart: Floats | None = None,
        candidate: RoleErrors | None = None, reference: RoleErrors | None = None,
    ) -> ErrorTable:  # fmt: skip
        """Make a table in which only some parts were measured."""
        nothing = RoleErrors.none(len(index))
        distance = np.zeros((len(index), len(DISTANCE))) if apart is None else apart
        return cls(index, distance, candidate or nothing, reference or nothing)

    def chosen(self, cells: NDArray[np.bool_]) -> ErrorTable:
        """Return some of the cells (bool [cells])."""

        def some(values: Floats) -> Floats:
            return values[cells]

        return ErrorTable(self.index[cells], self.apart[cells], self.candidate.each(some), self.reference.each(some))

    def exchanged(self) -> ErrorTable:
        """Exchange the roles in the same cells.

        The distances stay the same, relative to the size of the same output, since the other size was not summed. A non-finite
        output then belongs to the other role.
        """
        swapped = {"nonfinite": "undefined", "undefined": "nonfinite"}
        columns = [DISTANCE.index(swapped.get(name, name)) for name in DISTANCE]
        return ErrorTable(self.index, self.apart[:, columns], self.reference, self.candidate)

    def merged(self, by: Sequence[int]) -> ErrorTable:
        """Merge the cells that agree in some columns of the index, adding their sums and keeping the worst query.

        Args:
            by: numbers of columns. The other columns of the result are -1.
        """
        keys = np.full_like(self.index, -1)
        keys[:, list(by)] = self.index[:, list(by)]
        index, where = np.unique(keys, axis=0, return_inverse=True)
        at = where.ravel()

        together = np.argsort(at, kind="stable")
        starts = np.searchsorted(at[together], np.arange(len(index)))

        def added(sums: Floats) -> Floats:
            return np.add.reduceat(sums[together], starts, axis=0) if len(index) else sums

        def worst(rows: Floats) -> Floats:
            order = np.lexsort((rows.any(1), excess(rows), at))
            kept: Floats = rows[order[np.append(starts[1:], len(at)) - 1]] if len(index) else rows
            return kept

        roles = (
            RoleErrors(added(role.own), added(role.dropped), added(role.honest), worst(role.worst))
            for role in (self.candidate, self.reference)
        )
        return ErrorTable(index, added(self.apart), *roles)

    def observed(self, dimension: str) -> tuple[str, ...]:
        """Return the labels of a dimension that occur in cells where both outputs were compared."""
        labels = self.labels(dimension)
        return tuple(labels[i] for i in np.unique(self.index[self._compared, DIMENSIONS.index(dimension)]))

    def labels(self, dimension: str) -> tuple[str, ...]:
        """Return the labels of a dimension, in the order of an axis of `distance`. Layers and heads are labelled by number."""
        if dimension in CONDITIONS:
            return CONDITIONS[dimension]
        numbers = self.index[:, DIMENSIONS.index(dimension)]
        return tuple(map(str, range(int(numbers.max(initial=-1)) + 1)))

    def distance(
        self, by: Sequence[str] = ("layer", "head"), where: Mapping[str, str] = MappingProxyType({})
    ) -> Floats:
        """Add up the distances of the outputs by some dimensions, over selected cells.

        Args:
            by: dimensions of the result, one per axis, in order.
            where: dimension -> the label to select, such as {"phase": "extend", "prefix": ">= 16"}.

        Returns:
            float64 [*labels of each dimension, 5], the columns of `DISTANCE`; 0 where nothing was observed.

        Raises:
            ValueError: there is no such dimension or label.
        """
        keep = self._compared
        for dimension, label in where.items():
            keep &= self.index[:, DIMENSIONS.index(dimension)] == self.labels(dimension).index(label)
        shape = tuple(len(self.labels(dimension)) for dimension in by)
        columns = self.index[keep][:, [DIMENSIONS.index(dimension) for dimension in by]]
        flat = np.ravel_multi_index(tuple(columns.T), shape) if shape else np.zeros(int(keep.sum()), np.int64)
        sums = np.zeros((math.prod(shape), len(DISTANCE)))
        np.add.at(sums, flat, self.apart[keep])
        return sums.reshape(*shape, len(DISTANCE))

    @property
    def _compared(self) -> NDArray[np.bool_]:
        """The cells that have elements of both outputs, defined or not."""
        seen: NDArray[np.bool_] = self.apart[:, _COMPARED : UNDEFINED + 1].sum(1) > 0
        return seen


def joined(parts: Sequence[ErrorTable]) -> ErrorTable:
    """Join the cells of several layers or processes, merging cells with equal index.

    If some have fewer honest implementations, the extra ones of the others are dropped. Cells that have none add nothing.
    """
    if not parts:
        return ErrorTable.of(np.zeros((0, len(DIMENSIONS)), np.int64))
    roles = []
    for name in ("candidate", "reference"):
        each: list[RoleErrors] = [getattr(part, name) for part in parts]
        members = min((role.honest.shape[1] for role in each if role.honest.shape[1]), default=0)
        honest = [
            role.honest[:, :members] if role.honest.shape[1] else np.zeros((len(role.own), members, len(SUMS)))
            for role in each
        ]
        columns = ([getattr(role, column) for role in each] for column in ("own", "dropped"))
        own, dropped = (np.concatenate(column) for column in columns)
        roles.append(RoleErrors(own, dropped, np.concatenate(honest), np.concatenate([role.worst for role in each])))
    index, apart = (np.concatenate([getattr(part, name) for part in parts]) for name in ("index", "apart"))
    return ErrorTable(index, apart, *roles).merged(range(len(DIMENSIONS)))
