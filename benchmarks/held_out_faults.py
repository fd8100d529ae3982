"""Forty attention kernels with one bug each, to ask the read-out what it makes of bugs that nobody chose for it.

They were written without sight of the read-out: its author had not read what it can describe, nor the catalogue, the
hypotheses or the drawn bugs. They follow public bugs of FlashAttention, FlashInfer, SageAttention, vLLM, SGLang and
TensorRT-LLM, and slips that a kernel author could make. Nothing here may be adapted to the read-out.

Each kernel is right but for its bug: float32, deterministic in the call and, where the truth says so, in the calls before
it. All honour ``call.causal``. Where a bug hides every key of a query, the output is zero. Positions count from 0 within a
sequence, the cached prefix included; a new token's own position is prefix + its number among the new tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, Mask
from assay.harness.attention.oracle import sequences


@dataclass(frozen=True)
class HeldOut:
    """A kernel with one bug.

    Attributes:
        id: kebab-case name.
        truth: what is wrong, and where, in one sentence.
        make: gives a fresh kernel, without memory of earlier calls.
    """

    id: str
    truth: str
    make: Callable[[], Kernel]


@dataclass(frozen=True)
class Part:
    """One sequence of a call, heads first, float32.

    Attributes:
        call: the call.
        number: which of its sequences this is.
        start: first row of the sequence in k and v.
        q: [heads, len_q, head_dim].
        k: [heads, len_k, head_dim], each q head with the kv head that it reads.
        v: [heads, len_k, head_dim_v], likewise.
        visible: the right mask, bool [len_q, len_k].
    """

    call: AttentionCall
    number: int
    start: int
    q: Tensor
    k: Tensor
    v: Tensor
    visible: Tensor

    @property
    def len_q(self) -> int:
        return self.q.shape[1]

    @property
    def len_k(self) -> int:
        return self.k.shape[1]

    @property
    def prefix(self) -> int:
        return self.len_k - self.len_q

    @property
    def decode(self) -> bool:
        return self.call.phase == "decode"

    @property
    def groups(self) -> int:
        """Q heads per kv head."""
        return self.call.q.shape[1] // self.call.k.shape[1]

    @property
    def rows(self) -> Tensor:
        """Numbers of the new tokens, int64 [len_q, 1]."""
        return torch.arange(self.len_q, device=self.q.device)[:, None]

    @property
    def keys(self) -> Tensor:
        """Positions of the keys, int64 [len_k]."""
        return torch.arange(self.len_k, device=self.q.device)

    @property
    def scores(self) -> Tensor:
        """scale * q k^T, not masked, [heads, len_q, len_k]."""
        return self.call.scale * self.q @ self.k.transpose(1, 2)


def parts(call: AttentionCall) -> list[Part]:
    """The sequences of a call."""
    groups = call.q.shape[1] // call.k.shape[1]
    found = []
    for number, (rows_q, rows_k) in enumerate(sequences(call)):
        q = call.q[rows_q].float().transpose(0, 1)
        k, v = (t[rows_k].float().transpose(0, 1).repeat_interleave(groups, 0) for t in (call.k, call.v))
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
        if call.causal:
            visible = Mask().visible(torch.arange(q.shape[1], device=q.device), q.shape[1], k.shape[1])
        found.append(Part(call, number, rows_k.start, q, k, v, visible))
    return found


def read(part: Part, packed: Tensor, index: Tensor) -> Tensor:
    """Rows of a packed k or v for each q head, [heads, len(index), dim]; zeros where the index lies outside the pack."""
    inside = (index >= 0) & (index < len(packed))
    found = packed[index.clamp(0, len(packed) - 1)].float() * inside[:, None, None]
    return found.transpose(0, 1).repeat_interleave(part.groups, 0)


def attend(scores: Tensor, visible: Tensor, v: Tensor) -> Tensor:
    """Attention, [heads, len_q, head_dim_v]; zero for a query that sees no key."""
    return masked(scores, visible).softmax(-1).nan_to_num(0.0) @ v


def masked(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(~visible, -math.inf)


def tiles(x: Tensor, size: int, dim: int) -> list[Tensor]:
    """x in pieces of `size` along a dim; the last one may be shorter."""
    return [x.narrow(dim, at, min(size, x.shape[dim] - at)) for at in range(0, x.shape[dim], size)]


def up(number: int, multiple: int) -> int:
    """The number rounded up to a multiple."""
    return -(-number // multiple) * multiple


def page_rows(call: AttentionCall, size: int) -> list[Tensor]:
    """Packed rows in the pages of each sequence, int64 [pages, size] per sequence; -1 in the slots that are not filled."""
    found = []
    for _, rows in sequences(call):
        slots = torch.full((up(rows.stop - rows.start, size),), -1, device=call.q.device)
        slots[: rows.stop - rows.start] = torch.arange(rows.start, rows.stop, device=call.q.device)
        found.append(slots.view(-1, size))
    return found


# What a bug gives, and the kernel around it.

Compute = Callable[[Part], Tensor]
F = TypeVar("F")


class Register:
    """A list of bugs, and the decorator that adds to it."""

    def __init__(self) -> None:
        self.found: list[HeldOut] = []

    def __call__(self, name: str, truth: str, build: Callable[[F], Kernel]) -> Callable[[F], F]:
        """Adds a bug; `build` makes a kernel of what is decorated."""

        def add(bug: F) -> F:
            self.found.append(HeldOut(name, truth, lambda: build(bug)))
            return bug

        return add


held_out = Register()


def outputs(compute: Compute) -> Kernel:
    """A kernel from what gives the output of one sequence, [heads, len_q, head_dim_v]."""

    def kernel(call: AttentionCall) -> Tensor:
        return torch.cat([compute(part).transpose(0, 1) for part in parts(call)]).to(call.q.dtype)

    return kernel


def masks(bug: Compute) -> Kernel:
    """A kernel from what gives the mask of one sequence, bool [len_q, len_k]."""
    return outputs(lambda part: attend(part.scores, bug(part), part.v))


def logits(bug: Compute) -> Kernel:
    """A kernel from what gives the scores of one sequence, not masked, [heads, len_q, len_k]."""
    return outputs(lambda part: attend(bug(part), part.visible, part.v))


def values(bug: Compute) -> Kernel:
    """A kernel from what gives the values of one sequence, [heads, len_k, head_dim_v]."""
    return outputs(lambda part: attend(part.scores, part.visible, bug(part)))


def reads(bug: Compute) -> Kernel:
    """A kernel from what gives the packed rows that one sequence reads as its keys and values, int64 [n].

    n may exceed len_k: all queries see the additional keys. Fewer keys are the first ones.
    """

    def compute(part: Part) -> Tensor:
        index = bug(part)
        k, v = read(part, part.call.k, index), read(part, part.call.v, index)
        visible = torch.ones(part.len_q, len(index), dtype=torch.bool, device=index.device)
        shared = min(len(index), part.len_k)
        visible[:, :shared] = part.visible[:, :shared]
        return attend(part.call.scale * part.q @ k.transpose(1, 2), visible, v)

    return outputs(compute)


def remembers(bug: Callable[[], Kernel]) -> Kernel:
    """The kernel of a bug that needs memory of earlier calls."""
    return bug()


# Masks and causal offsets.


@held_out(
    "one-masked-tile",
    "In causal calls, with tiles of 64 queries and 64 keys, only the last key tile that a query tile reaches is"
    " masked, so where the diagonal crosses two key tiles (prefix no multiple of 64) queries see all keys of the"
    " first of the two, future ones included.",
    masks,
)
def one_masked_tile(part: Part) -> Tensor:
    if not part.call.causal:
        return part.visible
    last_row = (part.rows // 64 * 64 + 63).clamp(max=part.len_q - 1)
    return part.visible | (part.keys // 64 < (last_row + part.prefix) // 64)


@held_out(
    "packed-gqa-position",
    "With G q heads per kv head packed into tiles of 64 rows (row = token * G + head in group), the causal mask"
    " takes tile * 64 + (row % 64) // G for the token's number instead of row // G, so tokens from number 64 / G on"
    " see keys too far ahead if G > 1.",
    masks,
)
def packed_gqa_position(part: Part) -> Tensor:
    packed = part.rows * part.groups
    position = packed // 64 * 64 + packed % 64 // part.groups
    return part.visible | (part.keys <= position + part.prefix)


@held_out(
    "offset-rounded-to-page",
    "The causal offset is the cached prefix rounded up to whole pages of 16, so in causal calls with a prefix that"
    " is no multiple of 16 every query sees up to 15 keys after its own.",
    masks,
)
def offset_rounded_to_page(part: Part) -> Tensor:
    return part.visible | (part.keys <= part.rows + up(part.prefix, 16))


@held_out(
    "chunk-restarts-offset",
    "New tokens are processed in chunks of 128, and in causal calls the causal position of every chunk after the"
    " first begins at the prefix again, so token i >= 128 sees only keys up to prefix + i % 128.",
    masks,
)
def chunk_restarts_offset(part: Part) -> Tensor:
    if not part.call.causal:
        return part.visible
    return part.keys <= part.prefix + part.rows % 128


@held_out(
    "bfloat16-positions",
    "The causal mask compares positions that were rounded to bfloat16, so in causal calls queries beyond position"
    " 256 see a future key that rounds to their own position or below (more of them beyond 512).",
    masks,
)
def bfloat16_positions(part: Part) -> Tensor:
    if not part.call.causal:
        return part.visible
    return part.keys.bfloat16() <= (part.rows + part.prefix).bfloat16()


@held_out(
    "overlapping-tail-tile",
    "If a sequence has more than 16 new tokens and their number is no multiple of 16, the last query tile is moved"
    " back to cover exactly the last 16 tokens, but the causal mask keeps its unmoved positions, so these 16 see"
    " -new % 16 keys too many.",
    masks,
)
def overlapping_tail_tile(part: Part) -> Tensor:
    if part.len_q <= 16:
        return part.visible
    shifted = part.keys <= part.rows + part.prefix + -part.len_q % 16
    return part.visible | (shifted & (part.rows >= part.len_q - 16))


@held_out(
    "last-page-length-zero",
    "The fill of the last page of the cached prefix is prefix % 16, which is 0 for a full page, so if the prefix is"
    " a multiple of 16 its last 16 keys are seen by no query.",
    masks,
)
def last_page_length_zero(part: Part) -> Tensor:
    if part.prefix == 0 or part.prefix % 16:
        return part.visible
    return part.visible & ((part.keys < part.prefix - 16) | (part.keys >= part.prefix))


@held_out(
    "window-on-even-layers",
    "In decode, layers with an even number apply a sliding window that the model does not have: only keys from"
    " position (len_k - 128) rounded down to a page of 16 on are seen.",
    masks,
)
def window_on_even_layers(part: Part) -> Tensor:
    if not part.decode or part.call.layer % 2:
        return part.visible
    return part.visible & (part.keys >= (part.len_k - 128) // 16 * 16)


@held_out(
    "lengths-in-sorted-order",
    "A decode batch is sorted by length, longest first, but the array of lengths is not, so the sequence of rank r"
    " reads only as many of its keys as sequence number r of the batch has.",
    masks,
)
def lengths_in_sorted_order(part: Part) -> Tensor:
    if not part.decode:
        return part.visible
    lens = part.call.lens_k
    rank = sorted(range(len(lens)), key=lambda b: -lens[b]).index(part.number)
    return part.visible & (part.keys < lens[rank])


# Pages, rows and sequences.


@held_out(
    "decode-tail-reads-on",
    "In decode the last tile of 32 keys is not cut off at the sequence's length: the rows behind it in the pack"
    " (the next sequence's first keys and values; zeros behind the pack's end) count as keys up to the next multiple"
    " of 32.",
    reads,
)
def decode_tail_reads_on(part: Part) -> Tensor:
    length = up(part.len_k, 32) if part.decode else part.len_k
    return part.start + torch.arange(length, device=part.q.device)


@held_out(
    "page-table-stride",
    "With pages of 64, row b of the page table is sought at b times the pages of sequence b instead of b times the"
    " table's width, so sequences from the second on that have fewer pages than the longest read pages of other"
    " sequences (page 0 where the table is padded; zeros in slots of a page that are not filled).",
    reads,
)
def page_table_stride(part: Part) -> Tensor:
    pages = page_rows(part.call, 64)
    width = max(map(len, pages))
    table, first = torch.zeros(len(pages), width, dtype=torch.int64, device=part.q.device), 0
    for b, own in enumerate(pages):
        table[b, : len(own)] = torch.arange(first, first + len(own))
        first += len(own)
    begin = part.number * len(pages[part.number])
    wanted = table.flatten()[begin : begin + len(pages[part.number])]
    return torch.cat(pages)[wanted].flatten()[: part.len_k]


@held_out(
    "half-page-offset",
    "With pages of 64 the slot in a page is taken as position % 32 instead of % 64, so the second 32 keys and"
    " values of every page are read as its first 32.",
    reads,
)
def half_page_offset(part: Part) -> Tensor:
    return part.start + part.keys // 64 * 64 + part.keys % 32


@held_out(
    "uniform-prefix-assumed",
    "The first key row of sequence b is taken as cu_seqlens_q[b] + b * (prefix of sequence 0), so sequences after"
    " one whose prefix differs from sequence 0's read K and V from wrong rows (zeros behind the pack's end).",
    reads,
)
def uniform_prefix_assumed(part: Part) -> Tensor:
    start = int(part.call.cu_seqlens_q[part.number]) + part.number * part.call.prefixes[0]
    return start + part.keys


@held_out(
    "ring-of-256",
    "K and V are kept in a ring of 256 slots and all of a call's tokens are written first, so in sequences of more"
    " than 256 tokens a key is replaced, with its value, by the newest one whose position is equal modulo 256.",
    reads,
)
def ring_of_256(part: Part) -> Tensor:
    return part.start + part.keys + (part.len_k - 1 - part.keys) // 256 * 256


@held_out(
    "shared-prefix-assumed",
    "In batches of more than one sequence the first m keys and values of every sequence are read from sequence 0,"
    " where m is the smallest prefix of the batch rounded down to pages of 16, as if the prefix were shared.",
    reads,
)
def shared_prefix_assumed(part: Part) -> Tensor:
    shared = min(part.call.prefixes) // 16 * 16
    return torch.where(part.keys < shared, part.keys, part.start + part.keys)


@held_out(
    "decode-v-two-back",
    "In decode the third and later sequences of a batch read V, with their own length, from where the sequence two"
    " places before begins; K is right.",
    values,
)
def decode_v_two_back(part: Part) -> Tensor:
    if not part.decode or part.number < 2:
        return part.v
    return read(part, part.call.v, part.keys + int(part.call.cu_seqlens_k[part.number - 2]))


@held_out(
    "tail-values-are-keys",
    "In decode the values in the last, partly filled page of 16 are read from K: those of the last len_k % 16"
    " positions.",
    values,
)
def tail_values_are_keys(part: Part) -> Tensor:
    if not part.decode:
        return part.v
    tail = part.keys >= part.len_k // 16 * 16
    return torch.where(tail[:, None], part.k[..., : part.v.shape[2]], part.v)


@held_out(
    "key-vector-width",
    "In decode, pages of 16 keys were written as [dim / 8, 16, 8] per head and are read as [dim / 4, 16, 4], which"
    " scrambles dims and tokens of K within every page (slots that are not filled are zeros); V is right.",
    logits,
)
def key_vector_width(part: Part) -> Tensor:
    if not part.decode:
        return part.scores
    heads, _, dim = part.k.shape
    padded = torch.zeros(heads, up(part.len_k, 16), dim, device=part.k.device)
    padded[:, : part.len_k] = part.k
    written = padded.view(heads, -1, 16, dim // 8, 8).transpose(2, 3).reshape(heads, -1, dim // 4, 16, 4)
    k = written.transpose(2, 3).reshape(padded.shape)[:, : part.len_k]
    return part.call.scale * part.q @ k.transpose(1, 2)


# Heads and head dims.


@held_out(
    "modulo-heads-when-split",
    "In decode with more than 128 keys q head h reads kv head h % kv_heads, for K and V, instead of h // (heads /"
    " kv_heads).",
    outputs,
)
def modulo_heads_when_split(part: Part) -> Tensor:
    k, v = part.k, part.v
    if part.decode and part.len_k > 128:
        k, v = (t[:: part.groups].repeat(part.groups, 1, 1) for t in (k, v))
    return attend(part.call.scale * part.q @ k.transpose(1, 2), part.visible, v)


@held_out(
    "v-head-by-kv-heads",
    "Q head h reads V of kv head h // kv_heads (at most the last one) instead of h // (heads / kv_heads); its K is"
    " right.",
    values,
)
def v_head_by_kv_heads(part: Part) -> Tensor:
    kv_heads = part.call.k.shape[1]
    head = (torch.arange(len(part.q), device=part.q.device) // kv_heads).clamp(max=kv_heads - 1)
    return part.v[:: part.groups][head]


@held_out(
    "decode-output-transposed",
    "In decode the outputs of a batch lie in memory as [heads, batch] and are returned as if they were [batch,"
    " heads], so with more than one sequence they belong to other sequences and heads.",
    remembers,
)
def decode_output_transposed() -> Kernel:
    right = outputs(lambda part: attend(part.scores, part.visible, part.v))

    def kernel(call: AttentionCall) -> Tensor:
        out = right(call)
        return out.transpose(0, 1).reshape(out.shape) if call.phase == "decode" else out

    return kernel


@held_out(
    "tail-tile-half-dims",
    "With head dims above 64, the scores of the keys in the last, partly filled tile of 64 (the last len_k % 64"
    " keys) are products over the first 64 dims only.",
    logits,
)
def tail_tile_half_dims(part: Part) -> Tensor:
    first = part.call.scale * part.q[..., :64] @ part.k[..., :64].transpose(1, 2)
    return torch.where(part.keys >= part.len_k // 64 * 64, first, part.scores)


@held_out(
    "decode-scale-of-padded-dim",
    "In decode the softmax scale is 1 / sqrt(head_dim rounded up to a multiple of 64), whatever the call says.",
    logits,
)
def decode_scale_of_padded_dim(part: Part) -> Tensor:
    if not part.decode:
        return part.scores
    return part.q @ part.k.transpose(1, 2) / math.sqrt(up(part.q.shape[2], 64))


# Quantisation. Nothing is rounded: only scales that do not cancel show.


def amax(x: Tensor, size: int) -> Tensor:
    """Largest magnitude in blocks of `size` tokens, [heads, blocks], of x [heads, tokens, dim]."""
    return torch.stack([block.abs().amax((1, 2)).clamp(min=1e-6) for block in tiles(x, size, 1)], 1)


@held_out(
    "k-scale-of-packed-block",
    "K is quantised in blocks of 64 keys of one sequence, and sequence b finds its scales from number"
    " cu_seqlens_k[b] // 64 on instead of after those of the sequences before it, so if these do not fill their last"
    " blocks the scores of a block are off by the ratio of the largest |k| of two blocks (of that kv head).",
    logits,
)
def k_scale_of_packed_block(part: Part) -> Tensor:
    every = torch.cat([amax(other.k, 64) for other in parts(part.call)], 1)
    used = part.start // 64 + part.keys // 64
    own = amax(part.k, 64)[:, part.keys // 64]
    return part.scores * (every[:, used] / own)[:, None, :]


@held_out(
    "q-scale-of-first-head",
    "Q is quantised per head in tiles of 64 queries, but all q heads of a kv head are scaled back with the scale of"
    " the first of them, so the scores of the others are off by the ratio of the largest |q| of two heads in the"
    " tile.",
    logits,
)
def q_scale_of_first_head(part: Part) -> Tensor:
    scales = amax(part.q, 64)
    used = scales[:: part.groups].repeat_interleave(part.groups, 0)
    return part.scores * (used / scales)[:, part.rows[:, 0] // 64, None]


@held_out(
    "v-range-of-new-tokens",
    "In extend, V's range per kv head and channel is measured on the new tokens of the sequence only, so values of"
    " its cached prefix are clipped to the largest |v| that the new tokens have in that channel.",
    values,
)
def v_range_of_new_tokens(part: Part) -> Tensor:
    if part.decode:
        return part.v
    bound = part.v[:, part.prefix :].abs().amax(1, keepdim=True)
    return part.v.clamp(-bound, bound)


@held_out(
    "k-scale-one-call-late",
    "K is quantised with the largest |k| per kv head of the last call of the same layer but scaled back with this"
    " call's, so from the second call of a layer on the scores of a kv head are multiplied by the ratio this / last.",
    remembers,
)
def k_scale_one_call_late() -> Kernel:
    last: dict[tuple[int, int], Tensor] = {}

    def kernel(call: AttentionCall) -> Tensor:
        key, now = (call.layer, call.k.shape[1]), call.k.float().abs().amax((0, 2)).clamp(min=1e-6)
        ratio = (now / last.get(key, now)).repeat_interleave(call.q.shape[1] // call.k.shape[1])
        last[key] = now
        return logits(lambda part: part.scores * ratio[:, None, None])(call)

    return kernel


# Softmax: running maxima, denominators, merges.


@held_out(
    "rescale-skipped",
    "Keys come in tiles of 64, and if a later tile raises a query's running maximum by less than 2, the new maximum"
    " is used for it but what was summed before (numerator and denominator) is not rescaled, so earlier tiles weigh"
    " too much.",
    outputs,
)
def rescale_skipped(part: Part) -> Tensor:
    scores = masked(part.scores, part.visible)
    top = torch.full_like(scores[..., :1], -math.inf)
    total, summed = torch.zeros_like(top), torch.zeros(*scores.shape[:2], part.v.shape[2], device=scores.device)
    for tile, v in zip(tiles(scores, 64, 2), tiles(part.v, 64, 1), strict=True):
        new = torch.maximum(top, tile.amax(-1, keepdim=True))
        kept = torch.where(new - top < 2, 1.0, (top - new).exp())
        weights = (tile - new).exp()
        total, summed, top = total * kept + weights.sum(-1, keepdim=True), summed * kept + weights @ v, new
    return summed / total


@held_out(
    "denominator-rescaled-late",
    "Keys come in tiles of 32, and from the second tile on the denominator is rescaled after the tile's weights"
    " were added instead of before, so the weights of a tile that raises the running maximum are missing in part"
    " from the denominator.",
    outputs,
)
def denominator_rescaled_late(part: Part) -> Tensor:
    scores = masked(part.scores, part.visible)
    first, *later = tiles(scores, 32, 2)
    top = first.amax(-1, keepdim=True)
    total = (first - top).exp().sum(-1, keepdim=True)
    for tile in later:
        new = torch.maximum(top, tile.amax(-1, keepdim=True))
        total, top = (total + (tile - new).exp().sum(-1, keepdim=True)) * (top - new).exp(), new
    return (scores - top).exp() @ part.v / total


@held_out(
    "log2e-missing-on-diagonal",
    "In causal calls the scores in tiles of 64 queries by 64 keys that need masking are not multiplied by log2(e)"
    " before exp2, so they count 0.693 times; tiles without a masked key are right.",
    logits,
)
def log2e_missing_on_diagonal(part: Part) -> Tensor:
    first_row = part.rows // 64 * 64
    last_key = (part.keys // 64 * 64 + 63).clamp(max=part.len_k - 1)
    crossed = (last_key > first_row + part.prefix) & part.call.causal
    return torch.where(crossed, part.scores * math.log(2), part.scores)


@held_out(
    "denominator-before-mask",
    "In causal calls the denominator also counts the keys after a query's own within the tile of 32 keys in which"
    " it lies: the mask is applied to the numerator only.",
    outputs,
)
def denominator_before_mask(part: Part) -> Tensor:
    scores = part.scores
    counted = part.visible | (part.keys // 32 <= (part.rows + part.prefix) // 32)
    total = masked(scores, counted).logsumexp(-1, keepdim=True)
    return (masked(scores, part.visible) - total).exp() @ part.v


@held_out(
    "state-of-earlier-tile",
    "Running maximum and denominator are not reset between the tiles of 64 new tokens of a sequence and head, only"
    " the numerator is, so the denominator of token i >= 64 also contains those of tokens i - 64, i - 128 and so on.",
    outputs,
)
def state_of_earlier_tile(part: Part) -> Tensor:
    scores = masked(part.scores, part.visible)
    own = scores.logsumexp(-1)
    carried = torch.full_like(own[:, :64], -math.inf)
    totals = []
    for tile in tiles(own, 64, 1):
        carried = torch.logaddexp(carried[:, : tile.shape[1]], tile)
        totals.append(carried)
    return (scores - torch.cat(totals, 1)[..., None]).exp() @ part.v


@held_out(
    "sinks-twice",
    "In sequences of more than 64 keys the first 4 keys are processed as attention sinks and again with the first"
    " tile, so they count twice in numerator and denominator.",
    logits,
)
def sinks_twice(part: Part) -> Tensor:
    twice = (part.keys < 4) & (part.len_k > 64)
    return part.scores + twice * math.log(2)


def merge(states: list[tuple[Tensor, Tensor]], base: float = math.e) -> Tensor:
    """Attention to all keys from outputs [heads, len_q, head_dim_v] for parts of them and their log-sum-exps.

    Args:
        states: outputs and log-sum-exps [heads, len_q].
        base: what the log-sum-exps are taken to be logarithms to; right is e.
    """
    shares = (torch.stack([lse for _, lse in states]) * math.log(base)).softmax(0)
    return (shares[..., None] * torch.stack([out for out, _ in states])).sum(0)


def state(part: Part, keys: slice) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp for some of the keys."""
    scores, visible, v = part.scores[..., keys], part.visible[:, keys], part.v[:, keys]
    return attend(scores, visible, v), masked(scores, visible).logsumexp(-1)


