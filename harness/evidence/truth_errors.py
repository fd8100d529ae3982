"""Errors against the truth, by layer, head and condition: of the candidate, of the reference, and of honest implementations.

All are summed over the same queries of the same calls, so a cell's own error can be compared with what honest implementations of
the declared noise family cost there. Sums of several calls, cells or processes are merged by adding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from assay.harness.evidence.error_sums import Floats, ratio

OUTPUT_SUMS = ("off", "along", "squared", "nonfinite", "dropped", "dropped_along")
"""Sums over the elements of an output o whose truth is t: |o - t|, (o - t) t and (o - t)^2 over the elements where both are finite;
the number of elements where only t is; and the most that weights which its family may leave out add to the first two, 0 for honest
implementations, which leave out none."""
TRUTH_SUMS = ("size", "squared", "elements")
"""Sums over the elements where the truth t is finite: |t|, t^2, and their number."""
_OFF, _ALONG, _, _NONFINITE, _DROPPED, _DROPPED_ALONG = range(len(OUTPUT_SUMS))
_SIZE, _SQUARED, _ELEMENTS = range(len(TRUTH_SUMS))


@dataclass(frozen=True)
class TruthErrors:
    """Cells of the sampled queries, one row each.

    Attributes:
        index: int64 [cells, 6], as in `assay.harness.evidence.shadow_errors.ShadowErrors`.
        truth: float64 [cells, 3], the columns of `TRUTH_SUMS`.
        candidate: float64 [cells, 6], the columns of `OUTPUT_SUMS`.
        reference: float64 [cells, 6].
        candidate_honest: float64 [cells, members, 6]: honest implementations of the candidate's noise family.
        reference_honest: float64 [cells, members, 6], of the reference's family.
    """

    index: NDArray[np.int64]
    truth: Floats
    candidate: Floats
    reference: Floats
    candidate_honest: Floats
    reference_honest: Floats

    @classmethod
    def none(cls) -> TruthErrors:
        """Return an instance without cells."""
        outputs, honest = np.zeros((0, len(OUTPUT_SUMS))), np.zeros((0, 0, len(OUTPUT_SUMS)))
        return cls(np.zeros((0, 6), np.int64), np.zeros((0, len(TRUTH_SUMS))), outputs, outputs, honest, honest)

    def chosen(self, cells: NDArray[np.bool_]) -> TruthErrors:
        """Return some of the cells (bool [cells])."""
        return TruthErrors(*(getattr(self, field.name)[cells] for field in fields(self)))

    def exchanged(self) -> TruthErrors:
        """Exchange the roles in the same cells."""
        return TruthErrors(
            self.index, self.truth, self.reference, self.candidate, self.reference_honest, self.candidate_honest
        )

    def merged(self, columns: Sequence[int]) -> TruthErrors:
        """Add up the cells that agree in some columns of the index. The other columns of the result are -1.

        Args:
            columns: numbers of columns.
        """
        keys = np.full_like(self.index, -1)
        keys[:, list(columns)] = self.index[:, list(columns)]
        index, at = np.unique(keys, axis=0, return_inverse=True)

        def added(sums: Floats) -> Floats:
            total = np.zeros((len(index), *sums.shape[1:]))
            np.add.at(total, at.ravel(), sums)
            return total

        return TruthErrors(index, *(added(getattr(self, field.name)) for field in fields(self)[1:]))


def joined(parts: Sequence[TruthErrors]) -> TruthErrors:
    """Join the cells of several layers or processes; those of equal index are added up.

    Where some have fewer members, the others' further members are dropped.
    """
    there = [part for part in parts if len(part.index)]
    if not there:
        return TruthErrors.none()

    def common(name: str) -> Floats:
        members = min(getattr(part, name).shape[1] for part in there)
        return np.concatenate([getattr(part, name)[:, :members] for part in there])

    index, truth, candidate, reference = (
        np.concatenate([getattr(part, name) for part in there]) for name in ("index", "truth", "candidate", "reference")
    )
    every = TruthErrors(index, truth, candidate, reference, common("candidate_honest"), common("reference_honest"))
    return every.merged(range(index.shape[1]))


def own_error(output: Floats, truth: Floats) -> Floats:
    """Compute the relative L1 against the truth: infinite where the output is not finite, NaN where nothing was compared.

    Args:
        output: float64 [..., 6], the columns of `OUTPUT_SUMS`.
        truth: float64 [..., 3], the columns of `TRUTH_SUMS`, of a shape that broadcasts.
    """
    error = ratio(output[..., _OFF], truth[..., _SIZE])
    error = np.where(output[..., _NONFINITE] > 0, np.inf, error)
    return np.where(truth[..., _ELEMENTS] > 0, error, np.nan)


def gain(output: Floats, truth: Floats) -> Floats:
    """Compute the output's slope on the truth, minus 1: sum (o - t) t / sum t^2. 0.001 if all of it is 0.1 % too large.

    Least squares through the origin. A gain is seen where an L1 bound sees nothing, since noise of either sign cancels in it.
    Infinite where an element of the output is not finite, NaN where the truth is zero or nothing was compared.

    Args:
        output: float64 [..., 6].
        truth: float64 [..., 3], of a shape that broadcasts.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        gains = np.where(truth[..., _SQUARED] > 0, output[..., _ALONG] / truth[..., _SQUARED], np.nan)
    return np.where(output[..., _NONFINITE] > 0, np.inf, gains)


def dropped(output: Floats, truth: Floats) -> tuple[Floats, Floats]:
    """Compute the most that leaving out weights may add to `own_error` and to `gain`; 0 where the family leaves out none.

    Args:
        output: float64 [..., 6].
        truth: float64 [..., 3], of a shape that broadcasts.
    """
    pairs = ((output[..., _DROPPED], truth[..., _SIZE]), (output[..., _DROPPED_ALONG], truth[..., _SQUARED]))
    own, along = (np.nan_to_num(ratio(cost, size), posinf=0.0) for cost, size in pairs)
    return own, along
