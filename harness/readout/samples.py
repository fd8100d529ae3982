"""Calls that the kernel answered, and how an output compares with the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from assay.harness.localize.reading import Flags, Numbers, WeightReading
from assay.harness.readout.forms import Fit
from assay.harness.readout.probing import CallPlan
from assay.harness.readout.queries import Queries

# Numbers that were read


def near(a: float, b: float, by: float = 2e-3) -> bool:
    """Return True if two numbers are the same, up to what a reading is off by."""
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


LOOSE = 2e-2
"""Relative error of a query from which on it is wrong where scores are of all sizes: a float32 score of 1e4 is off by 1e-3."""
# How near a wrong answer must be to an output that explains it, as a share of its distance from the right one.
_NEARER = 0.3


@dataclass
class Sample:
    """Some queries of a call that the kernel answered.

    Attributes:
        plan: how the call was made.
        queries: the queries.
        actual: what the kernel answered, [rows, heads, head_dim_v].
        bad: which are wrong, bool [rows * heads].
        error: relative error from which on they are.
        fresh: whether it was asked to try an operator.
        reading: the weights; None until they are read, or if they cannot be.
        fits: the forms that fit what was read of each query and head, [rows * heads]; None likewise.
    """

    plan: CallPlan
    queries: Queries
    actual: Numbers
    bad: Flags
    error: float
    fresh: bool = False
    reading: WeightReading | None = None
    fits: tuple[tuple[Fit, ...], ...] | None = None

    @property
    def errors(self) -> Numbers:
        """Error of each query and head, relative to its right output, L1, [rows * heads]; infinite where it is not finite."""
        size = np.abs(self.queries.right).sum(-1)
        with np.errstate(invalid="ignore"):
            gap = np.abs(self.actual - self.queries.right).sum(-1) / np.maximum(size, 1e-12)
        return np.asarray(np.nan_to_num(gap, nan=np.inf, posinf=np.inf).ravel())

    def agrees(self, out: Numbers) -> Flags:
        """Where the kernel's answer is this output, bool [rows * heads].

        A wrong answer must be much nearer to it than to the right output: where noise is large, it may be near to both.
        """
        size = np.maximum(np.abs(self.queries.right).sum(-1), np.nan_to_num(np.abs(out).sum(-1), posinf=0.0))
        nearer = _gaps(out, self.actual) <= _NEARER * _gaps(self.queries.right, self.actual)
        return close(out, self.actual, size, self.error) & (nearer.ravel() | ~self.bad)

    def differs(self, out: Numbers) -> Flags:
        """Where this output is clearly not the right one, bool [rows * heads]."""
        return ~close(out, self.queries.right, np.abs(self.queries.right).sum(-1), self.error)


def every(samples: Sequence[Sample], *forms: str) -> list[tuple[Sample, int, Fit]]:
    """Samples, places of rows and heads in them that have one of these forms, and the fit."""
    return [
        (sample, place, fit)
        for sample in samples
        for place, at_place in enumerate(sample.fits or ())
        for fit in at_place
        if fit.form in forms
    ]


def close(a: Numbers, b: Numbers, size: Numbers, tolerance: float) -> Flags:
    """Return True if two outputs agree, by query and head, bool [rows * heads]. NaN agrees with NaN."""
    return (_gaps(a, b) <= tolerance * size).ravel()


def _gaps(a: Numbers, b: Numbers) -> Numbers:
    """The sum of what two outputs differ by, for each query and head; infinite where one is not finite and the other is."""
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        gap = np.where(same, 0.0, np.abs(a - b)).sum(-1)
    return np.asarray(np.nan_to_num(gap, nan=np.inf))


@dataclass(frozen=True)
class Agreement:
    """The agreement of an operator with samples.

    Attributes:
        wrong: queries and heads on which the kernel is wrong.
        explained: of these, those of which the operator gives the kernel's answer.
        false: queries and heads on which the kernel is right and the operator is not.
    """

    wrong: int = 0
    explained: int = 0
    false: int = 0

    @property
    def share(self) -> float:
        """Share of the wrong ones that are explained; 1 if none is wrong."""
        return self.explained / self.wrong if self.wrong else 1.0

    @property
    def exact(self) -> bool:
        """True if the operator gives every answer."""
        return self.explained == self.wrong and not self.false
