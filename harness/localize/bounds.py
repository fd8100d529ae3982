"""Bounds from noise: how far a right kernel may be off on this very call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from assay.harness.attention import bugs
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import oracle, requests
from assay.harness.localize.cells import cells_of, deviation

SAFETY = 3.0
"""A bound is this many times the noise. Measured over 120 calls of 1 to 101 tokens in fp16, bf16 and fp32, on normal data, on
peaky data (q and k doubled and tripled) and with a constant added to K: the worst cell of SageAttention 1.0.6 was at most 2.1
times the noise simulated here, that of PyTorch's scaled_dot_product_attention at most 2.0 times the rounding."""
DRAWS = (1.0, 1.02, 1.05, 1.09, 1.14, 1.19)
"""Stretches of the quantisation scales under which the noise is simulated: a cell of one query over few keys is off by what its few
rounding errors happen to be, and another right kernel's (another block's start, another mean) happen to be others."""
_AT_ONCE = 2**24
"""Most attention weights that are simulated at once: 128 MiB of float64."""
FLOORS = {"int8_qk": 0.0156}
"""Least noise of a quantisation: on calls of a few tokens the simulation can be right by chance (a softmax over two keys that
is saturated has no noise at all). For int8 QK the published average over layers (arXiv 2410.02367, table 4); three
times that is 0.047, beside 0.0511 in the worst published layer (table 5)."""


def noise_of(call: AttentionCall, dtype: torch.dtype) -> Tensor:
    """Relative L1 that rounding to a dtype costs on this call, by cell and head.

    Inputs and output in `dtype`, scores and sums in float32, weights rounded to `dtype` before they meet the values, as
    fused kernels (Triton, FlashAttention, PyTorch's own) compute it; held against float64 on the same inputs.

    Returns:
        float64 [cells, num_q_heads], cells as `assay.harness.localize.cells.cells_of` orders them.
    """
    outs = []
    for r in requests(replace(call, q=call.q.to(dtype), k=call.k.to(dtype), v=call.v.to(dtype))):
        logits = (r.scale * r.q.float() @ r.k[r.kv_head].float().transpose(1, 2)).masked_fill(~r.visible, float("-inf"))
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        sums = weights.to(dtype).float() @ r.v[r.kv_head].float()
        outs.append((sums / weights.sum(-1, keepdim=True)).to(dtype))
    out = torch.cat(outs, dim=1).transpose(0, 1)
    return deviation(out, oracle(call), cells_of(call)).relative_l1


def quantised_noise(call: AttentionCall, scheme: str = "int8_qk") -> Tensor:
    """Relative L1 that a declared quantisation must cost on this call, by cell and head, as `noise_of` gives it.

    "int8_qk" is SageAttention's: K less its mean, Q and K in int8 with a scale per 128 queries and 64 keys of a head, weights
    and values in fp16 (arXiv 2410.02367), everything else in float64. SageAttention's published per-layer figures are
    relative L1 .0156 on average and .0511 in the worst layer (tables 4 and 5).

    Raises:
        ValueError: no such scheme.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"no quantisation is called {scheme!r}; expected one of {', '.join(SCHEMES)}")
    truth, cells = oracle(call), cells_of(call)
    weights = call.q.shape[1] * max(q * k for q, k in zip(call.lens_q, call.lens_k, strict=True))
    at_once = max(1, min(len(DRAWS), _AT_ONCE // weights))
    worst: list[Tensor] = []
    for start in range(0, len(DRAWS), at_once):
        stretches = torch.tensor(DRAWS[start : start + at_once], dtype=torch.float64, device=call.q.device)
        out = SCHEMES[scheme](call, stretches)
        # Draws stand beside each other as heads do, so that one pass over the outputs tells all their deviations.
        off = deviation(out.flatten(1, 2), truth.repeat(1, len(stretches), 1), cells).relative_l1
        worst.append(off.view(len(cells.sequence), len(stretches), -1).amax(1))
    return torch.stack(worst).amax(0)


def least_bound(call: AttentionCall, scheme: str = "") -> float:
    """What `bound_of` is at least, without simulating anything: an own error up to this is within the bound, whatever that is.

    Raises:
        ValueError: no such scheme.
    """
    if scheme and scheme not in FLOORS:
        raise ValueError(f"no quantisation is called {scheme!r}; expected one of {', '.join(FLOORS)}")
    return SAFETY * max(torch.finfo(call.q.dtype).eps, FLOORS[scheme] if scheme else 0.0)


def bound_of(call: AttentionCall, scheme: str = "") -> float:
    """Largest relative L1 that a right kernel may have in any cell and head of this call.

    `SAFETY` times the larger of the rounding of the call's dtype and the noise of the declared quantisation, each at its worst
    cell and head; `least_bound` where that is more.

    Args:
        call: the call.
        scheme: quantisation that the kernel declares; empty for none.
    """
    worst = _worst(noise_of(call, call.q.dtype))
    if scheme:
        worst = max(worst, _worst(quantised_noise(call, scheme)))
    return max(SAFETY * worst, least_bound(call, scheme))


def _worst(noise: Tensor) -> float:
    """The largest noise; a cell in which the simulation itself overflows excuses nothing."""
    return float(noise.masked_fill(~noise.isfinite(), 0.0).max())


def _int8_qk(call: AttentionCall, stretches: Tensor) -> Tensor:
    # K less its mean is rounded to the dtype of K before it is quantised, and so is the output, as the package does it.
    outs = []
    for r in requests(replace(call, k=call.k - call.k.mean(dim=0, keepdim=True))):
        q, k = bugs.int8(r.q, bugs.Q_BLOCK, stretch=stretches), bugs.int8(r.k, bugs.K_BLOCK, stretch=stretches)
        logits = (r.scale * q @ k[:, r.kv_head].transpose(-2, -1)).masked_fill(~r.visible, float("-inf"))
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        sums = weights.half().double() @ r.v.half().double()[r.kv_head]
        outs.append(sums / weights.sum(-1, keepdim=True))
    return torch.cat(outs, dim=2).permute(2, 0, 1, 3).to(call.q.dtype)


SCHEMES: dict[str, Callable[[AttentionCall, Tensor], Tensor]] = {"int8_qk": _int8_qk}
"""What a kernel may declare as its noise: takes a call and stretches [draws], gives outputs
[total_q, draws, num_q_heads, head_dim_v]."""
