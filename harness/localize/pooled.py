"""Finds errors that show only over many calls: an output scaled by a factor within the noise, and a quantisation that did not
run.

Both look at calls within their bounds. `assay.harness.localize.causes` names errors out of bounds, including a scaled output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from assay.harness.attention.honest import here
from assay.harness.attention.oracle import oracle
from assay.harness.localize.kernel_runs import CallResult
from assay.harness.stats.noise_bound import FALSE_FLAGS, chi2_quantile_below, f_quantile_above, gain_tolerance
from assay.harness.stats.query_bounds import dropping_cost, least_error

QUANTISATION_NOT_RUN = "quantisation-not-run"
# Fewest calls (effective number, given their weights) for judging a slope.
_MIN_CALLS = 8
# How far the mean slope of a correct kernel with a quantisation may lie from the ensemble's, for any number of calls, as a share of
# the quantisation's noise: second-order effects depend on details such as blocks. Measured with `benchmarks/honest_kernels.py`.
_SLOPE_QUANTISED = 0.1
# Least share of the ensemble's noise that a kernel of its family has. Finer scales than declared reduce the noise: a scale per
# token instead of one per 128 tokens has 0.65 of it on normal data.
_LEAST_SHARE = 0.5
# A cell can distinguish a quantisation's noise from the dtype's rounding from this multiple of `least_error` on. The rounding is
# about half of `least_error`, so without the quantisation the error is at most a quarter of its noise.
_CLEAR = 2.0

_Floats = NDArray[np.float64]
Group = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class _Pooled:
    """An error that shows over many calls: the number that shows it in the worst group, and its limit from noise there."""

    groups: tuple[Group, ...]
    value: float
    limit: float
    results: tuple[CallResult, ...]


def scaled(results: Sequence[CallResult]) -> _Pooled | None:
    """Find the groups of calls (by dtype, and by phase or head) whose output is scaled.

    The slope of the output on the truth averages over all numbers of a call, so it shows a gain far below the noise of each
    number. Student's t tests the mean over calls, with the spread of the calls themselves.

    Returns:
        The factor by which the output is scaled, with its largest deviation from 1 as the limit; or None if no group is scaled.
    """
    usable = [result for result in results if not result.fails]
    groups = _grouped(usable, (("dtype",), ("dtype", "phase"), ("dtype", "layer")))
    tests: list[tuple[Group, list[CallResult], slice]] = [(group, some, slice(None)) for group, some in groups]
    for group, some in _grouped(usable, (("dtype", "heads"),)):
        heads = some[0].call.q.shape[1]
        tests += [
            ((group[0], ("head", str(some[0].call.spec.first_head + h))), some, slice(h, h + 1)) for h in range(heads)
        ]
    known = {id(result): _deviations(result) for result in usable}
    beyond = []
    for group, some, heads_of in tests:
        factor, limit = _slope(
            [(result, *known[id(result)]) for result in some], heads_of, FALSE_FLAGS / 4 / len(tests)
        )
        if abs(factor) > limit:
            beyond.append((group, factor, limit, some))
    if not beyond:
        return None
    _, factor, limit, _ = max(beyond, key=lambda test: abs(test[1]) / test[2])
    return _Pooled(tuple(test[0] for test in beyond), 1 + factor, limit, _union(test[3] for test in beyond))


def _deviations(result: CallResult) -> tuple[_Floats, float]:
    """Compute the deviations of slopes from the ensemble's, [num_q_heads], and the tolerance for any number of calls."""
    expected = torch.ones_like(result.slopes)
    if result.limits.family.quantises:
        expected = result.limits.ensemble.slopes.mean(0)
    return (result.slopes - expected).numpy(), _tolerance(result) + _dropped(result)


def _dropped(result: CallResult) -> float:
    """Bound the change in any head's slope from dropped weights: sum of |output - truth| |truth| over sum of truth^2."""
    family, call, rows = result.limits.family, result.call, result.cells.rows
    if not family.dropped:
        return 0.0
    right = oracle(call, rows)
    along = (dropping_cost(call, family, rows, right) * right.abs().amax(-1)).sum(0)
    return float((along / right.square().sum((0, 2))).nan_to_num(posinf=0.0).max())


