"""Thirty attention kernels with one bug each, for a third look at what the read-out makes of bugs nobody chose for it.

They too were written without sight of the read-out. Each follows a public report or a review of a fix, some of them loosely,
that is linked above it, moved into the sizes that are asked here. Nothing here may be adapted to the read-out.

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
    amax,
    attend,
    logits,
    masked,
    masks,
    merge,
    outputs,
    page_rows,
    parts,
    read,
    remembers,
    state,
    tiles,
    up,
    values,
)
from held_out_faults_second import largest, right
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.oracle import sequences

third = Register()


# Masks and causal offsets.


# https://github.com/huggingface/candle/pull/3606: causal was dropped on the way to the varlen kernel
@third(
    "batch-not-causal",
    "In causal extend calls with more than one sequence the mask is missing: every query sees all keys of its sequence.",
    masks,
)
def batch_not_causal(part: Part) -> Tensor:
    if part.decode or len(part.call.lens_q) == 1:
        return part.visible
    return torch.ones_like(part.visible)


# https://github.com/tenstorrent/tt-metal/pull/54435: offsets that are no multiple of the chunk
@third(
    "offset-rounded-down",
    "In causal extend calls the cached prefix is rounded down to a multiple of 64 before it offsets the mask, so every"
    " query misses the last prefix % 64 keys up to its own.",
    masks,
)
def offset_rounded_down(part: Part) -> Tensor:
    if part.decode or not part.call.causal:
        return part.visible
    return part.keys <= part.rows + part.prefix // 64 * 64


# https://github.com/meta-pytorch/gpt-fast/issues/233: a mask made for a query of length 1 without its offset
@third(
    "block-list-of-position-zero",
    "In decode the list of key blocks is that of a query at position 0, so only the first 128 keys are seen.",
    masks,
)
def block_list_of_position_zero(part: Part) -> Tensor:
    if not part.decode:
        return part.visible
    return part.visible & (part.keys < 128)


# https://github.com/tile-ai/tilelang/pull/2010: the review finds that the split's length is floored
@third(
    "split-length-floored",
    "In decode keys are divided among 8 splits of len_k // 8 keys each, so the last len_k % 8 keys are seen by no query.",
    masks,
)
def split_length_floored(part: Part) -> Tensor:
    if not part.decode:
        return part.visible
    return part.visible & (part.keys < part.len_k // 8 * 8)


# https://github.com/huggingface/transformers/issues/37351: which layers attend in chunks
@third(
    "chunks-on-three-layers-of-four",
    "In all layers but every fourth (numbers 3, 7 and so on) attention is local to chunks of 128 positions: a query sees"
    " only those keys that lie in the same chunk of the sequence as itself.",
    masks,
)
def chunks_on_three_layers_of_four(part: Part) -> Tensor:
    if part.call.layer % 4 == 3:
        return part.visible
    return part.visible & (part.keys // 128 == (part.rows + part.prefix) // 128)


# https://github.com/huggingface/transformers/pull/46634
@third(
    "pack-as-one-sequence",
    "In causal extend calls without any cached prefix the boundaries of sequences are not detected, so a query also sees"
    " all keys of the sequences before its own in the pack.",
    outputs,
)
def pack_as_one_sequence(part: Part) -> Tensor:
    if part.decode or not part.call.causal or any(part.call.prefixes):
        return right(part)
    index = torch.arange(part.start + part.len_k, device=part.q.device)
    k, v = (read(part, t, index) for t in (part.call.k, part.call.v))
    return attend(part.call.scale * part.q @ k.transpose(1, 2), index <= part.start + part.rows, v)


# https://github.com/vllm-project/speculators/pull/897: ones and zeros where an additive mask was expected
@third(
    "boolean-mask-added",
    "In causal extend calls the mask of a sequence with a cached prefix is added to the scores as ones and zeros, so"
    " queries see all keys of the sequence, and the scores of those that they ought to see are larger by 1.",
    outputs,
)
def boolean_mask_added(part: Part) -> Tensor:
    if part.decode or not part.call.causal or part.prefix == 0:
        return right(part)
    return attend(part.scores + part.visible.float(), torch.ones_like(part.visible), part.v)


# https://github.com/Dao-AILab/flash-attention/pull/2098, by way of https://github.com/pytorch/pytorch/pull/171271
@third(
    "blocks-of-packed-tile",
    "With G > 1 q heads per kv head, in causal calls, tile t of 64 queries takes the key blocks (of 64) of tile t // G,"
    " as if tokens and heads were packed, so queries from number 64 on see only keys below prefix + 64 * (t // G) + 64,"
    " rounded up to 64.",
    masks,
)
def blocks_of_packed_tile(part: Part) -> Tensor:
    if not part.call.causal or part.groups == 1:
        return part.visible
    last = part.prefix + 64 * (part.rows // 64 // part.groups) + 64
    return part.visible & (part.keys < (last + 63) // 64 * 64)


# https://github.com/zml/zml/pull/563: the tail of the prefix's last tile was not masked
@third(
    "prefix-tail-not-masked",
    "In extend the cached prefix is read in tiles of 32 whose tail is not masked: the first -prefix % 32 new tokens of"
    " the sequence count for every query with the prefix, and once more where the query sees them as new tokens.",
    outputs,
)
def prefix_tail_not_masked(part: Part) -> Tensor:
    if part.decode:
        return right(part)
    tail = slice(part.prefix, up(part.prefix, 32))
    scores = torch.cat([part.scores, part.scores[..., tail]], 2)
    visible = torch.cat([part.visible, torch.ones_like(part.visible[:, tail])], 1)
    return attend(scores, visible, torch.cat([part.v, part.v[:, tail]], 1))


# Rows, heads and head dims.


# https://github.com/LMCache/LMCache/pull/3092: the review of its prefill kernel
@third(
    "q-head-addresses-kv",
    "In extend the address of K and V takes the number of the q head for that of the kv head, so q head h reads, for each"
    " key, kv head h % kv_heads of the row h // kv_heads further on in the pack (zeros behind its end).",
    outputs,
)
def q_head_addresses_kv(part: Part) -> Tensor:
    if part.decode:
        return right(part)
    heads, kv_heads = len(part.q), part.call.k.shape[1]

    def misread(packed: Tensor) -> Tensor:
        rows = torch.cat([packed.float(), packed.new_zeros(heads, *packed.shape[1:]).float()]).flatten(0, 1)
        return torch.stack([rows[(part.start + part.keys) * kv_heads + head] for head in range(heads)])

    k, v = misread(part.call.k), misread(part.call.v)
    return attend(part.call.scale * part.q @ k.transpose(1, 2), part.visible, v)


# https://github.com/Dao-AILab/flash-attention/pull/2542: rows of a rectangular buffer against packed rows
@third(
    "outputs-at-padded-rows",
    "The output of sequence b is written from row b * (the most new tokens of a sequence of the call) on instead of"
    " cu_seqlens_q[b]; what falls behind the last row is lost, and rows that nothing is written to are zero.",
    remembers,
)
def outputs_at_padded_rows() -> Kernel:
    def kernel(call: AttentionCall) -> Tensor:
        out, longest = outputs(right)(call), max(call.lens_q)
        found = out.new_zeros(longest * len(call.lens_q), *out.shape[1:])
        for b, (rows, _) in enumerate(sequences(call)):
            found[b * longest : b * longest + rows.stop - rows.start] = out[rows]
        return found[: len(out)]

    return kernel


# https://github.com/local-inference-lab/vllm/pull/17: one stride for both inputs of the merge
@third(
    "new-part-read-with-padded-stride",
    "In extend with a cached prefix, attention to the new tokens lies as [tokens, heads, head_dim] per sequence and is"
    " read, when merged, with the strides of attention to the prefix, whose head dim is padded to a multiple of 64 (zeros"
    " behind the end), so with other head dims it is that of other heads and tokens; the log-sum-exps are right.",
    outputs,
)
def new_part_read_with_padded_stride(part: Part) -> Tensor:
    if part.decode or part.prefix == 0:
        return right(part)
    cached = state(part, slice(0, part.prefix))
    new, lse = state(part, slice(part.prefix, None))
    lying = new.transpose(0, 1).flatten()
    heads, dim = len(part.q), part.v.shape[2]
    tokens = torch.arange(part.len_q, device=part.q.device)
    rows = tokens * heads + torch.arange(heads, device=part.q.device)[:, None]
    at = rows[..., None] * up(dim, 64) + torch.arange(dim, device=part.q.device)
    misread = torch.where(at < len(lying), lying[at.clamp(max=len(lying) - 1)], 0.0)
    return merge([cached, (misread, lse)])


# https://github.com/fla-org/flash-linear-attention/pull/1031
@third(
    "value-tiles-onto-first",
    "In decode the output is computed in tiles of 64 dims that are all written to the first one, so with head dims above"
    " 64 dim d < head_dim - 64 is that of dim 64 + d, and dims from 64 on are zero.",
    outputs,
)
def value_tiles_onto_first(part: Part) -> Tensor:
    out = right(part)
    if not part.decode:
        return out
    found = torch.zeros_like(out)
    for tile in tiles(out, 64, 2):
        found[..., : tile.shape[2]] = tile
    return found


# https://github.com/NVIDIA/TensorRT-LLM/pull/18244: the pages of V advance once for two of its tiles
@third(
    "second-v-tile-of-first-pages",
    "In decode with head dims above 64, V is loaded in tiles of 32 keys, two per 64 keys, and the second of them reads the"
    " pages of the first, so the values of keys 32 to 63 of every 64 are those of keys 0 to 31; K is right.",
    values,
)
def second_v_tile_of_first_pages(part: Part) -> Tensor:
    if not part.decode or part.v.shape[2] <= 64:
        return part.v
    return part.v[:, part.keys // 64 * 64 + part.keys % 32]


# https://github.com/flashinfer-ai/flashinfer/pull/441
@third(
    "page-layouts-confused",
    "In decode pages of 16 keys that lie as [16, kv_heads, dim] are read as [kv_heads, 16, dim], K and V (zeros from slots"
    " that are not filled), so with several kv heads slot s of kv head h is what lies at h * 16 + s: kv head (h * 16 + s) %"
    " kv_heads of slot (h * 16 + s) // kv_heads.",
    outputs,
)
def page_layouts_confused(part: Part) -> Tensor:
    if not part.decode:
        return right(part)
    slots = page_rows(part.call, 16)[part.number].flatten()

    def misread(packed: Tensor) -> Tensor:
        filled = packed[slots.clamp(min=0)].float() * (slots >= 0)[:, None, None]
        heads, dim = packed.shape[1:]
        pages = filled.reshape(-1, heads, 16, dim).transpose(0, 1).flatten(1, 2)
        return pages[:, : part.len_k].repeat_interleave(part.groups, 0)

    k, v = misread(part.call.k), misread(part.call.v)
    return attend(part.call.scale * part.q @ k.transpose(1, 2), part.visible, v)


# https://github.com/66RING/tiny-flash-attention/issues/12
@third(
    "dims-in-whole-steps",
    "With head dims above 64, q k^T runs over head_dim // 64 whole steps of 64 dims, so head dims that are no multiple of"
    " 64 miss their last head_dim % 64 dims in the scores; V is right.",
    logits,
)
def dims_in_whole_steps(part: Part) -> Tensor:
    dim = max(64, part.q.shape[2] // 64 * 64)
    return part.call.scale * part.q[..., :dim] @ part.k[..., :dim].transpose(1, 2)


# https://github.com/intel/sycl-tla/pull/331: the review of offsets into the cache when lengths vary
@third(
    "keys-at-query-offsets",
    "In extend K and V of sequence b are read from row cu_seqlens_q[b] of the pack on instead of cu_seqlens_k[b], so"
    " sequences after one with a cached prefix read rows that lie too early by the prefixes before them.",
    outputs,
)
def keys_at_query_offsets(part: Part) -> Tensor:
    if part.decode:
        return right(part)
    index = int(part.call.cu_seqlens_q[part.number]) + part.keys
    k, v = read(part, part.call.k, index), read(part, part.call.v, index)
    return attend(part.call.scale * part.q @ k.transpose(1, 2), part.visible, v)


# Scales, softmax, merging.


# https://github.com/ROCm/hip-ep/pull/621
@third(
    "scale-of-packed-width",
    "In extend the softmax scale is 1 / sqrt(d), whatever the call says, where d is the width of packed QKV divided by the"
    " number of q heads alone: d = head_dim * (heads + 2 * kv_heads) / heads.",
    logits,
)
def scale_of_packed_width(part: Part) -> Tensor:
    if part.decode:
        return part.scores
    heads, kv_heads = len(part.q), part.call.k.shape[1]
    width = part.q.shape[2] * (heads + 2 * kv_heads) / heads
    return part.q @ part.k.transpose(1, 2) / math.sqrt(width)


# https://github.com/flagos-ai/FlagGems/pull/424
@third(
    "scale-grows-per-tile",
    "Keys come in tiles of 64, and the scale is multiplied by log2(e) again for every tile, so the scores of keys 64 to 127"
    " count 1.443 times, those of the next 64 keys 1.443^2 times, and so on.",
    logits,
)
def scale_grows_per_tile(part: Part) -> Tensor:
    return part.scores * math.log2(math.e) ** (part.keys // 64)


# https://github.com/ROCm/rocm-libraries/issues/12227: a later split is seeded with a denominator of 1, sink or not
@third(
    "split-denominator-starts-at-one",
    "In decode sequences of more than 128 keys are processed in splits of 128, and the denominator of each starts at 1"
    " relative to the largest score of the split's first 32 keys instead of at 0, so exp(that score) is added to it.",
    outputs,
)
def split_denominator_starts_at_one(part: Part) -> Tensor:
    if not part.decode or part.len_k <= 128:
        return right(part)
    scores = masked(part.scores, part.visible)
    seeds = [split[..., :32].amax(-1) for split in tiles(scores, 128, 2)]
    total = torch.stack([scores.logsumexp(-1), *seeds]).logsumexp(0)
    return (scores - total[..., None]).exp() @ part.v


# https://github.com/flagos-ai/FlagAttention/pull/12 has the formula in which the scale can be missed
@third(
    "split-lse-of-unscaled-maximum",
    "In decode splits of 128 keys are merged by log-sum-exps to which the largest q k^T of the split is added without the"
    " scale, so with more than one split the one with the largest score weighs far too much.",
    outputs,
)
def split_lse_of_unscaled_maximum(part: Part) -> Tensor:
    if not part.decode:
        return right(part)
    states = []
    for at in range(0, part.len_k, 128):
        out, lse = state(part, slice(at, at + 128))
        top = part.scores[..., at : at + 128].amax(-1)
        states.append((out, lse - top + top / part.call.scale))
    return merge(states)


# https://github.com/Dao-AILab/flash-attention/pull/2388: strides of the splits' log-sum-exps
@third(
    "split-lse-strides",
    "In decode keys are processed in splits of 128, as many as the longest sequence needs, whose log-sum-exps are written"
    " as [splits, batch, heads] and read as [splits, heads, batch], so with more than one sequence and split their shares"
    " are those of other sequences and heads (a split that a sequence lacks has output 0 and log-sum-exp -inf).",
    remembers,
)
def split_lse_strides() -> Kernel:
    def kernel(call: AttentionCall) -> Tensor:
        if call.phase != "decode":
            return outputs(right)(call)
        splits, outs, lses = range(0, max(call.lens_k), 128), [], []
        for part in parts(call):
            out, lse = zip(*(state(part, slice(at, at + 128)) for at in splits), strict=True)
            outs.append(torch.stack(out))
            lses.append(torch.stack(lse)[..., 0])
        written = torch.stack(lses, 1)
        misread = written.reshape(len(splits), call.q.shape[1], -1).transpose(1, 2)
        shares = misread.softmax(0)[..., None]
        return (shares * torch.stack(outs, 1)[..., 0, :]).sum(0).to(call.q.dtype)

    return kernel


# https://github.com/local-inference-lab/vllm/pull/468
@third(
    "merge-reads-its-own-lse",
    "In extend attention to the cached prefix and to the new tokens is merged in place, and dims from 64 on find the"
    " prefix's log-sum-exp already replaced by that of all keys, so in them the prefix weighs (P + N) / (P + 2 N) instead of"
    " P / (P + N), and the new tokens N / (P + 2 N), where P and N are the sums of exp(score) over the two.",
    outputs,
)
def merge_reads_its_own_lse(part: Part) -> Tensor:
    if part.decode or part.prefix == 0:
        return right(part)
    (cached, old), (new, lse) = state(part, slice(0, part.prefix)), state(part, slice(part.prefix, None))
    early, late = (merge([(cached, prefix), (new, lse)]) for prefix in (old, torch.logaddexp(old, lse)))
    return torch.cat([early[..., :64], late[..., 64:]], 2)


# Scales of quantisation. Nothing is rounded: only scales that do not cancel show.


# https://github.com/sgl-project/sgl-kernel-xpu/pull/252: the review finds one scalar read for all heads
@third(
    "descales-of-first-head",
    "K and V are quantised per kv head over all sequences of the call, but all are scaled back with the scales of kv head"
    " 0, so scores and output of the others are multiplied by the ratio of the largest |k|, and |v|, of head 0 to theirs.",
    outputs,
)
def descales_of_first_head(part: Part) -> Tensor:
    everything = torch.arange(len(part.call.k), device=part.q.device)
    k, v = (largest(read(part, t, everything)) for t in (part.call.k, part.call.v))
    return attend(part.scores * k[:1] / k, part.visible, part.v) * v[:1] / v


# https://github.com/flashinfer-ai/flashinfer/pull/4654: lengths that the block does not divide
@third(
    "tail-scale-of-block-before",
    "K is quantised in blocks of 64 keys per sequence and kv head, but only len_k // 64 scales are kept, so in sequences of"
    " more than 64 keys the last len_k % 64 are scaled back with the scale of the block before: their scores are multiplied"
    " by the ratio of the largest |k| in it to that among them.",
    logits,
)
def tail_scale_of_block_before(part: Part) -> Tensor:
    own = amax(part.k, 64)
    block = part.keys // 64
    used = block.clamp(max=max(0, part.len_k // 64 - 1))
    return part.scores * (own[:, used] / own[:, block])[:, None, :]


# https://github.com/thu-ml/SageAttention/issues/232 asks how Q per warp and K per block go together
@third(
    "q-scale-of-first-warp",
    "In extend Q is quantised per head and 32 tokens, but the scale is looked up per 128 tokens, so the scores of tokens 32"
    " to 127 of every 128 are multiplied by the ratio of the largest |q| of the first 32 of the 128 to that of their own 32.",
    logits,
)
def q_scale_of_first_warp(part: Part) -> Tensor:
    if part.decode:
        return part.scores
    own, warp = amax(part.q, 32), part.rows[:, 0] // 32
    return part.scores * (own[:, warp // 4 * 4] / own[:, warp])[..., None]


# Memory of earlier calls, shared buffers.


# https://github.com/huggingface/candle/pull/3479
@third(
    "first-row-stored-alone",
    "Sequences with 2 to 32 new tokens go to a kernel that stores the output of the first of them alone: the rows of the"
    " others are what the call before left in these rows of the output buffer (zeros if nothing).",
    remembers,
)
def first_row_stored_alone() -> Kernel:
    buffers: dict[torch.Size, Tensor] = {}

    def kernel(call: AttentionCall) -> Tensor:
        out = outputs(right)(call)
        before = buffers.get(out.shape[1:], out[:0])
        buffer = torch.cat([before, out.new_zeros(max(0, len(out) - len(before)), *out.shape[1:])])
        for rows, _ in sequences(call):
            stored = slice(rows.start, rows.start + 1) if rows.stop - rows.start <= 32 else rows
            buffer[stored] = out[stored]
        buffers[out.shape[1:]] = buffer
        return buffer[: len(out)].clone()

    return kernel


# https://github.com/flashinfer-ai/flashinfer/pull/1028: a mask that outlives its plan
@third(
    "mask-of-first-plan",
    "In causal extend calls the offsets of the mask are the cached prefixes of the first such call that had as many"
    " sequences, so token i of sequence b sees keys 0 to i + the prefix that sequence b had then.",
    remembers,
)
def mask_of_first_plan() -> Kernel:
    planned: dict[int, list[int]] = {}

    def kernel(call: AttentionCall) -> Tensor:
        if call.phase == "decode" or not call.causal:
            return outputs(right)(call)
        prefixes = planned.setdefault(len(call.lens_q), call.prefixes)
        return masks(lambda part: part.keys <= part.rows + prefixes[part.number])(call)

    return kernel


# https://github.com/sgl-project/sglang/pull/20411: metadata that is not set for decoding
@third(
    "decode-lengths-of-last-extend",
    "In decode the key lengths are still those of the last extend call if it had as many sequences, so sequences that are"
    " longer than the one in that place was then miss their keys from there on.",
    remembers,
)
def decode_lengths_of_last_extend() -> Kernel:
    kept: list[int] = []

    def kernel(call: AttentionCall) -> Tensor:
        if call.phase != "decode":
            kept[:] = call.lens_k
        if call.phase != "decode" or len(kept) != len(call.lens_k):
            return outputs(right)(call)
        return masks(lambda part: part.visible & (part.keys < kept[part.number]))(call)

    return kernel


# https://github.com/tile-ai/TileOPs/pull/1215: the review finds nothing that orders the append before the reads
@third(
    "newest-key-not-yet-written",
    "In decode the cache is read before the new token is written to it, so the key and value at the last position of a"
    " sequence are those that the last call of the same layer that reached this position had there in the sequence with the"
    " same number (zeros if none).",
    remembers,
)
def newest_key_not_yet_written() -> Kernel:
    caches: dict[tuple[int, int, torch.Size, torch.Size], tuple[Tensor, Tensor]] = {}

    def kernel(call: AttentionCall) -> Tensor:
        def compute(part: Part) -> Tensor:
            place = (call.layer, part.number, call.k.shape[1:], call.v.shape[1:])
            rows = slice(part.start, part.start + part.len_k)
            now = call.k[rows].float(), call.v[rows].float()
            before = caches.get(place, (now[0][:0], now[1][:0]))
            k_cache, v_cache = (torch.cat([new, old[len(new) :]]) for new, old in zip(now, before, strict=True))
            caches[place] = k_cache, v_cache
            if not part.decode:
                return right(part)
            last = part.len_k - 1
            stale = [
                old[last] if last < len(old) else torch.zeros_like(new[0]) for new, old in zip(now, before, strict=True)
            ]
            k, v = (
                torch.cat([own[:, :-1], row.repeat_interleave(part.groups, 0)[:, None]], 1)
                for own, row in zip((part.k, part.v), stale, strict=True)
            )
            return attend(call.scale * part.q @ k.transpose(1, 2), part.visible, v)

        return outputs(compute)(call)

    return kernel


THIRD: tuple[HeldOut, ...] = tuple(third.found)
"""All held-out kernels of the third set."""
