"""Compares the log-sum-exps of a kernel that declares them with the oracle's in every call, and names what is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import Bug
from assay.harness.attention.bugs.lse import BUGS
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.noise import NoiseFamily
from assay.harness.attention.oracle import log_sum_exp
from assay.harness.localize.bounds import bounds_of_queries

LSE_WRONG = "lse-wrong"
"""Id of the finding that log-sum-exps are wrong in an unknown way."""
LSE_FINDINGS = (LSE_WRONG, *(bug.id for bug in BUGS))
"""Ids of all findings about log-sum-exps."""
_EPS = torch.finfo(torch.float32).eps
# The error that any implementation may have, in units of float32's eps: a few for exponentials, products and the logarithm; two
# times the log-sum-exp for rounding scores and the result; and half a unit for each key that is added to the sum.
_LEAST, _OF_LSE, _OF_KEY = 6.0, 2.0, 0.5
# Most queries of a call whose bounds are simulated: those with the largest errors.
_MOST_SIMULATED = 64
# FlashInfer uses 5e4 as infinity (``constexpr float inf`` in its ``math.cuh``), so its log-sum-exp is about -5e4 log(2) where
# others have -inf. In a merge, both have no weight.
_NOTHING = -3e4
# A bug explains log-sum-exps if, on every wrong call, their distance to the bug's is at most this share of that to the oracle's.
_FIT = 0.1


@dataclass(frozen=True)
class LseErrors:
    """The errors of a call's log-sum-exps.

    Attributes:
        call: the call.
        lse: the kernel's log-sum-exps, float64 [rows, num_q_heads].
        right: the oracle's, in the same layout.
        own: their distance, in the same layout; infinite where only one of the two is finite.
        least: the error that any implementation may have, in the same layout.
        family: the noise family that the kernel declares.
        rows: packed query rows that are compared, int64, in increasing order, or None for all.
    """

    call: AttentionCall
    lse: Tensor
    right: Tensor
    own: Tensor
    least: Tensor
    family: NoiseFamily
    rows: Tensor | None

    @cached_property
    def bounds(self) -> Tensor:
        """The largest error that noise explains, like `own`; infinite where not simulated because others are further off."""
        bounds = self.least.clone()
        excess = (self.own / self.least).amax(1)
        suspects = (excess > 1).nonzero().flatten()
        if len(suspects):
            worst = suspects[excess[suspects].argsort(descending=True, stable=True)]
            # The worst of each sequence come first: otherwise a sequence would pass if another has many larger errors.
            of = self.sequence_of[worst]
            rank = (of[:, None] == of).tril().sum(1)
            chosen = worst[rank.argsort(stable=True)[:_MOST_SIMULATED]].sort()[0]
            packed = chosen if self.rows is None else self.rows[chosen]
            summed = torch.cat([self.own[chosen], self.own[chosen].sum(1, keepdim=True)], 1).cpu()
            simulated = bounds_of_queries(self.call, self.family, packed, summed, lse=True)[:, :-1].to(bounds.device)
            bounds[suspects] = math.inf
            bounds[chosen] = torch.maximum(self.least[chosen], simulated)
        return bounds

    @property
    def sequence_of(self) -> Tensor:
        """The sequence of each compared query, int64."""
        packed = torch.arange(self.call.rows, device=self.call.q.device) if self.rows is None else self.rows
        return torch.bucketize(packed, self.call.cu_seqlens_q[1:].to(packed.dtype), right=True)

    @property
    def excess(self) -> float:
        """The largest error as a multiple of its bound; above 1 it is out of bounds."""
        return float((self.own / self.bounds).nan_to_num(nan=0.0).max())

    @property
    def wrong(self) -> bool:
        """True if any is out of bounds."""
        return self.excess > 1

    @property
    def wrong_heads(self) -> set[int]:
        """The q heads that have any out of bounds, by their numbers in the model."""
        return {
            self.call.spec.first_head + head for head in (self.own > self.bounds).any(0).nonzero().flatten().tolist()
        }

    @property
    def wrong_sequences(self) -> tuple[bool, ...]:
        """For each sequence, whether any is out of bounds."""
        return self.sequences_with(self.own > self.bounds)

    def sequences_with(self, wrong: Tensor) -> tuple[bool, ...]:
        """Return, for each sequence, whether it has one of these log-sum-exps, bool [rows, num_q_heads]."""
        bad = set(self.sequence_of[wrong.any(1)].tolist())
        return tuple(b in bad for b in range(len(self.call.lens_q)))

    @property
    def worst(self) -> tuple[float, float]:
        """Error and bound of the log-sum-exp that is furthest beyond its bound."""
        at = int((self.own / self.bounds).nan_to_num(nan=0.0).argmax())
        return float(self.own.flatten()[at]), float(self.bounds.flatten()[at])

    def explained_by(self, bug: Bug) -> bool:
        """Return True if a bug explains these log-sum-exps."""
        wrong = bug.compute(self.call, self.rows)
        if wrong is None:
            return False
        off = _distance(self.lse, wrong)
        return bool(off.isfinite().all()) and float(off.mean()) <= _FIT * float(self.own.mean())


def lse_errors(call: AttentionCall, lse: Tensor, family: NoiseFamily, rows: Tensor | None) -> LseErrors:
    """Compare log-sum-exps with the oracle's.

    Args:
        call: the call.
        lse: float32 [total_q, num_q_heads].
        family: the noise family that the kernel declares.
        rows: packed query rows to compare, int64, in increasing order, or None for all.
    """
    right = log_sum_exp(call, rows)
    given = (lse if rows is None else lse[rows]).double()
    own = _distance(given, right)
    keys = max(call.lens_k)
    least = _EPS * (_LEAST + _OF_KEY * keys + _OF_LSE * right.abs().nan_to_num(posinf=0.0))
    return LseErrors(call, given, right, own, least, family, rows)


def _distance(lse: Tensor, expected: Tensor) -> Tensor:
    """Compute the distance of log-sum-exps: 0 between equal infinities, infinite where only one is finite."""
    lse = torch.where((expected == -math.inf) & (lse < _NOTHING), expected, lse)
    return torch.where(lse == expected, 0.0, (lse - expected).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


def named_bugs(wrong: Sequence[LseErrors]) -> list[Bug]:
    """List the bugs that explain the log-sum-exps of all wrong calls."""
    return [bug for bug in BUGS if all(errors.explained_by(bug) for errors in wrong)]
