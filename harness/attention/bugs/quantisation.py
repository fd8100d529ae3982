"""Bugs of an int8 quantisation of Q and K, as SageAttention has it: scales of other blocks, and means of K."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import Batch, Bug, changing, changing_in_batch, code
from assay.harness.attention.oracle import Request

# Tokens that share an int8 scale in SageAttention's Triton kernels (sageattention 1.0.6, quant_per_block_varlen.py).
_Q_BLOCK, K_BLOCK = 128, 64
_INT8 = """\
def int8(x, block, by=0):  # quantised by block, and dequantised with the scale of the block `by` further
    parts = x.split(block, 1)
    scales = [part.abs().amax((1, 2), keepdim=True) / 127 for part in parts]
    used = [scales[min(max(n + by, 0), len(parts) - 1)] for n in range(len(parts))]
    return torch.cat([(x / own).round() * its for x, own, its in zip(parts, scales, used)], 1)


def attend(q, k, v, scale):
    q, k = @
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_SMOOTH = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    mean = k.mean(1, keepdim=True)
    k = @
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_SMOOTHED = "int8(q, 128), int8(k - k.mean(1, keepdim=True), 64)"


def _int8(x: Tensor, block: int, shift: int = 0) -> Tensor:
    """Store x [heads, tokens, dim] in int8 with a scale per head and block, and dequantise it with that of a later block."""
    heads, tokens, dim = x.shape
    blocks = -(-tokens // block)
    padded = torch.nn.functional.pad(x, (0, 0, 0, blocks * block - tokens)).view(heads, blocks, block, dim)
    scale = padded.abs().amax((2, 3), keepdim=True) / 127
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    whole = (padded / scale).round()
    wrong = (torch.arange(blocks, device=x.device) + shift).clamp(0, blocks - 1)
    return (whole * scale[..., wrong, :, :]).flatten(-3, -2)[..., :tokens, :]


def _smooth(batch: Batch, b: int) -> Tensor:
    """Subtract from K of a sequence the mean of K over all tokens of the batch, as in SageAttention's varlen path."""
    return batch[b].k - torch.cat([r.k for r in batch], dim=1).mean(1, keepdim=True)


def _neighbours_scale(what: str, shift: int, batch: Batch, b: int) -> Request | None:
    """Dequantise int8 Q or K ("q", "k") with the scale of the block `shift` further."""
    r = batch[b]
    if (r.len_k <= K_BLOCK) if what == "k" else (r.len_q <= _Q_BLOCK):
        return None
    q = _int8(r.q, _Q_BLOCK, shift if what == "q" else 0)
    return replace(r, q=q, k=_int8(_smooth(batch, b), K_BLOCK, shift if what == "k" else 0))


def _not_smoothed(r: Request) -> Request | None:
    return replace(r, q=_int8(r.q, _Q_BLOCK), k=_int8(r.k, K_BLOCK)) if r.len_k > 1 else None


def _smoothed_by_block(r: Request) -> Request | None:
    """Subtract from each block of K its own mean, which shifts its scores relative to other blocks."""
    parts = [part - part.mean(1, keepdim=True) for part in torch.split(r.k, K_BLOCK, 1)]
    return replace(r, k=torch.cat(parts, 1)) if len(parts) > 1 else None


def _new_keys_smoothed(batch: Batch, b: int) -> Request | None:
    """Subtract the mean of K from new keys and not from cached ones, which shifts their scores relative to each other."""
    r = batch[b]
    if not r.prefix:
        return None
    return replace(r, k=torch.cat([r.k[:, : r.prefix], _smooth(batch, b)[:, r.prefix :]], dim=1))


def _neighbours(what: str, by: int) -> str:
    q, k = (f", {by}" * (name == what) for name in "qk")
    return f"int8(q, 128{q}), int8(k - k.mean(1, keepdim=True), 64{k})"


BUGS = (
    *(Bug(f"{what}-scale-{side}-block", f"{what.upper()} scale of the {side} block",
          f"int8 {what.upper()} is dequantised with the scale of its {side} block",
          f"dequantises {what} with the scale of the {side} block", "quantisation-scale",
          changing_in_batch(partial(_neighbours_scale, what, by)),
          code(_INT8, _neighbours(what, by), _SMOOTHED))
      for what in "kq" for side, by in (("previous", -1), ("next", 1))),
    Bug("k-smoothed-by-block", "K smoothed by block", f"each block of {K_BLOCK} keys loses its own mean instead of one common mean",
        "subtracts another mean of K in each block", "k-smoothing", changing(_smoothed_by_block),
        code(_SMOOTH, "torch.cat([part - part.mean(1, keepdim=True) for part in k.split(64, 1)], 1)", "k - mean")),
    Bug("k-smoothed-new-only", "K smoothed in new keys only", "the mean of K is subtracted from new keys but not from cached ones",
        "subtracts the mean of K from new keys only", "k-smoothing", changing_in_batch(_new_keys_smoothed),
        code(_SMOOTH, "torch.cat([k[:, : keys - new], k[:, keys - new :] - mean], 1)", "k - mean")),
    Bug("k-smoothing-lost", "K smoothing lost", "K is quantised to int8 without its mean subtracted",
        "does not subtract the mean of K", "k-smoothing", changing(_not_smoothed),
        code(_INT8, "int8(q, 128), int8(k, 64)", _SMOOTHED)),
)  # fmt: skip