@held_out(
    "merge-in-base-two",
    "In decode with more than 128 keys, splits of 128 keys are merged with weights 2^lse although their"
    " log-sum-exps are natural ones, so the splits' shares are too alike: a short last split weighs too much.",
    outputs,
)
def merge_in_base_two(part: Part) -> Tensor:
    if not part.decode:
        return attend(part.scores, part.visible, part.v)
    return merge([state(part, slice(at, at + 128)) for at in range(0, part.len_k, 128)], base=2)


@held_out(
    "prefix-lse-layout",
    "With a cached prefix, attention to the prefix and to the new tokens is merged by log-sum-exps, of which the"
    " prefix's lie in memory as [heads, tokens] and are read as [tokens, heads], so with more than one new token"
    " their shares are those of other tokens and heads.",
    outputs,
)
def prefix_lse_layout(part: Part) -> Tensor:
    if part.prefix == 0:
        return attend(part.scores, part.visible, part.v)
    cached, lse = state(part, slice(0, part.prefix))
    misread = lse.reshape(part.len_q, len(part.q)).T
    return merge([(cached, misread), state(part, slice(part.prefix, None))])


# Memory of earlier calls.


@held_out(
    "stale-page-tail",
    "In decode all 16 slots of a sequence's last page count as keys: those behind its length hold what earlier"
    " calls of the layer left there in a pool that is filled from slot 0 by every call, each sequence from a new"
    " page on (zeros if nothing).",
    remembers,
)
def stale_page_tail() -> Kernel:
    pools: dict[tuple[int, torch.Size, torch.Size], tuple[Tensor, Tensor]] = {}

    def kernel(call: AttentionCall) -> Tensor:
        key = (call.layer, call.k.shape[1:], call.v.shape[1:])
        pages = page_rows(call, 16)
        slots = torch.cat(pages).flatten()
        pool_k, pool_v = pools.get(key, (call.k[:0].float(), call.v[:0].float()))
        missing = max(0, len(slots) - len(pool_k))
        pool_k, pool_v = (torch.cat([p, p.new_zeros(missing, *p.shape[1:])]) for p in (pool_k, pool_v))
        filled = (slots >= 0).nonzero()[:, 0]
        pool_k[filled], pool_v[filled] = call.k.float(), call.v.float()
        pools[key] = pool_k, pool_v
        firsts = [sum(own.numel() for own in pages[:b]) for b in range(len(pages))]

        def compute(part: Part) -> Tensor:
            if not part.decode:
                return attend(part.scores, part.visible, part.v)
            index = firsts[part.number] + torch.arange(up(part.len_k, 16), device=part.q.device)
            k, v = read(part, pool_k, index), read(part, pool_v, index)
            visible = torch.nn.functional.pad(part.visible, (0, len(index) - part.len_k), value=True)
            return attend(call.scale * part.q @ k.transpose(1, 2), visible, v)

        return outputs(compute)(call)

    return kernel


