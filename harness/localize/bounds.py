"""Bounds from noise: the largest and the smallest error that a correct kernel may have in each cell of a call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.honest import MEMBERS, added_key_by_key, here, honest_outputs, members_by_way
from assay.harness.attention.noise import NoiseFamily, family
from assay.harness.attention.oracle import log_sum_exp, oracle
from assay.harness.localize.cells import CallCells, cells_of
from assay.harness.stats.noise_bound import FALSE_FLAGS, cell_bounds
from assay.harness.stats.query_bounds import (
    dropping_cost,
    least_error,
    query_bounds,
    rare_excess_of_queries,
    structure,
    with_all_heads,
    with_rare_draws,
)

CELLS = 120_000
"""Number of (cell, head) pairs for which an honest kernel is flagged in at most `FALSE_FLAGS` / 4 of all matrices. The small
matrix has about 80,000, the full one 115,000."""
# Ensemble size on a call of a few tokens. Where one rounding decides, 16 draws say little about the next one.
_MAX_MEMBERS = 48
# Ensemble size for log-sum-exps. Each is one number with the tail of a single rounding, which a few members do not sample.
_LSE_MEMBERS = 96
# An error of a log-sum-exp up to this share of the bound for `_LSE_MEMBERS`, with the noise of `MEMBERS`, needs no more members.
_FAR = 0.5
# In a longer call too, one rounding may decide in a cell of up to this many queries.
_FEW_QUERIES = 16
# Without quantisation, an own error of this many times the bound of `MEMBERS` exceeds the bound of more members too. With coarse
# scores, one rounding may make another key win, which a few members do not show at all.
_OBVIOUS = 100.0
# Adding up to 4,096 keys one by one in float32 costs far less than this relative L1: half an ulp for each is 2.4e-4.
_MOST_KEY_BY_KEY = 1e-3
# Standard deviations of the rarest draw: a normal variable exceeds it at `FALSE_FLAGS` / 4 / `CELLS`.
_RARE = 5.8
# From this many scores (queries x keys x heads) on, an ensemble has `MEMBERS` members.
_SMALL = 2**16


@dataclass(frozen=True)
class _Ensemble:
    """The answers of honest implementations on a call, by cell and head; float64, on the CPU."""

    # Relative L1 of each member, [members, cells, num_q_heads], or 0 where its output is not finite.
    errors: Tensor
    # Independent roundings, and the share of the mean square error that all members of a way have in common, [ways, cells,
    # num_q_heads].
    freedom: Tensor
    common: Tensor
    # Slope of each member's output on the truth, [members, num_q_heads].
    slopes: Tensor
    # Sizes of the consecutive groups of members that implement attention in the same way.
    ways: tuple[int, ...]
    # The most that dropping weights costs, [cells, num_q_heads], or 0 where the family drops none.
    dropped: Tensor

    @property
    def noise(self) -> Tensor:
        """Root mean square of the members' relative L1, float64 [cells, num_q_heads]."""
        return self.errors.square().mean(0).sqrt()


