"""Weights from recorded outputs: a query's output is a sum of few rows of V, so that the weights of these rows can be solved for.

out = sum of weights * V has head_dim_v equations. Rows of V are linearly independent as long as they are no more than that; with
fewer, the equations that are left say whether these rows are all that was summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.localize.reading import Flags, Numbers, Reading, own_keys
from assay.harness.readout.features import Ints
from assay.harness.readout.rows import Tolerance

UNKNOWNS = 0.75
"""Most keys that are solved for, as a share of head_dim_v: a quarter of the equations is left to test the solution. The error of a
weight is then no larger than that of one number of the output: with random rows of V of size 1 per number, it is that divided by
sqrt(head_dim_v - keys)."""
_REST = 4.0
"""Multiple of the noise that may be left of an output. The noise is that of the better rows of right calls; single rows have up to
three times as much."""
_UNSURE = 4.0
"""Multiple of the error of a weight, as a standard deviation, beyond which it is told from another: 1 of 16,000 is by chance."""
_LEAST = 0.05
"""A row whose weights are not known better than this says nothing of its keys."""
_TO_SIGMA = 1.25
"""Standard deviation of normal errors as a multiple of their mean size: sqrt(pi / 2)."""
_MOST_SEQUENCES = 6
"""Sequences of a call whose keys are tried as another's."""


@dataclass(frozen=True)
class Solved:
    """The weights of some queries of a recorded call.

    Attributes:
        reading: the weights; zero, with `off` infinite, where they could not be solved for. `constant` is zero.
        errors: standard error of a weight, the largest of the row, float64 [rows, num_q_heads].
        total: sum of the standard errors of all weights of a row, likewise.
    """

    reading: Reading
    errors: Numbers
    total: Numbers

    @property
    def known(self) -> Flags:
        """Of which queries and heads the weights are known, bool [rows, num_q_heads]."""
        return np.isfinite(self.reading.off)

    def tolerance(self, row: int, head: int) -> Tolerance:
        """How exact the weights of a query and head are."""
        return tolerance_of(float(self.errors[row, head]), float(self.total[row, head]))

    def shown(self, head: int) -> Reading | None:
        """The known rows of a head, with weights that noise explains as it would have them; None if no row is known.

        A weight that is the right one times the factor of its row, up to `_UNSURE` errors, is that; one that is zero up to as much
        is zero.
        """
        rows = np.flatnonzero(self.known[:, head])
        if not len(rows):
            return None
        one = self.reading
        read, expected = one.weights[rows, head], one.expected[rows, head]
        unsure = _UNSURE * self.errors[rows, head][:, None, None]
        sure = (read > 5 * unsure) & (expected > 5 * unsure)
        ratios = np.where(sure, read / np.where(sure, expected, 1.0), np.nan)
        with np.errstate(all="ignore"):
            factor = np.array([np.nanmedian(r) if s.any() else 1.0 for r, s in zip(ratios, sure, strict=True)])
        right = ((np.abs(read - expected) <= unsure) | ~sure).all((1, 2))
        factor[right] = 1.0
        usual = factor[:, None, None] * expected
        shown = np.where(np.abs(read) <= unsure, 0.0, read)
        shown = np.where(np.abs(read - usual) <= unsure, usual, shown)
        weights = one.expected[rows].copy()
        weights[:, head] = shown
        return Reading(one.call, one.rows[rows], weights, one.constant[rows], np.zeros(weights.shape[:2]), one.number)


def tolerance_of(error: float, total: float) -> Tolerance:
    """The tolerance of weights with this standard error, and with this sum of them.

    A log weight is off by error / weight. Where a row is noisy, a larger error of a log weight is accepted, so that fewer of its
    weights are too faint to be looked at: both grow with the square root of the noise.
    """
    usual = Tolerance()
    log = float(np.clip(10 * np.sqrt(error), usual.log, 0.2))
    return Tolerance(max(usual.weight, _UNSURE * total), log, max(usual.least, _UNSURE * error / log))