@held_out(
    "decode-plan-kept",
    "The key lengths of a decode call are those that were planned last if the plan has as many sequences (an extend"
    " call, or a decode call with another number of sequences, plans anew), so sequences miss their last keys or read"
    " on into the following rows of the pack, up to its end.",
    remembers,
)
def decode_plan_kept() -> Kernel:
    planned: list[int] = []

    def kernel(call: AttentionCall) -> Tensor:
        if call.phase != "decode" or len(planned) != len(call.lens_k):
            planned[:] = call.lens_k

        def rows(part: Part) -> Tensor:
            stop = min(part.start + planned[part.number], len(call.k))
            return torch.arange(part.start, stop, device=part.q.device)

        return reads(rows)(call)

    return kernel


@held_out(
    "tail-rows-not-stored",
    "In sequences of more than 16 new tokens of which the last query tile of 16 holds only 1 to 3, the output of"
    " these 1 to 3 tokens is not stored: it is what the call before left in these rows of the output buffer (zeros"
    " if nothing).",
    remembers,
)
def tail_rows_not_stored() -> Kernel:
    buffers: dict[torch.Size, Tensor] = {}
    right = outputs(lambda part: attend(part.scores, part.visible, part.v))

    def kernel(call: AttentionCall) -> Tensor:
        out = right(call)
        before = buffers.get(out.shape[1:], out[:0])
        buffer = torch.cat([before, out.new_zeros(max(0, len(out) - len(before)), *out.shape[1:])])
        stored = torch.ones(len(out), dtype=torch.bool, device=out.device)
        for rows, _ in sequences(call):
            length = rows.stop - rows.start
            if length > 16 and 1 <= length % 16 <= 3:
                stored[rows.stop - length % 16 : rows.stop] = False
        buffer[: len(out)][stored] = out[stored]
        buffers[out.shape[1:]] = buffer
        return buffer[: len(out)].clone()

    return kernel


