"""Bounds of single queries: the largest error that another honest implementation makes in the worst of up to `_QUERIES` queries.

A cell averages over its queries, so a few wholly wrong ones drown in a cell of thousands. The theory is the same as for cells
(`assay.harness.stats.noise_bound`), for the error vector of one query, but its distribution is used at a far smaller rate: the
probability that the largest of n errors is above its bound is at most n times that of a single one (Bonferroni), so it does not
matter which of the queries are examined, or why.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.honest import MEMBERS, honest_outputs
from assay.harness.attention.noise import NoiseFamily
from assay.harness.attention.oracle import sequences
from assay.harness.stats.noise_bound import FALSE_FLAGS, MODEL_FACTOR, cell_bounds, f_quantile_above

# Queries x heads among which an honest kernel has one out of bounds in at most `FALSE_FLAGS` / 4 of all comparisons.
_QUERIES = 10**9
# `MODEL_FACTOR` for one query: the cost of another block size, or of its outlier, does not average out in one query. Measured:
# `benchmarks/honest_kernels.py`.
_QUERY_FACTOR = 2.0
QUERY_SHARE = 2.0
"""An error of a query up to this multiple of its cell's bound per query is never out of bounds. It is the scale of a query whose
values cancel, and avoids simulating the others."""
# The least bound for any implementation: half an eps of the output's dtype, the most that its last rounding costs each number, and
# a few eps of a float32 accumulator.
_LEAST_ROUNDING, _LEAST_ACCUMULATION = 0.5, 6.0
# Share of a query's estimated freedom to rely on: few members determine it only to about a factor.
_FREEDOM_SHARE = 0.5


def query_bounds(off: Tensor, members: int | None = None) -> tuple[Tensor, Tensor]:
    """Compute the largest error that noise explains in each query, by head, and over all heads together.

    An error is not divided by the size of its query: cancelling values do not make it smaller.

    Args:
        off: output - truth of honest implementations of one kind, [members, rows, heads, head_dim]; finite.
        members: number of members with this noise, or None for those given.

    Returns:
        Bounds on the sum of |output - truth|, and the freedom they rely on, each float64 [rows, heads + 1], on the CPU; the last
        column is for all heads.

    Raises:
        ValueError: there are fewer than two members.
    """
    products = torch.einsum("mrhd,nrhd->rhmn", off, off)
    freedom, shared = structure(torch.cat([products, products.sum(1, keepdim=True)], 1))
    errors = with_all_heads(off.abs().sum(-1)).cpu().numpy()
    free = np.maximum(1.0, _FREEDOM_SHARE * freedom.cpu().numpy())
    bounds = cell_bounds(errors, free, _QUERIES, FALSE_FLAGS / 4, shared.cpu().numpy(), members)
    return torch.from_numpy(_QUERY_FACTOR / MODEL_FACTOR * bounds), torch.from_numpy(free)


def with_rare_draws(
    bounds: Tensor, freedom: Tensor, own: Tensor, call: AttentionCall, family: NoiseFamily, rows: Tensor, right: Tensor,
    lse: bool = False,
) -> Tensor:  # fmt: skip
    """Add the cost of a rare draw of stored Q and K to the bounds of the queries whose error exceeds theirs.

    Args:
        bounds: from `query_bounds`, [rows, heads + 1], on the CPU. They are changed in place.
        freedom: the freedom that they rely on, likewise.
        own: the errors, likewise.
        rows: packed query rows, int64 [rows], in increasing order.
        right: their truth, float64 [rows, num_q_heads, head_dim_v].
        lse: whether `right` has log-sum-exps, [rows, num_q_heads, 1].
    """
    above = own > bounds
    if bool(above.any()) and (family.q is not None or family.k is not None):
        some = above.any(1).nonzero().flatten()
        here = some.to(right.device)
        rare = _rarest(float(freedom[above].min()))
        excess = rare_excess_of_queries(call, family, rows[here], right[here], rare, lse)
        bounds[some] += with_all_heads(excess).cpu()
    return bounds


def _rarest(freedom: float) -> float:
    """Compute the root mean square, in standard deviations, of the rarest draw of `freedom` independent roundings: 7.2 for one."""
    return float(np.sqrt(f_quantile_above(FALSE_FLAGS / 4 / _QUERIES, freedom, 1e9)))


def rare_excess_of_queries(
    call: AttentionCall, family: NoiseFamily, rows: Tensor | None, right: Tensor, rare: float, lse: bool = False
) -> Tensor:
    """Compute each query's cost of a draw of `rare` standard deviations of stored Q and K, beyond that multiple of its usual error.

    Args:
        rows: packed query rows, int64 [rows], in increasing order, or None for all.
        right: their truth, float64 [rows, num_q_heads, head_dim_v].
        lse: whether `right` has log-sum-exps, [rows, num_q_heads, 1].

    Returns:
        Sums over head_dim, float64 [rows, num_q_heads].
    """
    scores = replace(family, v=None, p=None)
    usual, stretched = (
        (honest_outputs(call, scores, rows, MEMBERS, stretch=stretch, lse=lse) - right)
        .abs()
        .sum(-1)
        .nan_to_num(nan=0.0, posinf=0.0)
        for stretch in (1.0, rare)
    )
    return (stretched - rare * usual).clamp(min=0.0).amax(0)


def dropping_cost(call: AttentionCall, family: NoiseFamily, rows: Tensor | None, right: Tensor) -> Tensor:
    """Bound each query's cost of leaving out weights: sum of |output - truth| over head_dim, float64 [rows, num_q_heads].

    If weights w_j with the sum e are left out, output - truth is sum_j w_j (truth - v_j) / (1 - e).
    """
    if not family.dropped:
        return right.new_zeros(right.shape[:2])
    size = call.v.double().abs().sum(-1)
    by_sequence = torch.stack([size[some].amax(0) for _, some in sequences(call)])
    largest = by_sequence.repeat_interleave(call.heads.group, 1)
    at = torch.arange(call.rows, device=right.device) if rows is None else rows
    sequence = torch.bucketize(at, call.cu_seqlens_q[1:].long(), right=True)
    return family.dropped / (1 - family.dropped) * (largest[sequence] + right.abs().sum(-1))


def least_error(dtype: torch.dtype) -> float:
    """Return a lower limit of every bound on relative L1 in this dtype."""
    work = torch.promote_types(dtype, torch.float32)
    return _LEAST_ROUNDING * torch.finfo(dtype).eps + _LEAST_ACCUMULATION * torch.finfo(work).eps


def with_all_heads(by_head: Tensor) -> Tensor:
    """Append the sum over heads as a column, [..., heads] -> [..., heads + 1]."""
    return torch.cat([by_head, by_head.sum(-1, keepdim=True)], -1)


def structure(products: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Satterthwaite's freedom of the differences between members, and the share of their mean square in common.

    Args:
        products: inner products of the members' error vectors, [..., members, members].

    Returns:
        Each [...].
    """
    members = products.shape[-1]
    square = products.diagonal(dim1=-2, dim2=-1).mean(-1)
    pairs = members * (members - 1)
    shared = ((products.sum((-1, -2)) - members * square) / pairs).clamp(min=0.0)  # E<a, b> of two members
    rows, every = products.mean(-1, keepdim=True), products.mean((-1, -2), keepdim=True)
    centred = products - rows - rows.transpose(-1, -2) + every
    own = centred.diagonal(dim1=-2, dim2=-1)
    spread = own.mean(-1) * members / (members - 1)  # trace(C)
    others = (centred.square().sum((-1, -2)) - own.square().sum(-1)) / pairs - (spread / members).square()  # trace(C^2)
    freedom = spread.square() / torch.maximum(others, spread.square() / 1e5).clamp(min=torch.finfo(spread.dtype).tiny)
    return freedom.clamp(min=1.0), torch.where(square > 0, shared / square, 0.0)
