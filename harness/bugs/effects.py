"""The effects of public bugs on a right output, beyond the hypotheses: each a function of a call and its right output.

`changes` turns a bug on one sequence (`assay.harness.bugs.bug.Change`) into an effect; the other effects change the output
itself. An effect gives None where the bug cannot show.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import Request, attend, scores
from assay.harness.bugs.bug import Batch, Change, changed_output
from assay.harness.bugs.family import BY_ID
from assay.harness.bugs.seeded import Effect, Recomputed

PAGE = 16
"""Tokens of a KV page in the effects on pages."""
_SPLIT = 64
"""Keys of a part in the effects on split KV."""


def hypothesis(id: str) -> Effect:
    """Compute the output under a hypothesis."""
    return Recomputed(BY_ID[id].compute)


def changes(change: Change) -> Effect:
    """Compute the output of sequences that a bug changes."""
    return Recomputed(partial(changed_output, change))


# Effects on the output


def times(factor: float, call: AttentionCall, out: Tensor) -> Tensor:
    """Multiply every output by `factor`."""
    return out * factor


def plus(term: float, call: AttentionCall, out: Tensor) -> Tensor:
    """Add `term` times the mean size of the output to every output."""
    return out + term * out.abs().mean()


def constant(value: float, call: AttentionCall, out: Tensor) -> Tensor:
    """Set every output to this value, which may be NaN or infinite."""
    return torch.full_like(out, value)


def heads_rolled(call: AttentionCall, out: Tensor) -> Tensor | None:
    """Give each q head the output of the next one."""
    return out.roll(-1, 1) if out.shape[1] > 1 else None


def rows_rolled(call: AttentionCall, out: Tensor) -> Tensor | None:
    """Give each query the output of the query before it in the batch, across sequences."""
    return out.roll(1, 0) if len(out) > 1 else None


def first_sequence_everywhere(call: AttentionCall, out: Tensor) -> Tensor | None:
    """Give every sequence the output of the first one, as far as that reaches."""
    edges = list(pairwise(call.cu_seqlens_q.tolist()))
    first = out[slice(*edges[0])]
    if len(edges) < 2:
        return None
    rows = torch.cat([torch.arange(stop - start) % max(1, len(first)) for start, stop in edges])
    return first[rows.to(out.device)]


def last_query_copied(call: AttentionCall, out: Tensor) -> Tensor | None:
    """Give the last query of each sequence the output of the query before it."""
    wrong, found = out.clone(), False
    for start, stop in pairwise(call.cu_seqlens_q.tolist()):
        if stop - start > 1:
            wrong[stop - 1], found = out[stop - 2], True
    return wrong if found else None


def zero_from(position: int, call: AttentionCall, out: Tensor) -> Tensor | None:
    """Zero the output of new tokens from this position on."""
    wrong, found = out.clone(), False
    for start, stop in pairwise(call.cu_seqlens_q.tolist()):
        if stop - start > position:
            wrong[start + position : stop], found = 0, True
    return wrong if found else None


def zero_at_page_borders(call: AttentionCall, out: Tensor) -> Tensor | None:
    """Zero the output of queries on the first token of a page of the KV cache."""
    wrong, found = out.clone(), False
    for (start, stop), prefix in zip(pairwise(call.cu_seqlens_q.tolist()), call.prefixes, strict=True):
        first = start + -prefix % PAGE
        if first < stop:
            wrong[first:stop:PAGE], found = 0, True
    return wrong if found else None


def last_dims_zero(dims: int, call: AttentionCall, out: Tensor) -> Tensor | None:
    """Compute only the first `dims` dimensions of the values."""
    if out.shape[2] <= dims:
        return None
    wrong = out.clone()
    wrong[..., dims:] = 0
    return wrong


def other_heads_value_scale(call: AttentionCall, out: Tensor) -> Tensor | None:
    """Dequantise int8 values with the scale of the next kv head."""
    kv_heads = call.v.shape[1]
    if kv_heads < 2:
        return None
    scale = call.v.abs().amax((0, 2)).double()
    wrong = (scale.roll(-1) / scale)[call.heads.kv_head(torch.arange(out.shape[1], device=scale.device))]
    return out * wrong[None, :, None].to(out.dtype)


# Effects on one sequence, as changes


def rescaled(factor: float, batch: Batch, b: int) -> Request | None:
    """Multiply the softmax scale by `factor`."""
    r = batch[b]
    return replace(r, scale=r.scale * factor) if r.len_k > 1 else None


def scale_inverted(batch: Batch, b: int) -> Request | None:
    """Multiply the scores where they should be divided."""
    r = batch[b]
    return replace(r, scale=1 / r.scale) if r.len_k > 1 else None


def without_first_key(batch: Batch, b: int) -> Request | None:
    """Hide the first key from every query, the attention sink of many models."""
    r = batch[b]
    return replace(r, visible=r.visible & (torch.arange(r.len_k, device=r.q.device) > 0)) if r.len_k > 1 else None


def sink_added(batch: Batch, b: int) -> Tensor:
    """Let every query also attend to nothing, with a score of zero."""
    r = batch[b]
    return attend(r) * _present(r, 0.0)


def _present(r: Request, score: float) -> Tensor:
    """Compute the weight that is left for the keys beside one more score, [num_q_heads, len_q, 1]."""
    return torch.sigmoid(scores(r).logsumexp(-1, keepdim=True) - score)


def keys_before(by: int, batch: Batch, b: int) -> Request | None:
    """Take the sequence to be `by` tokens shorter: its last keys are not seen."""
    r = batch[b]
    seen = torch.arange(r.len_k, device=r.q.device) < r.len_k - by
    return replace(r, visible=r.visible & seen) if r.len_k > by else None


def zero_page_past_the_end(batch: Batch, b: int) -> Request | None:
    """Read one more page, of zeros, where a sequence fills its last page."""
    r = batch[b]
    if r.len_k % PAGE:
        return None
    k, v = (torch.nn.functional.pad(t, (0, 0, 0, PAGE)) for t in (r.k, r.v))
    return replace(r, k=k, v=v, visible=torch.nn.functional.pad(r.visible, (0, PAGE), value=True))


def values_of_another_page(batch: Batch, b: int) -> Request | None:
    """Swap the values of the first two pages, and not the keys."""
    r = batch[b]
    if r.len_k < 2 * PAGE:
        return None
    return replace(r, v=torch.cat([r.v[:, PAGE : 2 * PAGE], r.v[:, :PAGE], r.v[:, 2 * PAGE :]], 1))


def first_block_again(block: int, batch: Batch, b: int) -> Request | None:
    """Read every block of K and V from the first one."""
    r = batch[b]
    index = torch.arange(r.len_k, device=r.q.device) % block
    return replace(r, k=r.k[:, index], v=r.v[:, index]) if r.len_k > block else None


def block_skipped(block: int, batch: Batch, b: int) -> Request | None:
    """Hide the second block of keys."""
    r = batch[b]
    seen = torch.arange(r.len_k, device=r.q.device) // block != 1
    return replace(r, visible=r.visible & seen) if r.len_k > block else None


def last_prefix_page_zero(batch: Batch, b: int) -> Request | None:
    """Zero the last page of the cached prefix where the prefix ends with a page."""
    r = batch[b]
    if not r.prefix or r.prefix % PAGE:
        return None
    k, v = r.k.clone(), r.v.clone()
    for t in (k, v):
        t[:, r.prefix - PAGE : r.prefix] = 0
    return replace(r, k=k, v=v)


def prefix_overwritten(batch: Batch, b: int) -> Request | None:
    """Put the newest tokens into the first page of the cached prefix: a stale writer came last."""
    r = batch[b]
    if r.prefix < PAGE or r.len_k < 2 * PAGE:
        return None
    k, v = (torch.cat([t[:, -PAGE:], t[:, PAGE:]], 1) for t in (r.k, r.v))
    return replace(r, k=k, v=v)


def prefix_cut(kept: int, batch: Batch, b: int) -> Request | None:
    """Keep only the last `kept` tokens of the cached prefix."""
    r = batch[b]
    seen = torch.arange(r.len_k, device=r.q.device) >= r.prefix - kept
    return replace(r, visible=r.visible & seen) if r.prefix > kept else None


def prefix_twice(batch: Batch, b: int) -> Request | None:
    """Let every query see the cached prefix twice."""
    r = batch[b]
    if not r.prefix:
        return None
    k, v = (torch.cat([t[:, : r.prefix], t], 1) for t in (r.k, r.v))
    return replace(r, k=k, v=v, visible=torch.cat([r.visible[:, : r.prefix], r.visible], 1))


def keys_rounded(dtype: torch.dtype, names: str, batch: Batch, b: int) -> Request:
    """Round Q, K or V ("q", "k", "v") to the precision of `dtype`, which the kernel does not declare."""
    r = batch[b]
    return replace(r, **{name: getattr(r, name).to(dtype).double() for name in names})


def weights_rounded(dtype: torch.dtype, batch: Batch, b: int) -> Tensor:
    """Round attention weights to `dtype` before they meet the values."""
    r = batch[b]
    return scores(r).softmax(-1).to(dtype).double() @ r.v[r.kv_head]


def scores_rounded(dtype: torch.dtype, batch: Batch, b: int) -> Tensor:
    """Round the scores to `dtype` before the softmax."""
    r = batch[b]
    return attend(r, scores(r).to(dtype).double())


def denominator_rounded(batch: Batch, b: int) -> Tensor | None:
    """Keep the sum of the weights in bfloat16, so that small weights are lost from it."""
    r = batch[b]
    if r.len_k <= _SPLIT:
        return None
    logits = scores(r)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    total = torch.zeros_like(weights[..., :1], dtype=torch.bfloat16)
    for start in range(0, r.len_k, PAGE):
        total = (total.double() + weights[..., start : start + PAGE].sum(-1, keepdim=True)).bfloat16()
    return weights @ r.v[r.kv_head] / total.double()


# Split KV: parts of the keys are attended to alone and merged by their log-sum-exp


def _parts(r: Request, edges: list[int]) -> tuple[Tensor, Tensor]:
    """Compute the output and log-sum-exp of each part of the keys: [parts, heads, len_q, dim] and [parts, heads, len_q, 1]."""
    logits, values = scores(r), r.v[r.kv_head]
    outs, sums = [], []
    for start, stop in pairwise(edges):
        part = logits[..., start:stop]
        lse = part.logsumexp(-1, keepdim=True)
        weights = (part - torch.where(lse.isfinite(), lse, 0.0)).exp()
        outs.append(weights @ values[:, start:stop])
        sums.append(lse)
    return torch.stack(outs), torch.stack(sums)


def _merged(outs: Tensor, lse: Tensor) -> Tensor:
    return (outs * lse.softmax(0).nan_to_num(0.0)).sum(0)


def _splits(r: Request) -> list[int]:
    return [*range(0, r.len_k, _SPLIT), r.len_k]


def prefix_merged_in_base_2(batch: Batch, b: int) -> Tensor | None:
    """Attend to cached and new keys alone, and take the base-2 log-sum-exp of both for base e."""
    r = batch[b]
    if not r.prefix:
        return None
    outs, lse = _parts(r, [0, r.prefix, r.len_k])
    return _merged(outs, lse / math.log(2))


def splits_merged_equally(batch: Batch, b: int) -> Tensor | None:
    """Count the parts of the keys alike, whatever their log-sum-exp."""
    r = batch[b]
    if r.len_k <= _SPLIT:
        return None
    outs, lse = _parts(r, _splits(r))
    return _merged(outs, torch.where(lse.isfinite(), 0.0, lse))


def splits_merged_by_next_head(batch: Batch, b: int) -> Tensor | None:
    """Merge the parts of the keys by the log-sum-exp of the next q head: its layout is transposed."""
    r = batch[b]
    if r.len_k <= _SPLIT or len(r.kv_head) < 2:
        return None
    outs, lse = _parts(r, _splits(r))
    return _merged(outs, lse.roll(-1, 1))


def last_split_lost(batch: Batch, b: int) -> Tensor | None:
    """Compute the last part of the keys, and do not merge it."""
    r = batch[b]
    if r.len_k <= _SPLIT:
        return None
    outs, lse = _parts(r, _splits(r))
    return _merged(outs[:-1], lse[:-1])


def empty_part_counted(batch: Batch, b: int) -> Tensor | None:
    """Count the empty cached part of a sequence as if it held one key with score 0 and value 0."""
    r = batch[b]
    return attend(r) * _present(r, 0.0) if not r.prefix and len(batch) > 1 else None


# Equivalent: the same function, computed in another way


def rounded_again(call: AttentionCall, out: Tensor) -> Tensor:
    """Convert the right output to float64 and back."""
    return out.double()


def negative_zeros(call: AttentionCall, out: Tensor) -> Tensor:
    """Make the zeros negative."""
    return torch.where(out == 0, -torch.zeros_like(out), out)


def keys_reversed(batch: Batch, b: int) -> Request:
    """Attend to the keys in reverse order."""
    r = batch[b]
    return replace(r, k=r.k.flip(1), v=r.v.flip(1), visible=r.visible.flip(1))


def pages_swapped(batch: Batch, b: int) -> Request | None:
    """Swap the first two pages of the cached prefix, keys and values alike: no query can tell."""
    r = batch[b]
    if r.prefix < 2 * PAGE:
        return None
    k, v = (torch.cat([t[:, PAGE : 2 * PAGE], t[:, :PAGE], t[:, 2 * PAGE :]], 1) for t in (r.k, r.v))
    return replace(r, k=k, v=v)


def splits_merged(batch: Batch, b: int) -> Tensor:
    """Merge the parts of the keys as they should be."""
    return _merged(*_parts(batch[b], _splits(batch[b])))


def key_mean_subtracted(batch: Batch, b: int) -> Request:
    """Subtract the mean of K from every key, which shifts all scores of a query alike."""
    r = batch[b]
    return replace(r, k=r.k - r.k.mean(1, keepdim=True))


def scale_in_queries(batch: Batch, b: int) -> Request:
    """Apply the softmax scale to Q instead of the scores."""
    r = batch[b]
    return replace(r, q=r.q * r.scale, scale=1.0)
