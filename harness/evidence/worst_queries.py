"""The worst query of each cell: its error against the truth, beside what honest implementations cost that very query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from assay.harness.evidence.error_sums import Floats

COLUMNS = ("off", "bound", "size", "position", "prefix")
"""Sum of |output - truth| over head_dim, and the largest that noise explains; sum of |truth|; position in the sequence, its cached
prefix included, and that prefix."""
_OFF, _BOUND, _SIZE, _POSITION, _PREFIX = range(len(COLUMNS))


@dataclass(frozen=True)
class WorstQueries:
    """The query of each cell whose error is the largest multiple of its bound.

    Attributes:
        index: int64 [cells, 6], as in `assay.harness.evidence.shadow_errors.ShadowErrors`; head -1 is all heads together.
        candidate: float64 [cells, 5], the columns of `COLUMNS`.
        reference: the same of the reference, which has worst queries of its own.
    """

    index: NDArray[np.int64]
    candidate: Floats
    reference: Floats

    @classmethod
    def none(cls) -> WorstQueries:
        """Return an instance without cells."""
        return cls(np.zeros((0, 6), np.int64), np.zeros((0, len(COLUMNS))), np.zeros((0, len(COLUMNS))))

    def chosen(self, cells: NDArray[np.bool_]) -> WorstQueries:
        """Return some of the cells (bool [cells])."""
        return WorstQueries(*(getattr(self, field.name)[cells] for field in fields(self)))

    def exchanged(self) -> WorstQueries:
        """Exchange the roles in the same cells."""
        return WorstQueries(self.index, self.reference, self.candidate)


def own_and_bound(rows: Floats) -> tuple[Floats, Floats]:
    """Compute the relative L1 of queries, [cells, 5] -> [cells], and the largest that noise explains.

    Where the truth is zero, they are not relative.
    """
    size = np.where(rows[:, _SIZE] > 0, rows[:, _SIZE], 1.0)
    return rows[:, _OFF] / size, rows[:, _BOUND] / size


def place(row: Floats) -> tuple[int, int]:
    """Return the position and cached prefix of a query, [5]."""
    return int(row[_POSITION]), int(row[_PREFIX])


def excess(rows: Floats) -> Floats:
    """Compute error over bound, [..., 5] -> [...]; 0 where nothing is off."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rows[..., _OFF] == 0, 0.0, rows[..., _OFF] / rows[..., _BOUND])


def joined_queries(parts: Sequence[WorstQueries]) -> WorstQueries:
    """Join the cells of several calls, layers or processes: of those with equal index, the worse query."""
    every = [np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(WorstQueries)]
    index, at = np.unique(every[0], axis=0, return_inverse=True)

    def worst(rows: Floats) -> Floats:
        order = np.lexsort((excess(rows), at.ravel()))
        last = np.searchsorted(at.ravel()[order], np.arange(len(index)), side="right") - 1
        worst_rows: Floats = rows[order[last]]
        return worst_rows

    return WorstQueries(index, worst(every[1]), worst(every[2])) if len(index) else WorstQueries.none()
