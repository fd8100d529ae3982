"""Sums over compared elements, and the errors that follow from them. Sums of several places are merged by adding; ratios are
not."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SUMS = ("difference", "reference_size", "compared", "nonfinite", "undefined")
"""The last axis of an array of sums: |a - b|, |b| and the count, over the elements where both candidate a and reference b are
finite; the count of elements where only b is finite; and of those where b is not, which are not compared."""
_COLUMN = {name: index for index, name in enumerate(SUMS)}
Array = TypeVar("Array", bound=Any)


def ratio(difference: Array, size: Array) -> Array:
    """Compute the relative L1, elementwise: 0 where nothing differs, infinite where only the size is zero.

    The figure of arXiv 2410.02367, section 4.4.

    Args:
        difference: sum of |candidate - reference|; a numpy array or a torch tensor, as is `size`.
        size: sum of |reference|.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient: Array = difference / (size + (difference == 0))
    return quotient


def sums_of(candidate: NDArray[np.floating], reference: NDArray[np.floating], axes: tuple[int, ...]) -> Floats:
    """Sum the errors of two outputs over some axes, float64 [remaining axes, 5]."""
    a, b = candidate.astype(np.float64), reference.astype(np.float64)
    defined = np.isfinite(b)
    both = defined & np.isfinite(a)
    a, b = np.where(both, a, 0.0), np.where(both, b, 0.0)
    parts = (np.abs(a - b), np.abs(b), both, defined & ~both, ~defined)
    return np.stack([part.sum(axes, dtype=np.float64) for part in parts], -1)


def relative_l1(sums: Floats) -> Floats:
    """Sum |candidate - reference| / sum |reference|: infinite where nothing of the candidate is finite, NaN where nothing was
    observed."""
    compared, lost = _of(sums, "compared"), _of(sums, "nonfinite")
    error = ratio(_of(sums, "difference"), _of(sums, "reference_size"))
    return np.where(compared > 0, error, np.where(lost > 0, np.inf, np.nan))


def nonfinite_share(sums: Floats) -> Floats:
    """Compute the share of the candidate's elements not finite where the reference's are; NaN where nothing was observed."""
    lost = _of(sums, "nonfinite")
    with np.errstate(invalid="ignore"):
        share: Floats = lost / (lost + _of(sums, "compared"))
    return share


def elements(sums: Floats) -> Floats:
    """Count the elements that the reference defines; NaN where nothing was observed."""
    count = _of(sums, "compared") + _of(sums, "nonfinite")
    return np.where(count > 0, count, np.nan)


def _of(sums: Floats, name: str) -> Floats:
    column: Floats = sums[..., _COLUMN[name]]
    return column
