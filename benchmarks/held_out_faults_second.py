"""Thirty more attention kernels with one bug each, for a second look at what the read-out makes of bugs nobody chose for it.

They too were written without sight of the read-out. Each follows a public report, some of them loosely, that is linked above
it, moved into the sizes that are asked here. The kinds are about as frequent as in such reports: masks and causal offsets,
wrong rows, softmax and merging, scales of quantisation, memory of earlier calls. Nothing here may be adapted to the read-out.

What holds for the first set (`held_out_faults`) holds for these: right but for the bug, float32, deterministic, `call.causal`
is honoured, a query without a key gives zero, positions count from 0 within a sequence.
"""

from __future__ import annotations

import math

import torch
from held_out_faults import (
    HeldOut,
    Part,
    Register,
    attend,
    logits,
    masked,
    masks,
    merge,
    outputs,
    page_rows,
    parts,
    read,
    reads,
    remembers,
    state,
    tiles,
    up,
    values,
)
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.oracle import sequences

second = Register()


def right(part: Part) -> Tensor:
    """Attention of one sequence without a bug, [heads, len_q, head_dim_v]."""
    return attend(part.scores, part.visible, part.v)


# Masks and causal offsets.


# https://github.com/pytorch/pytorch/issues/108108, https://github.com/pytorch/executorch/issues/22426
@second(
    "top-left-causal",
    "In causal extend calls the mask is aligned to the top left, so new token i sees only keys 0 to i, whatever the"
    " cached prefix.",
    masks,
)
def top_left_causal(part: Part) -> Tensor:
    if not part.call.causal or part.decode:
        return part.visible
    return part.keys <= part.rows


# https://github.com/flashinfer-ai/flashinfer/pull/348
@second(
    "causal-one-ahead",
    "In causal calls the mask compares with > instead of >=, so every new token but a sequence's last also sees the"
    " key right after its own.",
    masks,
)
def causal_one_ahead(part: Part) -> Tensor:
    return part.visible | (part.keys <= part.rows + part.prefix + 1)