def _slope(results: Sequence[tuple[CallResult, _Floats, float]], heads: slice, rate: float) -> tuple[float, float]:
    """Compute the mean deviation of slopes over calls, and its limit, which is infinite for too few calls."""
    values, weights, tolerances = [], [], []
    for result, slopes, tolerance in results:
        off = slopes[heads]
        off = off[np.isfinite(off)]
        if len(off):
            values.append(float(off.mean()))
            weights.append(float(len(result.cells.of_row)))
            tolerances.append(tolerance)
    w = np.asarray(weights)
    worth = float(w.sum() ** 2 / (w**2).sum()) if len(w) else 0.0
    if worth < _MIN_CALLS:
        return 0.0, float("inf")
    x, w = np.asarray(values), w / w.sum()
    mean = float((w * x).sum())
    error = float(np.sqrt((w**2 * (x - mean) ** 2).sum()))
    quantile = float(np.sqrt(f_quantile_above(rate, 1.0, worth - 1)))
    return mean, quantile * error + float((w * np.asarray(tolerances)).sum())


def _tolerance(result: CallResult) -> float:
    family = here(result.limits.family, result.call)
    if family.quantises:
        return _SLOPE_QUANTISED * float(result.limits.ensemble.noise.median())
    return gain_tolerance(str(result.call.q.dtype).removeprefix("torch."), family.accumulation)


def not_run(results: Sequence[CallResult]) -> _Pooled | None:
    """Find the groups of calls (by phase, dtype and head_dim) whose own error is too small for their quantisation.

    Returns:
        The own error as a share of the quantisation's noise, with the least share of a kernel of the family as the limit; or
        None.
    """
    usable = [
        result
        for result in results
        if not result.fails and result.limits.family.has_least and here(result.limits.family, result.call).quantises
    ]
    groups = _grouped(usable, (("phase", "dtype", "head_dim"),))
    below = []
    for group, some in groups:
        share, limit = _share(some, FALSE_FLAGS / 4 / len(groups))
        if share < limit:
            below.append((group, share, limit, some))
    if not below:
        return None
    _, share, limit, _ = min(below, key=lambda test: test[1] / test[2])
    return _Pooled(tuple(test[0] for test in below), share, limit, _union(test[3] for test in below))


def _share(results: Sequence[CallResult], rate: float) -> tuple[float, float]:
    """Compute the mean own error as a share of the declared noise, and its limit, which is 0 if there is too little data."""
    shares, freedom = [], 0.0
    for result in results:
        declared = result.limits.ensemble
        clear = declared.noise > _CLEAR * least_error(result.call.q.dtype)
        shares += (result.own / declared.noise)[clear].tolist()
        freedom += float(declared.freedom.amin(0)[clear].sum())
    if not shares:
        return 1.0, 0.0
    return float(np.mean(shares)), _LEAST_SHARE * float(np.sqrt(chi2_quantile_below(rate, freedom)))


_AXES: dict[str, Callable[[CallResult], str]] = {
    "dtype": lambda result: str(result.call.q.dtype).removeprefix("torch."),
    "phase": lambda result: result.call.phase,
    "layer": lambda result: str(result.call.layer),
    "head_dim": lambda result: str(result.call.q.shape[2]),
    "heads": lambda result: f"{result.call.spec.first_head}+{result.call.q.shape[1]}",
}


def _grouped(results: Sequence[CallResult], by: Sequence[tuple[str, ...]]) -> list[tuple[Group, list[CallResult]]]:
    groups: dict[Group, list[CallResult]] = {}
    for axes in by:
        for result in results:
            groups.setdefault(tuple((axis, _AXES[axis](result)) for axis in axes), []).append(result)
    return list(groups.items())


def _union(groups: Iterable[Sequence[CallResult]]) -> tuple[CallResult, ...]:
    return tuple({id(result): result for some in groups for result in some}.values())
