"""Bugs of split KV, whose parts are attended to alone and merged by their log-sum-exps: where the merged rows are written, and from
where values are read."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import Bug
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import oracle

# Keys of a part.
_SPLIT = 64


def _first_sequence_alone(call: AttentionCall, rows: Tensor | None = None, /) -> Tensor | None:
    """Write the merged rows of the first sequence alone: the other rows keep their old contents, which need not be finite."""
    ends = [end for end, new in zip(call.cu_seqlens_q.tolist()[1:], call.lens_q, strict=True) if new]
    if len(ends) < 2 or max(call.lens_k) <= _SPLIT:
        return None
    at = torch.arange(call.rows, device=call.q.device) if rows is None else rows
    return oracle(call, rows).masked_fill((at >= ends[0])[:, None, None], math.inf)


def _combined_at_wrong_strides(call: AttentionCall, rows: Tensor | None = None, /) -> Tensor | None:
    """Write row i of a tile of merged rows i * heads rows behind the first, and leave the rows zero that are not written."""
    # The rows of (sequence, head, query) are tiled, and those of (sequence, query, head) written: of sequences of equal length, as
    # an operator without packed sequences has them.
    lens, (_, heads, _), dim = {new for new in call.lens_q if new}, call.q.shape, call.v.shape[2]
    if len(lens) != 1 or heads == 1 or max(call.lens_k) <= _SPLIT:
        return None
    right, tile = oracle(call), _TILES.get(math.gcd(dim, 128), 16)
    by_head = right.view(-1, *lens, heads, dim).transpose(1, 2).reshape(-1, dim)
    row = torch.arange(len(by_head), device=right.device)
    to = row // tile * tile + row % tile * heads
    inside = to < len(by_head)
    written = torch.zeros_like(by_head).index_copy_(0, to[inside], by_head[inside])
    twice = torch.bincount(to[inside], minlength=len(by_head)) > 1  # by two blocks, in any order
    wrong = written.masked_fill(twice[:, None], math.nan).view_as(right)
    return wrong if rows is None else wrong[rows]


def _values_at_key_stride(call: AttentionCall, rows: Tensor | None = None, /) -> Tensor | None:
    """Read each row of V as far behind the first as that of K is in K; zero behind the end of V."""
    tokens, heads, dim = call.v.shape
    if call.k.shape[2] == dim or call.spec.layout == "v in k":
        return None
    row = torch.arange(tokens * heads, device=call.v.device).view(tokens, heads, 1) * call.k.shape[2]
    at = row + torch.arange(dim, device=call.v.device)
    values = torch.nn.functional.pad(call.v.flatten(), (0, 1))[at.clamp(max=call.v.numel())]
    return oracle(replace(call, v=values), rows)


# Merged rows of a tile, by what head dims are a multiple of, as FlashAttention 2 has them; 16 for others.
_TILES = {128: 4, 64: 8}
BUGS = (
    Bug("later-sequences-unwritten", "later sequences unwritten",
        "where keys are attended to in parts, the merged rows of the first sequence alone are written",
        "writes the merged output of the first sequence alone", "rows-and-strides", _first_sequence_alone,
        reports=("pytorch/pytorch#194167", "pytorch/torchtitan#3235", "Dao-AILab/flash-attention!2812")),
    Bug("merged-at-wrong-strides", "merged rows at wrong strides",
        "where keys are attended to in parts, merged rows are written as far apart as queries are, and not as heads are",
        "writes merged rows at the strides of queries", "rows-and-strides", _combined_at_wrong_strides,
        reports=("flagos-ai/FlagGems#5235",)),
    Bug("values-at-key-stride", "V read at the stride of K", "rows of v are as far apart as those of k, whose head dim is another",
        "reads V at the stride of K", "rows-and-strides", _values_at_key_stride,
        reports=("Dao-AILab/flash-attention#2367", "flagos-ai/FlagAttention#45")),
)  # fmt: skip
