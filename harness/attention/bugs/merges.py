"""Bugs of split KV, whose parts are attended to alone and merged by their log-sum-exps: where the merged rows are written, and from
where values are read; and the faults that are seeded of merging."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import Batch, Bug, changing_in_batch
from assay.harness.attention.bugs.seeded import Effect, Recomputed, Where, changes, of_bug, own
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import Request, attend, oracle, scores

# Keys of a part.
_SPLIT = 64


def merged(r: Request, edges: list[int], wrong: Callable[[Tensor], Tensor] = lambda lse: lse) -> Tensor:
    """Attend to each part of the keys alone, and merge the parts, [num_q_heads, asked, head_dim_v].

    Args:
        r: the sequence.
        edges: where parts begin, and the end of the last one.
        wrong: log-sum-exps of the parts, [parts, num_q_heads, asked, 1] -> what they are merged by.
    """
    logits, values = scores(r), r.v[r.kv_head]
    outs, sums = [], []
    for start, stop in pairwise(edges):
        part = logits[..., start:stop]
        lse = part.logsumexp(-1, keepdim=True)
        weights = (part - torch.where(lse.isfinite(), lse, 0.0)).exp()
        outs.append(weights @ values[:, start:stop])
        sums.append(lse)
    return (torch.stack(outs) * wrong(torch.stack(sums)).softmax(0).nan_to_num(0.0)).sum(0)


def splits_of(r: Request) -> list[int]:
    """Return where the parts of a sequence's keys begin, and the end of the last one."""
    return [*range(0, r.len_k, _SPLIT), r.len_k]


def with_a_sink(r: Request) -> Tensor:
    """Attend to the keys, and to one more with score 0 and value 0, [num_q_heads, asked, head_dim_v]."""
    return attend(r) * torch.sigmoid(scores(r).logsumexp(-1, keepdim=True))


def _prefix_merged_in_base_2(r: Request) -> Tensor | None:
    return merged(r, [0, r.prefix, r.len_k], lambda lse: lse / math.log(2)) if r.prefix else None


def _splits_merged(wrong: Callable[[Tensor], Tensor]) -> Effect:
    """Merge the parts of the keys by something else than their log-sum-exps, which `merged` gives."""
    return changes(lambda r: merged(r, splits_of(r), wrong) if r.len_k > _SPLIT else None)


def _by_next_head(r: Request) -> Tensor | None:
    if r.len_k <= _SPLIT or len(r.kv_head) < 2:
        return None
    return merged(r, splits_of(r), lambda lse: lse.roll(-1, 1))


def _last_split_lost(r: Request) -> Tensor | None:
    return merged(r, splits_of(r)[:-1]) if r.len_k > _SPLIT else None


def _empty_part_counted(batch: Batch, b: int) -> Tensor | None:
    return with_a_sink(batch[b]) if not batch[b].prefix and len(batch) > 1 else None


def _first_sequence_everywhere(call: AttentionCall, out: Tensor) -> Tensor | None:
    """Give every sequence the output of the first one, as far as that reaches."""
    edges = list(pairwise(call.cu_seqlens_q.tolist()))
    first = out[slice(*edges[0])]
    if len(edges) < 2:
        return None
    rows = torch.cat([torch.arange(stop - start) % max(1, len(first)) for start, stop in edges])
    return first[rows.to(out.device)]


def _first_sequence_alone(call: AttentionCall, rows: Tensor | None = None, /) -> Tensor | None:
    """Write the merged rows of the first sequence alone: those of the others keep what was there, which need not be finite."""
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
_of = partial(of_bug, BUGS)
FAULTS = (
    *(_of(bug.id) for bug in BUGS[:2]),
    own("lse-in-base-2", "log-sum-exp in base 2",
        "cached and new keys are merged by a base-2 log-sum-exp that is taken for base e", changes(_prefix_merged_in_base_2),
        "sgl-project/sglang#40903", "sgl-project/sglang!35045", "flashinfer-ai/flashinfer#4485"),
    own("splits-merged-equally", "parts merged equally", "parts of 64 keys count alike",
        _splits_merged(lambda lse: torch.where(lse.isfinite(), 0.0, lse)), "flashinfer-ai/flashinfer!50",
        "flashinfer-ai/flashinfer!58"),
    own("splits-merged-by-next-head", "parts merged by the next head", "parts of 64 keys are merged by the next head's log-sum-exp",
        changes(_by_next_head), "vllm-project/vllm#22103", "Dao-AILab/flash-attention#87"),
    own("last-split-lost", "last part of the keys lost", "the last part of 64 keys is not merged", changes(_last_split_lost),
        "gittensor-ai-lab/sparkinfer!714"),
    own("empty-part-counted", "empty part counted", "in a batch, an empty cached part has weight",
        Recomputed(changing_in_batch(_empty_part_counted)), "sgl-project/sglang#22688", "flashinfer-ai/flashinfer#3047",
        "sgl-project/sglang#10526"),
    own("first-sequence-everywhere", "first sequence everywhere", "decode gives every sequence the output of the first",
        _first_sequence_everywhere, "vllm-project/flash-attention!176", where=Where(phase="decode")),
)  # fmt: skip
