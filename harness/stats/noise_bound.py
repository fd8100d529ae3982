"""Bounds from an ensemble: the largest error that another honest implementation makes in a cell, at a stated error rate.

An error in a cell is a vector: one number for each query, head and dimension. Its square is about a sum of `freedom`
independent squared roundings: many if many roundings meet (all queries of a long prompt), one if a single weight decides
(a query with two keys). The ratio of one more honest square to the mean of M others is then distributed as F(freedom, M freedom),
so the bound is the ensemble's root mean square times the root of that quantile. Freedom is Satterthwaite's: the dimensions that a
covariance fills, trace(C)^2 / trace(C^2) (Biometrics Bulletin 2, 110-114, 1946).

This is the one statistic that decides whether a call is out of bounds: the relative L1 of a cell against the truth, divided by
its bound; and the same for a single query (`assay.harness.stats.query_bounds`). In `check`, `replay` and the matrix a cell is one
sequence, query bucket and head of one call, and its freedom follows from the members' error vectors. In the shadow a cell adds up
the calls of one layer, head and condition and keeps only sums, so its freedom is estimated, from below, by the members' spread.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

FALSE_FLAGS = 1e-3
"""Largest share of comparisons (a matrix, a session of a shadow) of an honest kernel in which any cell may be flagged."""
MODEL_FACTOR = 1.3
"""Noise that implementations outside the ensemble may add to the ensemble's. Measured: `benchmarks/honest_kernels.py`."""
# Share of a dtype's eps by which a correct kernel may scale its output on average over any number of calls, and the same with
# TF32 operands: truncation makes both lose 2^-12 on average and up to 2^-11 each. Measured over the honest kernels of
# `benchmarks/honest_kernels.py`.
_GAIN_ROUNDINGS, _GAIN_TF32 = 1 / 16, 1.5e-3
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_Floats = NDArray[np.float64]


def gain_tolerance(dtype: str, accumulation: str) -> float:
    """Return how much an honest kernel without a quantisation may scale its output, however many calls are averaged.

    Args:
        dtype: of the outputs, such as "bfloat16".
        accumulation: of the kernel's sums, such as "tf32"; see `assay.harness.attention.noise`.
    """
    if dtype == "float32" and accumulation == "tf32":
        return _GAIN_TF32
    coarsest = "float16" if accumulation == "fp16" and dtype == "float32" else dtype
    return _GAIN_ROUNDINGS * _EPS.get(coarsest, _EPS["bfloat16"]) + 4 * _EPS["float32"]


def cell_bounds(
    errors: ArrayLike,
    freedom: ArrayLike | None = None,
    cells: int | None = None,
    alpha: float = FALSE_FLAGS,
    common: ArrayLike = 0.0,
    members: int | None = None,
) -> _Floats:
    """Compute the largest error that noise explains, by cell.

    Args:
        errors: relative L1 of each member in each cell, [members, ...]. Not finite where the simulation overflowed, which is not
            noise and excuses nothing.
        freedom: independent roundings in each cell, [...], or None to estimate them from the spread of the members.
        cells: number of cells among which none may be flagged wrongly, or None for as many as given. Bonferroni's correction.
        alpha: largest probability that any cell is.
        common: share of the members' mean square that they have in common (operands that are truncated instead of rounded), which
            another implementation has as well, so that it has no tail, [...].
        members: number of members with this noise, or None for those given.

    Returns:
        float64 [...].

    Raises:
        ValueError: there are fewer than two members.
    """
    squares = _squares(errors)
    members = members or len(squares)
    if freedom is None:
        freedom = freedom_of_spread(errors)
    free = np.maximum(1.0, np.asarray(freedom, dtype=float))
    rate = alpha / max(1, cells if cells is not None else squares[0].size)
    shared = np.clip(np.asarray(common, dtype=float), 0.0, 1.0)
    tail = shared + (1 - shared) * f_quantile_above(rate, free, members * free)
    mean = squares.mean(0)
    # Without noise the bound is zero, although the tail of a single rounding is infinite for few members.
    return np.asarray(MODEL_FACTOR * np.sqrt(mean * np.where(mean > 0, tail, 0.0)))


def freedom_of_spread(errors: ArrayLike) -> _Floats:
    """Estimate from below the independent roundings in each cell, from the spread of the members' errors, [...].

    The squares of one cell have the relative variance 2 / freedom. The variance of M values is known only up to a factor; its upper
    limit of one percent is used, so that a cell whose members agree by chance does not get a tight bound.
    """
    squares = _squares(errors)
    degrees = len(squares) - 1
    mean = squares.mean(0)
    relative = np.divide(squares.var(0, ddof=1), mean**2, out=np.full_like(mean, 2.0), where=mean > 0)
    upper = relative / chi2_quantile_below(0.01, degrees)
    return np.asarray(np.maximum(1.0, 2.0 / np.maximum(upper, 1e-9)))


def _squares(errors: ArrayLike) -> _Floats:
    values = np.asarray(errors, dtype=float)
    if len(values) < 2:
        raise ValueError(f"{len(values)} members of an ensemble; expected at least two")
    return np.where(np.isfinite(values), values, 0.0) ** 2


def chi2_quantile_below(rate: float, degrees: ArrayLike) -> _Floats:
    """Compute the quantile of chi^2 / degrees below which it falls at a rate."""
    from scipy.special import gammaincinv  # takes 0.2 s to import

    half = np.asarray(degrees, dtype=float) / 2
    return np.asarray(gammaincinv(half, rate) / half)


def f_quantile_above(rate: float, top: ArrayLike, bottom: ArrayLike) -> _Floats:
    """Compute the quantile of F(top, bottom) above which it lies at a rate.

    Args:
        rate: probability of a larger value.
        top: degrees of freedom of the numerator.
        bottom: degrees of freedom of the denominator.
    """
    from scipy.special import betaincinv  # takes 0.2 s to import

    top, bottom = np.asarray(top, dtype=float), np.asarray(bottom, dtype=float)
    # Where F is large, bottom / (bottom + top F), which is distributed as Beta(bottom / 2, top / 2), is small: no digit is lost.
    small = betaincinv(bottom / 2, top / 2, rate)
    return np.asarray(bottom / top * (1 - small) / small)