def solve(call: AttentionCall, rows: Ints, out: Numbers, noise: float) -> Solved:
    """The weights of some queries of a recorded call, where keys can be found that give the outputs.

    The keys that a query should see come first, then those of its sequence, those at its ends, those of other sequences, and other
    kv heads: the first that give the output, and are no more than `UNKNOWNS` of head_dim_v.

    Args:
        call: the call.
        rows: packed rows of q.
        out: what was recorded of them, [rows, num_q_heads, head_dim_v].
        noise: error of a right output, relative L1.
    """
    heads, kv_heads = call.q.shape[1], call.k.shape[1]
    values = call.v.double().cpu()
    wanted = torch.from_numpy(out)
    weights = np.zeros((len(rows), heads, kv_heads, call.k.shape[0]))
    off, errors, total = (np.full((len(rows), heads), bad) for bad in (np.inf, 0.0, 0.0))
    for n, row in enumerate(rows.tolist()):
        for own in range(kv_heads):
            its = call.heads.readers(own)
            left = wanted[n, its].isfinite().all(-1).numpy()
            for kv, keys in _supports(call, row, own):
                if not left.any():
                    break
                found = _solved(values[keys, kv], wanted[n, its], noise)
                if found is None:
                    continue
                hit = left & found.fits
                for head in np.flatnonzero(hit) + its.start:
                    one = head - its.start
                    weights[n, head, kv, keys] = found.weights[one]
                    off[n, head], errors[n, head], total[n, head] = found.off[one], found.errors[one], found.total[one]
                left &= ~hit
    constant = np.zeros((*off.shape, call.v.shape[2]))
    return Solved(Reading(call, rows, weights, constant, off), errors, total)


@dataclass(frozen=True)
class _Solution:
    """Weights of some keys, for each q head: weights [heads, keys], and what they leave, [heads]."""

    weights: Numbers
    off: Numbers
    errors: Numbers
    total: Numbers
    fits: Flags


def _solved(values: Tensor, wanted: Tensor, noise: float) -> _Solution | None:
    """Least squares by a QR decomposition.

    Args:
        values: of some keys, [keys, head_dim_v].
        wanted: the outputs, [heads, head_dim_v].
        noise: error of a right output, relative L1.

    Returns:
        None if the values are linearly dependent.
    """
    keys, dim = values.shape
    q, r = torch.linalg.qr(values.T)
    diagonal = r.diagonal().abs()
    if not bool((diagonal > 1e-9 * diagonal.max()).all()):
        return None
    inverse = torch.linalg.solve_triangular(r, torch.eye(keys, dtype=r.dtype), upper=True)
    inside = wanted @ q
    weights = inside @ inverse.T
    size = wanted.abs().sum(-1)
    rest = (wanted - inside @ q.T).abs().sum(-1)
    sigma = (_TO_SIGMA * noise / dim) * size
    spread = inverse.norm(dim=1)
    errors, total = sigma * spread.max(), sigma * spread.sum()
    fits = rest <= _REST * noise * (1 - keys / dim) ** 0.5 * size
    sure = np.array([tolerance_of(float(e), float(t)).least <= _LEAST for e, t in zip(errors, total, strict=True)])
    off = (rest / size.clamp(min=1e-12)).numpy()
    return _Solution(weights.numpy(), off, errors.numpy(), total.numpy(), fits.numpy() & sure)


def _supports(call: AttentionCall, row: int, own: int) -> Iterator[tuple[int, Ints]]:
    """Keys that a query may have seen, (kv head, packed rows), likelier ones first; none twice."""
    most = int(UNKNOWNS * call.v.shape[2])
    known: set[tuple[int, bytes]] = set()
    for kv in (own, *(n for n in range(call.k.shape[1]) if n != own)):
        for keys in _key_sets(call, row, most):
            if 0 < len(keys) <= most and (mark := (kv, keys.tobytes())) not in known:
                known.add(mark)
                yield kv, keys


def _key_sets(call: AttentionCall, row: int, most: int) -> Iterator[Ints]:
    spans = own_keys(call)
    place = next(n for n, (q, _) in enumerate(spans) if q.start <= row < q.stop)
    (its_q, its_k), every = spans[place], np.arange(call.k.shape[0])
    first, stop = its_k.start, its_k.stop
    _, end = call.spec.mask.span(row - its_q.start, its_q.stop - its_q.start, stop - first)
    last = first + end  # one behind the last key that it should see
    yield every[first:last]
    yield every[first:stop]
    yield every[max(first, last - most) : last]
    yield every[max(first, min(stop, last + most // 4) - most) : min(stop, last + most // 4)]
    yield every[max(first, stop - most) : stop]
    ends = [every[first : min(last, first + most // 4)], every[max(first, last - most // 2) : last]]
    yield np.unique(np.concatenate(ends))
    yield every[max(0, last - most) : last]
    yield every[first : first + most]
    others = [k for n, (_, k) in enumerate(spans) if n != place][:_MOST_SEQUENCES]
    for other in others:
        yield every[other][:most]
        yield np.union1d(every[first:last], every[other])
        yield np.union1d(every[max(first, last - most // 2) : last], every[other][: most // 2])
        yield np.union1d(every[max(first, last - most // 2) : last], every[other][-(most // 2) :])
    yield every