@held_out(
    "every-fourth-call",
    "In every fourth call of the kernel, sequences with a cached prefix of at least 64 tokens lose their first 64"
    " keys, because the counter of a finished split has wrapped.",
    remembers,
)
def every_fourth_call() -> Kernel:
    calls = 0

    def kernel(call: AttentionCall) -> Tensor:
        nonlocal calls
        calls += 1
        if calls % 4:
            return masks(lambda part: part.visible)(call)
        return masks(lambda part: part.visible & ((part.keys >= 64) | (part.prefix < 64)))(call)

    return kernel


@held_out(
    "prefix-values-of-layer-before",
    "In layers with an odd number the values of cached prefixes are those that the last call of the layer before"
    " had in the same rows of the pack (zeros behind its end); right if that layer was not called yet with V of this"
    " shape.",
    remembers,
)
def prefix_values_of_layer_before() -> Kernel:
    last: dict[tuple[int, torch.Size], Tensor] = {}

    def kernel(call: AttentionCall) -> Tensor:
        below = last.get((call.layer - 1, call.v.shape[1:]))
        last[call.layer, call.v.shape[1:]] = call.v.clone()

        def v(part: Part) -> Tensor:
            if below is None or call.layer % 2 == 0:
                return part.v
            other = read(part, below, part.start + part.keys)
            return torch.where((part.keys < part.prefix)[:, None], other, part.v)

        return values(v)(call)

    return kernel


HELD_OUT: tuple[HeldOut, ...] = tuple(held_out.found)
"""All held-out kernels of the first set."""
