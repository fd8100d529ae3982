"""Thirty wrong kernels for trying what assay reads off a kernel that it has not seen: the docstring of each is the truth.

They were written from reports of bugs in serving engines and their kernels, before assay was run on any, and without a look at
the read-out. Each makes one mistake. In the docstrings, i is a new token and j a key of its own sequence, both counted from 0;
a query i stands at position i + prefix. What a docstring does not mention is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import isfunction
from itertools import pairwise

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel


@dataclass(frozen=True)
class Sequence:
    """One sequence of a call in float32, heads first, with a row of k and v for every q head.

    `rows` are the numbers of the new tokens, int64 [len_q, 1], and `keys` those of all tokens, int64 [1, len_k].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    rows: Tensor
    keys: Tensor
    prefix: int
    scale: float

    @property
    def len_q(self) -> int:
        return self.q.shape[1]

    @property
    def len_k(self) -> int:
        return self.k.shape[1]

    @property
    def seen(self) -> Tensor:
        return self.keys <= self.rows + self.prefix

    def scores(self) -> Tensor:
        return self.q @ self.k.transpose(1, 2) * self.scale

    def attend(self, seen: Tensor | None = None, scores: Tensor | None = None) -> Tensor:
        """Compute attention with another mask or other scores; a query that sees no key gives zero."""
        scores = (self.scores() if scores is None else scores).masked_fill(
            ~(self.seen if seen is None else seen), -torch.inf
        )
        return scores.softmax(-1).nan_to_num(0.0) @ self.v


def _each(call: AttentionCall, compute: Callable[[Sequence], Tensor], kv_head: Tensor | None = None) -> Tensor:
    """Compute the sequences one by one."""
    device = call.q.device
    kv_head = call.heads.kv_head(torch.arange(call.heads.q_heads, device=device)) if kv_head is None else kv_head
    outs = []
    edges = zip(pairwise(call.cu_seqlens_q.tolist()), pairwise(call.cu_seqlens_k.tolist()), strict=True)
    for (q0, q1), (k0, k1) in edges:
        q, k, v = (x.float().transpose(0, 1) for x in (call.q[q0:q1], call.k[k0:k1], call.v[k0:k1]))
        rows, keys = torch.arange(q1 - q0, device=device)[:, None], torch.arange(k1 - k0, device=device)[None]
        prefix = k1 - k0 - (q1 - q0)
        outs.append(compute(Sequence(q, k[kv_head], v[kv_head], rows, keys, prefix, call.scale)))
    return torch.cat(outs, 1).transpose(0, 1).to(call.q.dtype)


def _with_keys(call: AttentionCall, rows: list[range]) -> AttentionCall:
    """Return the call with these rows of packed k and v as the keys of its sequences."""
    packed, lens = [j for keys in rows for j in keys], torch.tensor([0, *map(len, rows)])
    return replace(call, k=call.k[packed], v=call.v[packed], cu_seqlens_k=lens.cumsum(0).to(call.cu_seqlens_k))


def _power_of_two(number: int) -> int:
    return int(1 << (number - 1).bit_length())


def window_left_on_in_decode(call: AttentionCall) -> Tensor:
    """In the phase decode, a query sees only the last 128 keys (itself included): j > i + prefix - 128. Extend is right."""
    window = 128 if call.phase == "decode" else 2**30
    return _each(call, lambda s: s.attend(s.seen & (s.keys > s.rows + s.prefix - window)))


def mask_row_counted_in_its_tile(call: AttentionCall) -> Tensor:
    """Query i sees keys j <= i % 64 + prefix: the row in its tile of 64 in place of the row. Right for i < 64."""
    return _each(call, lambda s: s.attend(s.keys <= s.rows % 64 + s.prefix))