class CallNoise:
    """The error that noise explains on a call, simulated on first use.

    Attributes:
        call: the call.
        family: the noise family.
        cells: the cells of the call.
    """

    def __init__(self, call: AttentionCall, noise: str = "", cells: CallCells | None = None) -> None:
        self.call, self.family = call, family(noise)
        self.cells = cells_of(call) if cells is None else cells
        self._known: dict[int, Tensor] = {}

    @cached_property
    def ensemble(self) -> _Ensemble:
        """The ensemble of the family, on all cells."""
        return simulate(self.call, self.family, self.cells)

    @cached_property
    def bounds(self) -> Tensor:
        """The bound of each cell and head, float64 [cells, num_q_heads]."""
        return self._bounds(self.ensemble)

    @property
    def largest_bound(self) -> float:
        """The largest of all bounds."""
        return float(self.bounds.max())

    def bounds_where(self, own: Tensor) -> Tensor:
        """Compute the bounds of the cells whose own error needs one, float64 [cells, num_q_heads]; `least_error` elsewhere.

        Only cells with an own error above `least_error` are simulated. In a cell of few queries, an own error above the bound is
        also compared with the bound of `_MAX_MEMBERS`, unless it is obviously wrong (`_OBVIOUS`), and `_rare_excess` is added.
        """
        bounds = torch.full_like(own, least_error(self.call.q.dtype))
        needed = (own > bounds).any(1).nonzero().flatten().tolist()
        if needed:
            bounds[needed] = self.bounds_of(needed)
        queries = torch.bincount(self.cells.of_row, minlength=len(own))
        obvious = _OBVIOUS if _is_exact(self.call, self.family) else math.inf
        near = ((own > bounds) & (own < obvious * bounds)).any(1)
        few = (near & (queries <= _FEW_QUERIES).to(own.device)).nonzero().flatten().tolist()
        if few:
            again = self._bounds(simulate(self.call, self.family, self.cells.only(few), _MAX_MEMBERS))
            bounds[few] = torch.maximum(bounds[few], again)
        above = (own > bounds).any(1).nonzero().flatten().tolist()
        if above and (self.family.q is not None or self.family.k is not None):
            bounds[above] += _rare_excess(self.call, self.family, self.cells.only(above))
        small = [cell for cell in above if float(own[cell].min()) < _MOST_KEY_BY_KEY]
        if small and _may_add_key_by_key(self.call, self.family):
            bounds[small] += _by_cell(
                self.call, self.cells.only(small), _key_by_key(self.call, self.cells.only(small).rows)
            )
        return bounds

    def bounds_of(self, chosen: Sequence[int]) -> Tensor:
        """Compute the bounds of some cells, float64 [chosen, num_q_heads]. Simulates only these, each once."""
        if "ensemble" in vars(self) or len(chosen) == len(self.cells.sequence):
            return self.bounds[list(chosen)]
        if missing := [cell for cell in chosen if cell not in self._known]:
            simulated = self._bounds(simulate(self.call, self.family, self.cells.only(missing)))
            self._known |= dict(zip(missing, simulated, strict=True))
        return torch.stack([self._known[cell] for cell in chosen])

    def _bounds(self, ensemble: _Ensemble) -> Tensor:
        # A kernel implements attention in one way. Where ways differ (TF32 may cut off a query's only weight), all members
        # together have less noise than the noisiest way.
        bounds = [
            cell_bounds(errors.numpy(), freedom.numpy(), CELLS, FALSE_FLAGS / 4, common.numpy())
            for errors, freedom, common in zip(
                torch.split(ensemble.errors, list(ensemble.ways)), ensemble.freedom, ensemble.common, strict=True
            )
        ]
        return torch.from_numpy(np.maximum.reduce(bounds)).clamp(min=least_error(self.call.q.dtype)) + ensemble.dropped


def _rare_excess(call: AttentionCall, family: NoiseFamily, cells: CallCells) -> Tensor:
    """Compute the cost of a rare draw beyond its multiple of the usual noise, relative L1, float64 [cells, num_q_heads]."""
    # Storing Q and K shifts scores, and weights follow exponentially: where two keys are far apart and scores are coarse, a draw
    # of five standard deviations makes another key win, which no ensemble of usual draws shows. So each member's shifts are
    # repeated at `_RARE` times their size. The excess of one query is the error beyond `_RARE` times the usual one. It strikes
    # one query of a cell at a time, and is zero where the error grows linearly, as with INT8 on most data.
    right = _truth(call, cells.rows)
    excess = rare_excess_of_queries(call, family, cells.rows, right, _RARE)
    here = [cells.of_row == cell for cell in range(len(cells.sequence))]
    worst = torch.stack([excess[rows].amax(0) for rows in here])
    size = torch.stack([right[rows].abs().sum((0, 2)) for rows in here])
    return torch.where(size > 0, worst / size, 0.0).cpu()


