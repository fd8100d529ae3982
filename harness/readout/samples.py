"""Calls that the kernel answered, and the comparison of outputs with the answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.localize.reading import Flags, Numbers, WeightReading, row_errors
from assay.harness.readout.features import Ints
from assay.harness.readout.forms import Fit
from assay.harness.readout.queries import Queries

# Numbers from readings


def near(a: float, b: float, by: float = 2e-3) -> bool:
    """Return True if two numbers are equal, up to the error of a reading."""
    return math.isclose(a, b, rel_tol=by, abs_tol=1e-9)


def common(numbers: Sequence[float], most: int = 3) -> list[float]:
    """Return numbers that occur often, up to 0.05 %: medians of groups, the largest group first."""
    ordered = np.sort(np.asarray(numbers))
    groups = np.split(ordered, np.flatnonzero(np.diff(ordered) > 5e-4 * np.abs(ordered[1:]) + 1e-9) + 1)
    groups.sort(key=len, reverse=True)
    return [_rounded(float(np.median(group))) for group in groups[:most]]


def _rounded(value: float) -> float:
    """Round to few digits if that is within the error of a reading."""
    if abs(value - 1) < 2e-2:  # only its distance from 1 matters
        return 1 + float(f"{value - 1:.2g}")
    for digits in (2, 3, 4):
        if value and near(float(f"{value:.{digits}g}"), value, 3e-4):
            return float(f"{value:.{digits}g}")
    return value


# An output explains a wrong answer if its distance is at most this share of the answer's distance from the correct output.
_NEARER = 0.3
# Below this share of the correct output's size, cancellation makes an output inexact.
_SMALL = 0.1
# Queries of a call to examine: wrong and correct ones; and their most weights, 256 MB.
_WRONG_ROWS, _RIGHT_ROWS, _MAX_WEIGHTS = 16, 8, 2**25


@dataclass
class Sample:
    """Some queries of a call that the kernel answered.

    Attributes:
        queries: the queries.
        actual: the kernel's answer, [rows, heads, head_dim_v].
        bad: flags of the wrong ones, bool [rows * heads].
        error: the relative error above which they are wrong.
        fresh: whether the sample is held out from fitting.
        reading: the weights, or None until they are read, or if they cannot be.
        fits: the forms that fit each query and head, [rows * heads], or None without a reading.
    """

    queries: Queries
    actual: Numbers
    bad: Flags
    error: float
    fresh: bool = True
    reading: WeightReading | None = None
    fits: tuple[tuple[Fit, ...], ...] | None = None

    @property
    def call(self) -> AttentionCall:
        """The call."""
        return self.queries.call

    @property
    def keys(self) -> int:
        """Keys of all its sequences."""
        return self.call.k.shape[0]

    @property
    def size(self) -> int:
        """Cost of reading it: values to probe, times queries to compute plus 64 for the overhead of a call."""
        return self.keys * self.call.k.shape[1] * (64 + self.call.q.shape[0])

    @property
    def errors(self) -> Numbers:
        """L1 error of each query and head, relative to its correct output, [rows * heads]; infinite where it is not finite."""
        size = np.abs(self.queries.right).sum(-1)
        with np.errstate(invalid="ignore"):
            gap = np.abs(self.actual - self.queries.right).sum(-1) / np.maximum(size, 1e-12)
        return np.asarray(np.nan_to_num(gap, nan=np.inf, posinf=np.inf).ravel())

    def agrees(self, out: Numbers) -> Flags:
        """Return flags of the answers that equal this output, bool [rows * heads].

        A wrong answer must be much nearer to it than to the correct output: with large noise, it may be near to both. If both
        outputs are small relative to the correct one, they are compared with each other: both are nearly zero, and may differ by
        any factor.
        """
        size = np.maximum(_size(self.actual), np.maximum(_size(out), _SMALL * _size(self.queries.right)))
        nearer = _gaps(out, self.actual) <= _NEARER * _gaps(self.queries.right, self.actual)
        return close(out, self.actual, size, self.error) & (nearer.ravel() | ~self.bad)

    def differs(self, out: Numbers) -> Flags:
        """Return flags of where this output is clearly wrong, bool [rows * heads]."""
        return ~close(out, self.queries.right, np.abs(self.queries.right).sum(-1), self.error)


def sample_of(call: AttentionCall, out: Tensor, error: float, draw: np.random.Generator, right: bool = False) -> Sample:
    """Choose some queries of an answered call.

    Args:
        call: the call.
        out: the answer, [total_q, num_q_heads, head_dim_v].
        error: the relative L1 error above which a query is wrong.
        draw: the random generator for choosing queries.
        right: whether the answer counts as correct for any error, since rounding may be large on this data.
    """
    out = out.double().cpu()
    errors = row_errors(call, out)
    error = max(error, 2 * float(errors.max(initial=0.0))) if right else error
    wrong = errors > error
    rows = _rows(np.asarray(wrong.any(1)), call, draw)
    return Sample(Queries(call, rows), out[torch.from_numpy(rows)].numpy(), wrong[rows].ravel(), error)


def _rows(wrong: Flags, call: AttentionCall, draw: np.random.Generator) -> Ints:
    bad, good = np.flatnonzero(wrong), np.flatnonzero(~wrong)
    beside = np.intersect1d(np.concatenate([bad[:1] - 1, bad[-1:] + 1]), good)
    parts = [bad[:2], bad[-2:], draw.permutation(bad)[: _WRONG_ROWS - 4]]
    parts += [good[:2], good[-2:], beside, draw.permutation(good)[: _RIGHT_ROWS - 4]]
    most = max(1, _MAX_WEIGHTS // (call.q.shape[1] * call.k.shape[1] * call.k.shape[0]))
    return np.unique(np.concatenate(parts)[:most]).astype(np.int64)


def every(samples: Sequence[Sample], *forms: str) -> list[tuple[Sample, int, Fit]]:
    """Return (sample, index of a row and head, fit) for every fit with one of these forms."""
    return [
        (sample, place, fit)
        for sample in samples
        for place, at_place in enumerate(sample.fits or ())
        for fit in at_place
        if fit.form in forms
    ]


def close(a: Numbers, b: Numbers, size: Numbers, tolerance: float) -> Flags:
    """Return flags of the queries and heads where two outputs agree, bool [rows * heads]. NaN agrees with NaN."""
    return (_gaps(a, b) <= tolerance * size).ravel()


def _size(out: Numbers) -> Numbers:
    """Sum |out| of each query and head, or 0 where it is not finite."""
    return np.asarray(np.nan_to_num(np.abs(out).sum(-1), nan=0.0, posinf=0.0))


def _gaps(a: Numbers, b: Numbers) -> Numbers:
    """Sum the differences of two outputs for each query and head; infinite where only one is finite."""
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        gap = np.where(same, 0.0, np.abs(a - b)).sum(-1)
    return np.asarray(np.nan_to_num(gap, nan=np.inf))


@dataclass(frozen=True)
class Agreement:
    """The agreement of an operator with samples.

    Attributes:
        wrong: queries and heads on which the kernel is wrong.
        explained: those for which the operator gives the kernel's answer.
        false: queries and heads on which the kernel is correct and the operator is not.
    """

    wrong: int = 0
    explained: int = 0
    false: int = 0

    @property
    def share(self) -> float:
        """Share of the wrong ones that are explained, or 1 if there are none."""
        return self.explained / self.wrong if self.wrong else 1.0

    @property
    def exact(self) -> bool:
        """True if the operator gives every answer."""
        return self.explained == self.wrong and not self.false