# https://github.com/sgl-project/sglang/pull/31501: only the start of the key loop knew of the window
@second(
    "window-start-of-query-tile",
    "In extend the key loop of a tile of 64 queries starts as if there were a sliding window of 128: at the position"
    " of the tile's first query minus 128, rounded down to 32, so all its queries miss the keys before.",
    masks,
)
def window_start_of_query_tile(part: Part) -> Tensor:
    if part.decode:
        return part.visible
    first = part.rows // 64 * 64 + part.prefix
    return part.visible & (part.keys >= (first - 128) // 32 * 32)


# https://github.com/Dao-AILab/flash-attention/issues/778
@second(
    "splits-of-cache-only",
    "With a cached prefix the keys are processed in two splits of whole blocks of 64 whose number is taken from the"
    " prefix alone, so keys from the prefix rounded up to 128 on are seen by no query.",
    masks,
)
def splits_of_cache_only(part: Part) -> Tensor:
    if part.prefix == 0:
        return part.visible
    return part.visible & (part.keys < up(part.prefix, 128))


# https://github.com/pytorch/pytorch/issues/159247, https://github.com/flashinfer-ai/flashinfer/pull/5090
@second(
    "zero-padded-tail",
    "In decode, and in calls that are not causal, the last block of 64 keys is filled up with zeros that are not"
    " masked, so -len_k % 64 keys with score 0 and value 0 count in the softmax.",
    outputs,
)
def zero_padded_tail(part: Part) -> Tensor:
    if part.call.causal and not part.decode:
        return right(part)
    missing = -part.len_k % 64
    scores = torch.nn.functional.pad(part.scores, (0, missing))
    visible = torch.nn.functional.pad(part.visible, (0, missing), value=True)
    return attend(scores, visible, torch.nn.functional.pad(part.v, (0, 0, 0, missing)))


# https://github.com/tile-ai/tilelang/pull/1530: the range of the key loop of a query tile
@second(
    "key-loop-of-first-token",
    "In causal calls the key loop of a tile of 64 packed rows (64 / G tokens with G q heads per kv head) ends with"
    " the tile of 32 keys that holds the position of the tile's first token, so its later tokens miss the keys from"
    " the next multiple of 32 on, their own included.",
    masks,
)
def key_loop_of_first_token(part: Part) -> Tensor:
    if not part.call.causal:
        return part.visible
    tokens = 64 // part.groups
    first = part.rows // tokens * tokens + part.prefix
    return part.visible & (part.keys < (first // 32 + 1) * 32)


# After the swap of groups and tokens for decoding, in which the mask has to be dropped:
# https://github.com/vllm-project/flash-attention/pull/87 describes the swap.
@second(
    "swapped-groups-stay-causal",
    "If every sequence of a causal call has one new token, the G q heads of a kv head are processed as G tokens and"
    " stay under the causal mask, so head h misses the last G - 1 - h % G keys.",
    outputs,
)
def swapped_groups_stay_causal(part: Part) -> Tensor:
    if not part.call.causal or max(part.call.lens_q) > 1:
        return right(part)
    head = torch.arange(len(part.q), device=part.q.device)[:, None, None]
    return attend(part.scores, part.keys <= part.len_k - part.groups + head % part.groups, part.v)


# https://github.com/ROCm/rocm-libraries/pull/10999: the diagonal came from the padded lengths
@second(
    "offset-from-longest-query",
    "In causal calls the offset of a sequence is its keys minus the most new tokens that any sequence of the batch"
    " has, so sequences with fewer new tokens see that many keys fewer (the output of a query without a key is 0).",
    masks,
)
def offset_from_longest_query(part: Part) -> Tensor:
    if not part.call.causal:
        return part.visible
    return part.keys <= part.rows + part.len_k - max(part.call.lens_q)


# https://github.com/sgl-project/sglang/pull/32269: verification of drafts runs on the decode kernel, which needs a mask
@second(
    "no-mask-for-few-tokens",
    "Sequences with a cached prefix and at most 16 new tokens go to the decode kernel, which has no causal mask, so"
    " their new tokens see each other in both directions.",
    masks,
)
def no_mask_for_few_tokens(part: Part) -> Tensor:
    if part.prefix == 0 or part.len_q > 16:
        return part.visible
    return torch.ones_like(part.visible)


# https://github.com/EricLBuehler/candle-vllm/pull/140: a single offset for the whole batch
@second(
    "mask-of-first-sequence",
    "In causal calls the mask of every sequence is built with the cached prefix of sequence 0, so token i sees keys 0"
    " to i + that prefix: too many in sequences with a shorter prefix, too few with a longer one.",
    masks,
)
def mask_of_first_sequence(part: Part) -> Tensor:
    if not part.call.causal:
        return part.visible
    return part.keys <= part.rows + part.call.prefixes[0]


# Rows, pages, heads and batches.


# https://github.com/ml-explore/mlx/pull/4431
@second(
    "split-gqa-reads-first-sequence",
    "In decode with several q heads per kv head, if the longest sequence of the batch has at least 128 keys, the"
    " batch is missing in the address of K and V: every sequence reads its number of rows from row 0 of the pack on.",
    reads,
)
def split_gqa_reads_first_sequence(part: Part) -> Tensor:
    split = part.decode and part.groups > 1 and max(part.call.lens_k) >= 128
    return part.keys if split else part.start + part.keys


# https://github.com/tanishqkumar/ssd/issues/23
@second(
    "pool-read-as-packed",
    "In extend calls with any cached prefix, K and V lie in pages of 16, each sequence from a new page on, but are"
    " read as if packed without gaps, so sequences after one that does not fill its last page read from too early a"
    " slot (zeros in slots that are not filled).",
    reads,
)
def pool_read_as_packed(part: Part) -> Tensor:
    packed = part.start + part.keys
    if part.decode or not any(part.call.prefixes):
        return packed
    return torch.cat(page_rows(part.call, 16)).flatten()[packed]


# https://github.com/ikawrakow/ik_llama.cpp/pull/2031
@second(
    "v-block-of-head-dim",
    "In decode keys are processed in blocks of 128, but the address of V advances by head_dim rows per block, so with"
    " a head dim below 128 the values of keys from number 128 on are read from rows that lie 128 - head_dim too early"
    " per block; K is right.",
    values,
)
def v_block_of_head_dim(part: Part) -> Tensor:
    if not part.decode:
        return part.v
    index = part.start + part.keys // 128 * part.v.shape[2] + part.keys % 128
    return read(part, part.call.v, index)


# https://github.com/flashinfer-ai/flashinfer/pull/527: the page stride of a cache that is not contiguous
@second(
    "page-stride-without-v",
    "In decode each page holds 16 keys and then their 16 values, and the stride of a page is taken as 16 rows instead"
    " of 32, so K of page p of the pool is what lies in half page p and V what lies in half page p + 1 (keys of page"
    " h / 2 for even h, values of page (h - 1) / 2 for odd h); only page 0 is right.",
    outputs,
)
def page_stride_without_v(part: Part) -> Tensor:
    if not part.decode or part.k.shape != part.v.shape:
        return right(part)
    pages = page_rows(part.call, 16)
    first = sum(map(len, pages[: part.number]))
    slots = torch.cat(pages).flatten()
    k, v = (read(part, t, slots).view(len(part.q), -1, 16, part.q.shape[2]) for t in (part.call.k, part.call.v))
    lying = torch.stack([k, v], 2).flatten(1, 2)
    own = first + torch.arange(len(pages[part.number]), device=part.q.device)
    k, v = (lying[:, at].flatten(1, 2)[:, : part.len_k] for at in (own, own + 1))
    return attend(part.call.scale * part.q @ k.transpose(1, 2), part.visible, v)


# https://github.com/ggml-org/llama.cpp/pull/19115
@second(
    "groups-padded-to-four",
    "With several q heads per kv head their number G is padded to a multiple of 4, and q head h reads kv head h //"
    " (padded G), for K and V, so with 2 q heads per kv head q heads 2 and 3 read kv head 0 and so on.",
    outputs,
)
def groups_padded_to_four(part: Part) -> Tensor:
    padded = up(part.groups, 4) if part.groups > 1 else 1
    kv_head = torch.arange(len(part.q), device=part.q.device) // padded
    k, v = (t[:: part.groups][kv_head] for t in (part.k, part.v))
    return attend(part.call.scale * part.q @ k.transpose(1, 2), part.visible, v)


# https://github.com/flashinfer-ai/flashinfer/issues/3800
@second(
    "q-stride-of-one-token",
    "The batch stride of Q is one token, so the queries of sequence b are read from row b of the packed Q on instead"
    " of row cu_seqlens_q[b]; decode is right because its sequences have one token each.",
    outputs,
)
def q_stride_of_one_token(part: Part) -> Tensor:
    q = part.call.q[part.number : part.number + part.len_q].float().transpose(0, 1)
    return attend(part.call.scale * q @ part.k.transpose(1, 2), part.visible, part.v)


# https://github.com/pytorch/pytorch/pull/194168
@second(
    "split-output-onto-first",
    "In decode, if the longest sequence of the batch has more than 128 keys, the merged output of every sequence is"
    " written to the row of sequence 0, which ends up with that of the last one; the rows of the others stay zero.",
    remembers,
)
def split_output_onto_first() -> Kernel:
    def kernel(call: AttentionCall) -> Tensor:
        out = outputs(right)(call)
        if call.phase != "decode" or max(call.lens_k) <= 128:
            return out
        last = out[sequences(call)[-1][0]]
        return torch.cat([last, torch.zeros_like(out[len(last) :])])

    return kernel


# https://github.com/pytorch/pytorch/issues/182593: the output depends on where pages lie if the tile exceeds the page
@second(
    "tile-of-two-pages",
    "K and V lie in pages of 64, handed out in turn (page 0 of every sequence, then page 1 of every sequence that has"
    " one, and so on), and tiles of 128 keys look up only their first page: keys and values 64 to 127 of a tile are"
    " read from the page behind it in the pool (zeros in slots not filled or behind the pool), right for one sequence.",
    reads,
)
def tile_of_two_pages(part: Part) -> Tensor:
    pages = page_rows(part.call, 64)
    in_turn = [(p, b) for p in range(max(map(len, pages))) for b in range(len(pages)) if p < len(pages[b])]
    place = {page: at for at, page in enumerate(in_turn)}
    pool = torch.stack([pages[b][p] for p, b in in_turn] + [torch.full_like(pages[0][0], -1)])
    found = [place[p - p % 2, part.number] + p % 2 for p in range(len(pages[part.number]))]
    return pool[found].flatten()[: part.len_k]


# Scales, softmax, merging.


# https://github.com/mlc-ai/mlc-llm/pull/3426
@second(
    "fallback-without-scale",
    "In extend, head dims other than 64 and 128 are served by a fallback kernel whose softmax scale is 1.",
    logits,
)
def fallback_without_scale(part: Part) -> Tensor:
    if part.decode or part.q.shape[2] in (64, 128):
        return part.scores
    return part.q @ part.k.transpose(1, 2)


# https://github.com/sgl-project/sglang/pull/35045
@second(
    "prefix-merged-in-base-e",
    "In extend with a cached prefix, attention to the prefix and to the new tokens is merged with weights e^lse"
    " although their log-sum-exps are in base 2, so the larger of the two parts weighs too much.",
    outputs,
)
def prefix_merged_in_base_e(part: Part) -> Tensor:
    if part.decode or part.prefix == 0:
        return right(part)
    states = [state(part, slice(0, part.prefix)), state(part, slice(part.prefix, None))]
    return merge(states, base=math.exp(math.log2(math.e)))


# https://github.com/sgl-project/sglang/pull/22688, https://github.com/flashinfer-ai/flashinfer/issues/3047
@second(
    "empty-chunks-merged",
    "In extend cached prefixes are processed in chunks of 64, as many as the longest prefix of the batch has, and the"
    " chunks that a sequence lacks are merged as output 0 with log-sum-exp 0, so with n of them its output is"
    " multiplied by S / (S + n), where S is the sum of exp(score) over the keys that the query sees.",
    outputs,
)
def empty_chunks_merged(part: Part) -> Tensor:
    if part.decode:
        return right(part)
    out, lse = state(part, slice(None))
    empty = (up(max(part.call.prefixes), 64) - up(part.prefix, 64)) // 64
    return merge([(out, lse)] + empty * [(torch.zeros_like(out), torch.zeros_like(lse))])


# https://github.com/paiml/aprender/issues/2753
@second(
    "running-max-overwritten",
    "In decode with more than one sequence, the old running maximum is overwritten by the new one before the two are"
    " compared, so what was summed before is never rescaled: the weight of a key is exp(its score - the largest score"
    " of the keys up to it).",
    outputs,
)
def running_max_overwritten(part: Part) -> Tensor:
    if not part.decode or len(part.call.lens_q) == 1:
        return right(part)
    scores = masked(part.scores, part.visible)
    weights = (scores - scores.cummax(-1).values).exp()
    return weights @ part.v / weights.sum(-1, keepdim=True)


# https://github.com/vllm-project/vllm/pull/39297: what too high a threshold of skipped tiles does
@second(
    "lower-tiles-skipped",
    "A tile of 64 keys is skipped for a tile of 64 queries and a head if, for all its queries, the largest score in"
    " it lies below the running maximum, as the threshold is 1 instead of nearly 0.",
    masks,
)
def lower_tiles_skipped(part: Part) -> Tensor:
    tops = torch.stack([tile.amax(-1) for tile in tiles(masked(part.scores, part.visible), 64, 2)], 2)
    before = torch.nn.functional.pad(tops.cummax(2).values[..., :-1], (1, 0), value=-math.inf)
    lower = tops < before
    skipped = torch.cat([tile.all(1, keepdim=True).expand_as(tile) for tile in tiles(lower, 64, 1)], 1)
    return part.visible & ~skipped[..., part.keys // 64]


# Scales of quantisation. Nothing is rounded: only scales that do not cancel show.


def largest(x: Tensor) -> Tensor:
    """Largest magnitude per head, [heads, 1, 1], of x [heads, tokens, dim]."""
    return x.abs().amax((1, 2), keepdim=True).clamp(min=1e-6)


# https://github.com/ROCm/rocm-libraries/pull/10474: all groups read the descale table of group 0
@second(
    "descales-of-first-sequence",
    "K and V are quantised per sequence and kv head, but every sequence is scaled back with the scales of sequence 0,"
    " so its scores and its output are multiplied by the ratio of the largest |k|, and of the largest |v|, of sequence"
    " 0 to its own.",
    outputs,
)
def descales_of_first_sequence(part: Part) -> Tensor:
    first = parts(part.call)[0]
    scores = part.scores * largest(first.k) / largest(part.k)
    return attend(scores, part.visible, part.v) * largest(first.v) / largest(part.v)


# https://github.com/sgl-project/sglang/pull/26852: v_scale falls back to k_scale
@second(
    "v-descale-is-that-of-k",
    "In decode V, quantised per kv head over all sequences of the call, is scaled back with K's scale, so the output"
    " is multiplied by the ratio of the largest |k| to the largest |v| of the kv head in the call.",
    values,
)
def v_descale_is_that_of_k(part: Part) -> Tensor:
    if not part.decode:
        return part.v
    everything = torch.arange(len(part.call.k), device=part.q.device)
    k, v = (largest(read(part, t, everything)) for t in (part.call.k, part.call.v))
    return part.v * k / v


# https://github.com/thu-ml/SageAttention/issues/131 reports wrong results with a cache; this is one way to get them
@second(
    "prefix-smoothed-alone",
    "In extend, the mean over tokens is subtracted from K before it is quantised: from the cached prefix its own mean"
    " and from the new tokens theirs, so the scores of the two parts are shifted against each other by scale * q *"
    " (mean of the new keys - mean of the cached keys).",
    logits,
)
def prefix_smoothed_alone(part: Part) -> Tensor:
    if part.decode or part.prefix == 0:
        return part.scores
    both = part.k[:, : part.prefix], part.k[:, part.prefix :]
    smooth = torch.cat([k - k.mean(1, keepdim=True) for k in both], 1)
    return part.call.scale * part.q @ smooth.transpose(1, 2)


# Memory of earlier calls, shared buffers.


# https://github.com/local-inference-lab/b12x/pull/85
@second(
    "page-table-width-of-first-call",
    "With pages of 16, the row stride of the page table (the pages of a call's longest sequence) stays that of the"
    " first call, so if it has changed, sequences from the second on find their pages at the wrong place of the table"
    " (page 0 where it is padded and behind its end; zeros in slots that are not filled).",
    remembers,
)
def page_table_width_of_first_call() -> Kernel:
    widths: list[int] = []

    def kernel(call: AttentionCall) -> Tensor:
        pages = page_rows(call, 16)
        width = max(map(len, pages))
        widths.append(width)
        firsts = [sum(map(len, pages[:b])) for b in range(len(pages))]
        table = [
            first + p if p < len(own) else 0 for first, own in zip(firsts, pages, strict=True) for p in range(width)
        ]

        def rows(part: Part) -> Tensor:
            places = [part.number * widths[0] + p for p in range(len(pages[part.number]))]
            found = [table[place] if place < len(table) else 0 for place in places]
            return torch.cat(pages)[found].flatten()[: part.len_k]

        return reads(rows)(call)

    return kernel


# https://github.com/huggingface/transformers/pull/45323: the graph is looked up without the longest length
@second(
    "longest-length-of-first-graph",
    "The first decode call of each batch size is captured, and later decode calls of that size keep its longest key"
    " length, rounded up to 64, so longer sequences miss their keys from there on.",
    remembers,
)
def longest_length_of_first_graph() -> Kernel:
    captured: dict[int, int] = {}

    def kernel(call: AttentionCall) -> Tensor:
        if call.phase != "decode":
            return outputs(right)(call)
        bound = captured.setdefault(len(call.lens_k), up(max(call.lens_k), 64))
        return masks(lambda part: part.visible & (part.keys < bound))(call)

    return kernel


# https://github.com/ROCm/aiter/pull/3069
@second(
    "stale-splits-merged",
    "In decode keys are processed in splits of 64 and as many splits are merged for every sequence as the longest of"
    " the batch has; those that a sequence lacks hold the output and log-sum-exp that an earlier decode call, of"
    " whatever layer, left for this split of the sequence with the same number (they count nothing if there is none).",
    remembers,
)
def stale_splits_merged() -> Kernel:
    buffer: dict[tuple[int, int, torch.Size], tuple[Tensor, Tensor]] = {}

    def compute(part: Part) -> Tensor:
        if not part.decode:
            return right(part)
        shape = part.q.shape[:2] + part.v.shape[2:]
        for at in range(0, part.len_k, 64):
            buffer[part.number, at // 64, shape] = state(part, slice(at, at + 64))
        keys = [(part.number, split, shape) for split in range(up(max(part.call.lens_k), 64) // 64)]
        return merge([buffer[key] for key in keys if key in buffer])

    return outputs(compute)


# https://github.com/m0at/rvllm/pull/32: padded entries of a graph reuse slot 0
@second(
    "padding-writes-slot-zero",
    "Decode batches are padded to a multiple of 4 sequences, and the last padding writes a key and a value to slot 0 of"
    " the pool, over the first key and value of sequence 0: the new ones of the latest decode call of the layer whose"
    " batch had a sequence in that place, number 3 for up to 4 sequences (zeros if none had).",
    remembers,
)
def padding_writes_slot_zero() -> Kernel:
    left: dict[tuple[int, int, torch.Size, torch.Size], tuple[Tensor, Tensor]] = {}

    def kernel(call: AttentionCall) -> Tensor:
        if call.phase != "decode":
            return outputs(right)(call)
        places = [(call.layer, b, call.k.shape[1:], call.v.shape[1:]) for b in range(up(len(call.lens_k), 4))]
        for place, (_, rows) in zip(places, sequences(call), strict=False):
            left[place] = call.k[rows.stop - 1].float(), call.v[rows.stop - 1].float()

        def compute(part: Part) -> Tensor:
            if part.number > 0 or len(call.lens_k) == len(places):
                return right(part)
            found = left.get(places[-1], (torch.zeros_like(call.k[0]), torch.zeros_like(call.v[0])))
            first = [row.float().repeat_interleave(part.groups, 0)[:, None] for row in found]
            k, v = (torch.cat([row, own[:, 1:]], 1) for row, own in zip(first, (part.k, part.v), strict=True))
            return attend(call.scale * part.q @ k.transpose(1, 2), part.visible, v)

        return outputs(compute)(call)

    return kernel


SECOND: tuple[HeldOut, ...] = tuple(second.found)
"""All held-out kernels of the second set."""