def _may_add_key_by_key(call: AttentionCall, family: NoiseFamily) -> bool:
    """Return True if the cost of adding key by key can show: in float32 without quantisation, which is far noisier."""
    return call.q.dtype == torch.float32 and _is_exact(call, family)


def _is_exact(call: AttentionCall, family: NoiseFamily) -> bool:
    """Return True if a kernel of this family adds in float32 on the call's device, and quantises nothing."""
    return here(family, call).accumulation == "fp32" and not any((family.q, family.k, family.v, family.p))


def _key_by_key(call: AttentionCall, rows: Tensor | None) -> Tensor:
    """Bound each query's cost of adding key by key: sum of |output - truth| over head_dim, float64 [rows, num_q_heads]."""
    return (added_key_by_key(call, rows) - _truth(call, rows)).abs().sum(-1).nan_to_num(posinf=0.0).amax(0)


def _by_cell(call: AttentionCall, cells: CallCells, of_queries: Tensor) -> Tensor:
    """Convert queries' errors, [rows, num_q_heads], to relative L1 by cell, float64 [cells, num_q_heads], on the CPU."""
    size = cells.sums(_truth(call, cells.rows).abs().sum(-1))
    return torch.where(size > 0, cells.sums(of_queries) / size, 0.0).cpu()


def bounds_of_queries(call: AttentionCall, family: NoiseFamily, rows: Tensor, own: Tensor, lse: bool = False) -> Tensor:
    """Compute the largest error that noise explains in single queries, by head and over all heads together.

    Args:
        call: the call.
        family: the noise family.
        rows: packed query rows, int64 [rows], in increasing order.
        own: sum of |output - truth| of each, float64 [rows, num_q_heads + 1], on the CPU; the last column is for all heads. Rare
            draws are simulated only where this is above the bound.
        lse: whether the errors are of log-sum-exps instead of outputs.

    Returns:
        Bounds on `own`, from `assay.harness.stats.query_bounds`, for the noisiest way of implementing attention.
    """
    right = log_sum_exp(call, rows)[..., None] if lse else _truth(call, rows)
    members = MEMBERS if rows.numel() * call.k.shape[0] * call.q.shape[1] >= _SMALL else _MAX_MEMBERS
    if lse:
        bounds, freedom = _noise_of_queries(call, family, rows, right, lse, MEMBERS, of=_LSE_MEMBERS)
        near = (own > _FAR * bounds).any(1).nonzero().flatten()
        if len(near):
            some = near.to(rows.device)
            bounds[near], freedom[near] = _noise_of_queries(call, family, rows[some], right[some], lse, _LSE_MEMBERS)
    else:
        bounds, freedom = _noise_of_queries(call, family, rows, right, lse, members)
    lost = (
        right.new_full(right.shape[:2], -math.log1p(-family.dropped))
        if lse
        else dropping_cost(call, family, rows, right)
    )
    bounds += with_all_heads(lost).cpu()
    above = own > bounds
    bounds = with_rare_draws(bounds, freedom, own, call, family, rows, right, lse)
    if not lse and bool(above.any()) and _may_add_key_by_key(call, family):
        some = above.any(1).nonzero().flatten()
        bounds[some] += with_all_heads(_key_by_key(call, rows[some.to(rows.device)])).cpu()
    return bounds