def key_blocks_rounded_down(call: AttentionCall) -> Tensor:
    """A tile of 64 queries ends at e = min(len_k, prefix + 64 * (i // 64 + 1)), and reads only max(1, e // 64) blocks of 64 keys.

    So the keys from 64 * (e // 64) on are unseen where e >= 64 is no multiple of 64.
    """

    def compute(s: Sequence) -> Tensor:
        end = (s.prefix + 64 * (s.rows // 64 + 1)).clamp(max=s.len_k)
        return s.attend(s.seen & (s.keys < 64 * (end // 64).clamp(min=1)))

    return _each(call, compute)


def tail_tile_masked_as_if_full(call: AttentionCall) -> Tensor:
    """The last len_q % 16 queries, where len_q > 16, see 16 - len_q % 16 keys too many (no more than there are).

    The last tile of 16 is moved back to end with the sequence, and its mask is not: j <= i + prefix + 16 - len_q % 16.
    """

    def compute(s: Sequence) -> Tensor:
        tail = s.len_q % 16 if s.len_q > 16 else 0
        moved = (s.rows >= s.len_q - tail) * (16 - tail) if tail else 0
        return s.attend(s.keys <= s.rows + s.prefix + moved)

    return _each(call, compute)


def draft_tokens_see_each_other(call: AttentionCall) -> Tensor:
    """With a cached prefix and 2 to 8 new tokens, every query sees all keys: the mask is not causal among draft tokens."""
    return _each(call, lambda s: s.attend(s.seen | (2 <= s.len_q <= 8 and s.prefix > 0)))


def prefix_of_first_sequence(call: AttentionCall) -> Tensor:
    """Query i sees keys j <= i + (prefix of the first sequence of the batch). Right for the first, and for equal prefixes."""
    first = call.prefixes[0]
    return _each(call, lambda s: s.attend(s.keys <= s.rows + first))


def masked_scores_zero_in_diagonal_block(call: AttentionCall) -> Tensor:
    """Keys after the query, in its own aligned block of 64 keys (j // 64 = (i + prefix) // 64), have score 0 and are seen."""

    def compute(s: Sequence) -> Tensor:
        at = s.rows + s.prefix
        return s.attend(s.seen | (s.keys // 64 == at // 64), s.scores().masked_fill(~s.seen, 0.0))

    return _each(call, compute)


def full_last_page_is_empty(call: AttentionCall) -> Tensor:
    """A sequence whose len_k is a multiple of 16 lacks its last 16 keys; a query that then sees none returns zero."""
    return _each(call, lambda s: s.attend(s.seen & (s.keys < s.len_k - 16 * (s.len_k % 16 == 0))))


def cached_values_one_page_behind(call: AttentionCall) -> Tensor:
    """The value of a cached key 16 <= j < prefix is that of key j - 16. K, new keys and the first page are right."""

    def compute(s: Sequence) -> Tensor:
        key = s.keys[0]
        return replace(s, v=s.v[:, torch.where((key >= 16) & (key < s.prefix), key - 16, key)]).attend()

    return _each(call, compute)


def new_tokens_stored_one_slot_early(call: AttentionCall) -> Tensor:
    """With a cached prefix, the keys and values from position prefix - 1 on are those of the next one, and the last are zeros.

    The new tokens overwrite the last cached one, and the slot of the last new token is empty. The mask is right.
    """

    def compute(s: Sequence) -> Tensor:
        if not s.prefix:
            return s.attend()
        k, v = (torch.cat([x[:, : s.prefix - 1], x[:, s.prefix :], x[:, :1] * 0], 1) for x in (s.k, s.v))
        return replace(s, k=k, v=v).attend()

    return _each(call, compute)


def shared_prefix_of_first_sequence(call: AttentionCall) -> Tensor:
    """In a batch of two or more, the first 16 * (shortest prefix // 16) keys and values of each are those of the first sequence."""
    shared = min(call.prefixes) // 16 * 16
    k, v = call.k.clone(), call.v.clone()
    starts = call.cu_seqlens_k.tolist()[:-1]
    for start in starts[1:]:
        for x in (k, v):
            x[start : start + shared] = x[starts[0] : starts[0] + shared]
    return _each(replace(call, k=k, v=v), Sequence.attend)


def keys_start_at_query_offsets(call: AttentionCall) -> Tensor:
    """The len_k keys and values of sequence b start at cu_seqlens_q[b], not cu_seqlens_k[b]: wrong after one with a prefix."""
    starts = call.cu_seqlens_q.tolist()[:-1]
    rows = [range(start, start + length) for start, length in zip(starts, call.lens_k, strict=True)]
    return _each(_with_keys(call, rows), Sequence.attend)


def decode_keys_in_order_of_length(call: AttentionCall) -> Tensor:
    """In the phase decode, sequence b reads the keys and values of the b-th longest sequence (stable), all of them."""
    if call.phase != "decode":
        return _each(call, Sequence.attend)
    edges = list(pairwise(call.cu_seqlens_k.tolist()))
    by_length = sorted(range(len(edges)), key=lambda b: edges[b][0] - edges[b][1])
    return _each(_with_keys(call, [range(*edges[b]) for b in by_length]), Sequence.attend)


def decode_tail_reads_next_sequence(call: AttentionCall) -> Tensor:
    """In the phase decode, a query also sees the next rows of packed k and v, up to a multiple of 64 keys; those that there are."""
    if call.phase != "decode":
        return _each(call, Sequence.attend)
    starts, total = call.cu_seqlens_k.tolist()[:-1], call.k.shape[0]
    rows = [range(k0, min(total, k0 + -(-length // 64) * 64)) for k0, length in zip(starts, call.lens_k, strict=True)]
    return _each(_with_keys(call, rows), Sequence.attend)


def block_table_captured_for_512(call: AttentionCall) -> Tensor:
    """Keys j >= 512 are unseen: the block table was captured for 512 tokens."""
    return _each(call, lambda s: s.attend(s.seen & (s.keys < 512)))


def group_rounded_up_to_power_of_two(call: AttentionCall) -> Tensor:
    """Query head h reads kv head h // p, with p the q heads per kv head rounded up to a power of two. Right for 1, 2, 4, 8, ..."""
    heads = torch.arange(call.heads.q_heads, device=call.q.device)
    return _each(call, Sequence.attend, heads // _power_of_two(call.heads.group))


def head_dim_tail_not_multiplied(call: AttentionCall) -> Tensor:
    """With head_dim > 64, scores use only the first 64 * (head_dim // 64) dims of q and k. V is whole."""
    dim = max(call.q.shape[2] // 64 * 64, min(call.q.shape[2], 64))
    return _each(call, lambda s: replace(s, q=s.q[..., :dim], k=s.k[..., :dim]).attend())


def scale_of_padded_head_dim(call: AttentionCall) -> Tensor:
    """The scale is p ** -0.5, with p the head_dim rounded up to a power of two, in place of the call's scale."""
    return _each(call.with_spec(scale=_power_of_two(call.q.shape[2]) ** -0.5), Sequence.attend)


def upper_dims_of_k_one_tile_late(call: AttentionCall) -> Tensor:
    """The dims from 64 on of a key j >= 64 are those of key j - 64 (a stale stage). Right for head_dim <= 64, and for V."""

    def compute(s: Sequence) -> Tensor:
        late = s.k[:, (s.keys[0] - 64).clamp(min=0)]
        return replace(s, k=torch.cat([s.k[..., :64], torch.where(s.keys.T >= 64, late, s.k)[..., 64:]], 2)).attend()

    return _each(call, compute)


def layer_scaling_not_undone(call: AttentionCall) -> Tensor:
    """The scale is divided by layer + 1. Right in layer 0."""
    return _each(call.with_spec(scale=call.scale / (call.layer + 1)), Sequence.attend)


def alibi_left_on_for_upper_heads(call: AttentionCall) -> Tensor:
    """Heads h >= q_heads / 2 add 2 ** (-8 (h + 1) / q_heads) * (j - i - prefix) to the score: ALiBi. The lower heads are right."""
    count = call.heads.q_heads
    heads = torch.arange(count, device=call.q.device)
    slopes = torch.where(2 * heads >= count, 2.0 ** (-8 * (heads + 1) / count), 0.0)[:, None, None]
    return _each(call, lambda s: s.attend(scores=s.scores() + slopes * (s.keys - s.rows - s.prefix)))


def softcap_before_scale(call: AttentionCall) -> Tensor:
    """The score is scale * 30 * tanh(q k / 30): a soft cap of 30 on the score before it is scaled."""
    return _each(call, lambda s: s.attend(scores=30 * torch.tanh(s.q @ s.k.transpose(1, 2) / 30) * s.scale))


def exp2_with_cached_prefix(call: AttentionCall) -> Tensor:
    """In extend with a cached prefix, weights are 2 ** score in place of e ** score: the scale is ln 2 times the call's."""
    base = 0.6931471805599453 if call.phase == "extend" else 1.0
    return _each(call, lambda s: replace(s, scale=s.scale * (base if s.prefix else 1.0)).attend())


def k_scale_of_previous_block(call: AttentionCall) -> Tensor:
    """A key in block b >= 1 of 64 keys is multiplied by (largest |k| of block b - 1) / (largest |k| of block b), per kv head."""

    def compute(s: Sequence) -> Tensor:
        blocks = s.k.split(64, 1)
        scales = [block.abs().amax((1, 2), keepdim=True) for block in blocks] if s.len_k else []
        moved = [block * before / own for block, own, before in zip(blocks, scales, scales[:1] + scales, strict=False)]
        return replace(s, k=torch.cat(moved, 1)).attend() if moved else s.attend()

    return _each(call, compute)


def k_smoothed_block_by_block(call: AttentionCall) -> Tensor:
    """Each block of 64 keys (the last may be shorter) has its own mean over tokens subtracted from K, where one of all cancels."""
    return _each(
        call, lambda s: replace(s, k=torch.cat([b - b.mean(1, keepdim=True) for b in s.k.split(64, 1)], 1)).attend()
    )


def splits_averaged_in_decode(call: AttentionCall) -> Tensor:
    """In the phase decode, the output is the plain mean of the attention over each split of 256 keys (the last may be shorter)."""

    def compute(s: Sequence) -> Tensor:
        width = 256 if call.phase == "decode" else max(s.len_k, 1)
        splits = [s.attend(s.seen & (s.keys // width == split)) for split in range(-(-s.len_k // width))]
        return torch.stack(splits).mean(0) if splits else s.attend()

    return _each(call, compute)


def padding_keys_in_decode_sum(call: AttentionCall) -> Tensor:
    """In the phase decode, -len_k % 32 keys that are all zeros are seen too: each has score 0 and value 0."""

    def compute(s: Sequence) -> Tensor:
        more = -s.len_k % 32 if call.phase == "decode" else 0
        k, v = (torch.cat([x, x.new_zeros(x.shape[0], more, x.shape[2])], 1) for x in (s.k, s.v))
        seen = torch.cat([s.seen, s.seen.new_ones(s.len_q, more)], 1)
        return replace(s, k=k, v=v).attend(seen)

    return _each(call, compute)


def accumulator_not_rescaled(call: AttentionCall) -> Tensor:
    """In an online softmax over blocks of 64 keys, the sum is rescaled when the maximum grows, and the accumulated output is not.

    Key j of block b is weighed by exp(score - (largest score up to block b)), over the sum of all exp(score - largest score).
    """

    def compute(s: Sequence) -> Tensor:
        scores = s.scores().masked_fill(~s.seen, -torch.inf)
        top = scores.cummax(-1).values[..., (s.keys[0] // 64 * 64 + 63).clamp(max=s.len_k - 1)]
        return (scores - top).exp() @ s.v / (scores - scores.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)

    return _each(call, lambda s: compute(s) if s.len_k else s.attend())


def sum_in_bfloat16(call: AttentionCall) -> Tensor:
    """The sum of the weights exp(score - largest score) is kept in bfloat16, rounded after each block of 16 keys is added."""

    def compute(s: Sequence) -> Tensor:
        scores = s.scores().masked_fill(~s.seen, -torch.inf)
        weights = (scores - scores.amax(-1, keepdim=True)).exp() if s.len_k else scores
        total = weights.new_zeros(*weights.shape[:2], 1).bfloat16()
        for block in weights.split(16, -1):
            total = (total.float() + block.sum(-1, keepdim=True)).bfloat16()
        return weights @ s.v / total.float()

    return _each(call, compute)


def values_permuted_in_eights(call: AttentionCall) -> Tensor:
    """In each whole group of 8 keys, the values of keys 2, 3 and 4, 5 are exchanged. K and a last shorter group are right."""

    def compute(s: Sequence) -> Tensor:
        key = s.keys[0]
        order = torch.tensor([0, 1, 4, 5, 2, 3, 6, 7], device=key.device)[key % 8] + key // 8 * 8
        return replace(s, v=s.v[:, torch.where(key < s.len_k // 8 * 8, order, key)]).attend()

    return _each(call, compute)


KERNELS: list[tuple[str, Kernel, str]] = [
    (name, made, (made.__doc__ or "").strip())
    for name, made in list(globals().items())
    if isfunction(made) and made.__module__ == __name__ and name[0] != "_"
]
"""Their names, the kernels, and what each computes: `python benchmarks/read_outs.py benchmarks/held_out_faults_fourth.py`."""
