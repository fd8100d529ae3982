"""The effect of each bug on a sequence: one definition each, on top of the oracle's own steps.

A bug takes a batch of sequences and the index of one of them, and returns that sequence changed (attention is then computed as
usual) or its output for the queries that are asked for; None where the bug cannot show on that sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.oracle import Request, attend, scores

Batch = list[Request]
Change = Callable[[Batch, int], "Request | Tensor | None"]
"""A bug: (batch, b) -> request b changed, or its output; None where the bug cannot show."""

Q_BLOCK, K_BLOCK = 128, 64
"""Tokens that share an int8 scale in SageAttention's Triton kernels (sageattention 1.0.6, quant_per_block_varlen.py)."""
E4M3_MAX = 448.0
"""Largest finite fp8 e4m3fn."""
FP16_MAX = 65504.0
"""Largest finite fp16."""


def int8(x: Tensor, block: int, shift: int = 0, stretch: float | Tensor = 1.0) -> Tensor:
    """Quantise to int8 with one scale per head and block of tokens, and dequantise with the scale of the block `shift` further.

    Args:
        x: float64 [heads, tokens, dim].
        block: tokens per block.
        shift: 0 is correct; 1 and -1 take a neighbour's scale (the first or last block keeps its own where there is none).
        stretch: factor on every scale, slightly above 1: different rounding errors, hardly larger ones. Several, as [draws], give
            [draws, heads, tokens, dim].
    """
    heads, tokens, dim = x.shape
    blocks = -(-tokens // block)
    padded = torch.nn.functional.pad(x, (0, 0, 0, blocks * block - tokens)).view(heads, blocks, block, dim)
    times = stretch[:, None, None, None, None] if isinstance(stretch, Tensor) else stretch
    scale = padded.abs().amax((2, 3), keepdim=True) * times / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    whole = (padded / scale).round()
    wrong = (torch.arange(blocks, device=x.device) + shift).clamp(0, blocks - 1)
    return (whole * scale[..., wrong, :, :]).flatten(-3, -2)[..., :tokens, :]


def smooth(batch: Batch, b: int) -> Tensor:
    """K of a sequence minus the mean of K over all tokens of the batch, as in SageAttention's varlen path."""
    return batch[b].k - torch.cat([r.k for r in batch], dim=1).mean(1, keepdim=True)


def _keys(request: Request) -> Tensor:
    return torch.arange(request.len_k, device=request.q.device)


def _distance(request: Request) -> Tensor:
    """Distance from each key forward to each query, in tokens, [len_q, len_k]."""
    queries = torch.arange(request.len_q, device=request.q.device) + request.prefix
    return queries[:, None] - _keys(request)[None, :]


# Masks


def top_left(batch: Batch, b: int) -> Request | None:
    """The causal mask is aligned to the top left corner."""
    r = batch[b]
    return replace(r, visible=torch.ones_like(r.visible).tril()) if r.mask.causal and r.prefix else None


def diagonal(by: int, batch: Batch, b: int) -> Request | None:
    """The causal mask is shifted `by` keys to the right."""
    r = batch[b]
    if not r.mask.causal or (by > 0 and r.len_q == 1):
        return None
    return replace(r, visible=torch.ones_like(r.visible).tril(r.prefix + by))


def no_mask(batch: Batch, b: int) -> Request | None:
    """The mask is missing."""
    r = batch[b]
    return replace(r, visible=torch.ones_like(r.visible)) if r.mask.causal and r.len_q > 1 else None


def prefix_dropped(batch: Batch, b: int) -> Request | None:
    """The cached keys are not seen."""
    r = batch[b]
    return replace(r, visible=r.visible & (_keys(r) >= r.prefix)) if r.prefix else None


def window(size: int, batch: Batch, b: int) -> Request | None:
    """Each query sees its last `size` keys only."""
    r = batch[b]
    return replace(r, visible=r.visible & (_distance(r) < size)) if r.len_k > size else None


def last_block_lost(block: int, batch: Batch, b: int) -> Request | None:
    """The keys after the last whole block are not seen."""
    r = batch[b]
    whole = r.len_k // block * block
    return replace(r, visible=r.visible & (_keys(r) < whole)) if whole < r.len_k else None


# The cached prefix and the newest token


def prefix_shifted(by: int, what: str, batch: Batch, b: int) -> Request | None:
    """The cached rows of K, V or both ("k", "v", "kv") are read `by` tokens off."""
    r = batch[b]
    if not r.prefix:
        return None
    index = _keys(r)
    index[: r.prefix] = (index[: r.prefix] + by).clamp(min=0)
    return replace(r, **{name: getattr(r, name)[:, index] for name in what})


def newest(copied: bool, batch: Batch, b: int) -> Request | None:
    """The newest key and value are those of the token before, or zero."""
    r = batch[b]
    if r.len_k < 2:
        return None
    k, v = (torch.cat([t[:, :-1], t[:, -2:-1] * float(copied)], dim=1) for t in (r.k, r.v))
    return replace(r, k=k, v=v)


# Scales


def scaled(scale: Callable[[Request], float], batch: Batch, b: int) -> Request | None:
    """The softmax scale is `scale(request)`."""
    r = batch[b]
    wrong = scale(r)
    return None if math.isclose(wrong, r.scale) or r.len_k == 1 else replace(r, scale=wrong)


# Heads


def interleaved(batch: Batch, b: int) -> Request | None:
    """q head h reads kv head h mod num_kv_heads."""
    r = batch[b]
    heads, kv_heads = len(r.kv_head), r.k.shape[0]
    if kv_heads in (1, heads):
        return None
    return replace(r, kv_head=torch.arange(heads, device=r.q.device) % kv_heads)


def kv_head(by: int, batch: Batch, b: int) -> Request | None:
    """q heads read the kv head `by` after theirs."""
    r = batch[b]
    if r.k.shape[0] < 2 + (by < 0):  # of two heads the previous is the next
        return None
    return replace(r, kv_head=(r.kv_head + by) % r.k.shape[0])


# Quantisation


def neighbours_scale(what: str, shift: int, batch: Batch, b: int) -> Request | None:
    """int8 Q or K ("q", "k") is dequantised with the scale of the block `shift` further."""
    r = batch[b]
    if (r.len_k <= K_BLOCK) if what == "k" else (r.len_q <= Q_BLOCK):
        return None
    q = int8(r.q, Q_BLOCK, shift if what == "q" else 0)
    return replace(r, q=q, k=int8(smooth(batch, b), K_BLOCK, shift if what == "k" else 0))


def not_smoothed(batch: Batch, b: int) -> Request | None:
    """int8 QK without smoothing of K."""
    r = batch[b]
    return replace(r, q=int8(r.q, Q_BLOCK), k=int8(r.k, K_BLOCK)) if r.len_k > 1 else None


def smoothed_by_block(batch: Batch, b: int) -> Request | None:
    """Each block of K loses its own mean, which shifts its scores relative to other blocks."""
    r = batch[b]
    if r.len_k <= K_BLOCK:
        return None
    return replace(
        r,
        k=torch.cat(
            [
                r.k[:, i : i + K_BLOCK] - r.k[:, i : i + K_BLOCK].mean(1, keepdim=True)
                for i in range(0, r.len_k, K_BLOCK)
            ],
            1,
        ),
    )


def new_keys_smoothed(batch: Batch, b: int) -> Request | None:
    """New keys lose the mean of K and cached ones do not, which shifts their scores relative to each other."""
    r = batch[b]
    if not r.prefix:
        return None
    return replace(r, k=torch.cat([r.k[:, : r.prefix], smooth(batch, b)[:, r.prefix :]], dim=1))


# Precision and range


def accumulator(dtype: torch.dtype, batch: Batch, b: int) -> Tensor | None:
    """Sums over values are rounded to a dtype after each block of keys. (Another order of summation rounds differently.)"""
    r = batch[b]
    if r.len_k <= K_BLOCK:
        return None
    weights = scores(r)
    weights = (weights - weights.amax(-1, keepdim=True)).exp()
    total = torch.zeros(*weights.shape[:2], r.v.shape[2], dtype=dtype, device=r.q.device)
    for start in range(0, r.len_k, K_BLOCK):
        keys = slice(start, start + K_BLOCK)
        total = (total.double() + weights[..., keys] @ r.v[:, keys][r.kv_head]).to(dtype)
    return total.double() / weights.sum(-1, keepdim=True)


def _products(r: Request) -> Tensor:
    """q k^T of the queries that are asked for, before the scale, zero where a key is not seen, [num_q_heads, asked, len_k]."""
    return (r.asked_q @ r.k[r.kv_head].transpose(1, 2)) * r.asked_visible


def _reaches(r: Request, limit: float) -> bool:
    """Return True if a q·k product of any query is beyond a limit."""
    if float(r.q.norm(dim=-1).amax()) * float(r.k.norm(dim=-1).amax()) <= limit:  # Cauchy-Schwarz
        return False
    return bool((_products(replace(r, asked=None)).abs() > limit).any())


def values_saturate(limit: float, batch: Batch, b: int) -> Request | None:
    """Values are clamped."""
    r = batch[b]
    return replace(r, v=r.v.clamp(-limit, limit)) if bool((r.v.abs() > limit).any()) else None


def scores_saturate(limit: float, batch: Batch, b: int) -> Tensor | None:
    """q k products are clamped before they are scaled."""
    r = batch[b]
    if not _reaches(r, limit):
        return None
    clamped = (_products(r).clamp(-limit, limit) * r.scale).masked_fill(~r.asked_visible, float("-inf"))
    return attend(r, clamped)


def scores_overflow(batch: Batch, b: int) -> Tensor | None:
    """A query with a q k product beyond fp16 has an output that is not finite."""
    r = batch[b]
    if not _reaches(r, FP16_MAX) or not bool((_products(replace(r, asked=None)) > FP16_MAX).any()):
        return None
    return attend(r).masked_fill((_products(r) > FP16_MAX).any(-1, keepdim=True), float("inf"))


def values_overflow(batch: Batch, b: int) -> Tensor | None:
    """A value beyond fp16 makes every output infinite that it contributes to."""
    r = batch[b]
    beyond = (r.v.abs() > FP16_MAX).double()[r.kv_head]
    return attend(r).masked_fill(r.asked_visible.double() @ beyond > 0, float("inf")) if bool(beyond.any()) else None


# Leaks


def _neighbour(batch: Batch, b: int, by: int) -> Request | None:
    """The request `by` further in the batch; None beyond its ends."""
    return batch[b + by] if 0 <= b + by < len(batch) else None


def leak(by: int, what: str, only_prefix: bool, batch: Batch, b: int) -> Request | None:
    """The first rows of K, V or both are those of the request `by` further in the batch."""
    r, other = batch[b], _neighbour(batch, b, by)
    tokens = 0 if other is None else min(r.prefix, other.prefix) if only_prefix else min(r.len_k, other.len_k)
    if other is None or not tokens or all(torch.equal(_head(r, w, tokens), _head(other, w, tokens)) for w in what):
        return None
    mixed: dict[str, Any] = {w: torch.cat([_head(other, w, tokens), getattr(r, w)[:, tokens:]], dim=1) for w in what}
    return replace(r, **mixed)


def _head(r: Request, what: str, tokens: int) -> Tensor:
    found: Tensor = getattr(r, what)[:, :tokens]
    return found


def boundary(by: int, whole: bool, batch: Batch, b: int) -> Request | None:
    """Every query also sees the nearest key (or all keys) of the request `by` further in the batch."""
    r, other = batch[b], _neighbour(batch, b, by)
    if other is None:
        return None
    if not whole:
        token = slice(-1, None) if by < 0 else slice(0, 1)
        other = replace(other, k=other.k[:, token], v=other.v[:, token])
    seen = torch.ones(r.len_q, other.k.shape[1], dtype=torch.bool, device=r.q.device)
    return replace(
        r,
        k=torch.cat([other.k, r.k], dim=1),
        v=torch.cat([other.v, r.v], dim=1),
        visible=torch.cat([seen, r.visible], dim=1),
    )