def _noise_of_queries(
    call: AttentionCall,
    family: NoiseFamily,
    rows: Tensor,
    right: Tensor,
    lse: bool,
    members: int,
    of: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Simulate `query_bounds` of the noisiest way, and the least freedom: both float64 [rows, num_q_heads + 1], on the CPU."""
    # The bounds are those that `of` members would have with the noise of these.
    off = _off(honest_outputs(call, family, rows, members, lse=lse), right)
    parts, all_of_way = (members_by_way(call, family, count) for count in (members, of or members))
    ways = [query_bounds(part, count) for part, count in zip(torch.split(off, parts), all_of_way, strict=True)]
    bounds, freedom = (torch.stack(values) for values in zip(*ways, strict=True))
    return bounds.amax(0), freedom.amin(0)


def simulate(call: AttentionCall, family: NoiseFamily, cells: CallCells, members: int | None = None) -> _Ensemble:
    """Simulate an ensemble on some cells of a call, by default with `MEMBERS` members, or `_MAX_MEMBERS` on few tokens."""
    rows = cells.rows
    scores = cells.of_row.numel() * call.k.shape[0] * call.q.shape[1]
    members = members or (MEMBERS if scores >= _SMALL else _MAX_MEMBERS)
    right = _truth(call, rows)
    off = _off(honest_outputs(call, family, rows, members), right)
    count, heads = len(cells.sequence), call.q.shape[1]
    size = cells.sums(right.abs().sum(-1))
    distance = cells.sums(torch.linalg.vector_norm(off, ord=1, dim=-1).movedim(0, -1))  # [cells, heads, members]
    errors = torch.where(size[..., None] > 0, distance / size[..., None].clamp(min=torch.finfo(size.dtype).tiny), 0.0)
    products, along = _products(off, right, cells)
    ways = members_by_way(call, family, members)
    ends = np.cumsum([0, *ways]).tolist()
    of_ways = [structure(products[..., start:stop, start:stop]) for start, stop in pairwise(ends)]
    freedom, common = (torch.stack(values).cpu() for values in zip(*of_ways, strict=True))
    squares = right.square().sum((0, 2))
    slopes = (squares + along) / torch.where(squares > 0, squares, 1.0)
    assert errors.shape == (count, heads, members)
    lost = torch.where(size > 0, cells.sums(dropping_cost(call, family, rows, right)) / size, 0.0)
    return _Ensemble(errors.movedim(-1, 0).cpu().contiguous(), freedom, common, slopes.cpu(), tuple(ways), lost.cpu())


def _truth(call: AttentionCall, rows: Tensor | None) -> Tensor:
    """Compute the oracle's output, with 0 for queries that see no key: their output is not compared."""
    return oracle(call, rows).nan_to_num_(nan=0.0)


def _off(outputs: Tensor, right: Tensor) -> Tensor:
    """Subtract the truth from the outputs in place; elements that are not finite become 0."""
    return outputs.sub_(right).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _products(off: Tensor, right: Tensor, cells: CallCells) -> tuple[Tensor, Tensor]:
    """Multiply the members' errors with each other, [cells, heads, members, members], and with the truth, [members, heads].

    `off` is output - truth, float64 [members, rows, heads, head_dim]; `right` is the truth, float64 [rows, heads, head_dim].
    """
    # One matrix product for each cell and head sums over its queries without products of each query.
    members, rows, heads, _ = off.shape
    count = len(cells.sequence)
    if rows == count:  # one query each
        each = off.permute(1, 2, 0, 3)
        products = off.new_empty(rows, heads, members, members)
        products[cells.of_row] = each @ each.transpose(-2, -1)
        return products, torch.einsum("mrhd,rhd->mh", off, right)
    products, along = off.new_empty(count, heads, members, members), off.new_zeros(members, heads)
    for cell in range(count):
        some = (cells.of_row == cell).nonzero().flatten()
        of_cell, truth_of_cell = off, right
        if count > 1:
            of_cell, truth_of_cell = off.index_select(1, some), right.index_select(0, some)
        flat = of_cell.permute(2, 0, 1, 3).flatten(2)  # [heads, members, queries x head_dim]
        torch.bmm(flat, flat.transpose(1, 2), out=products[cell])
        along += (flat @ truth_of_cell.transpose(0, 1).flatten(1)[..., None])[..., 0].T
    return products, along
