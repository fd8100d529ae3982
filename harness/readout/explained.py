"""Readings that were explained: the forms that fit each row, from which effects are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from assay.harness.readout.forms import Fit
from assay.harness.readout.queries import Flags, Queries


@dataclass(frozen=True)
class Explained:
    """The forms that fit the rows of one reading.

    Attributes:
        queries: the rows.
        fits: of each row and head, [rows * heads].
        right: which of them are right, bool [rows * heads].
    """

    queries: Queries
    fits: tuple[tuple[Fit, ...], ...]
    right: Flags

    def having(self, *forms: str) -> list[tuple[int, Fit]]:
        """Places of rows and heads with one of these forms, and the fit."""
        return [(place, fit) for place, fits in enumerate(self.fits) for fit in fits if fit.form in forms]


def every(readings: Sequence[Explained], *forms: str) -> list[tuple[Explained, int, Fit]]:
    """Readings, places of rows and heads in them that have one of these forms, and the fit."""
    return [(one, place, fit) for one in readings for place, fit in one.having(*forms)]


# Numbers that were read


def near(a: float, b: float, by: float = 2e-3) -> bool:
    """Whether two numbers are the same, up to what a reading is off by."""
    return math.isclose(a, b, rel_tol=by, abs_tol=1e-9)


def common(numbers: Sequence[float], most: int = 3) -> list[float]:
    """Numbers that occur often, up to 0.05 %: medians of groups, the largest group first."""
    ordered = np.sort(np.asarray(numbers))
    groups = np.split(ordered, np.flatnonzero(np.diff(ordered) > 5e-4 * np.abs(ordered[1:]) + 1e-9) + 1)
    groups.sort(key=len, reverse=True)
    return [_rounded(float(np.median(group))) for group in groups[:most]]


def _rounded(value: float) -> float:
    """A number with few digits, if it is one."""
    if abs(value - 1) < 2e-2:  # its distance from 1 is what matters
        return 1 + float(f"{value - 1:.2g}")
    for digits in (2, 3, 4):
        if value and near(float(f"{value:.{digits}g}"), value, 3e-4):
            return float(f"{value:.{digits}g}")
    return value
