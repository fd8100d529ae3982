"""Bounds from noise: how large the error of a correct kernel may be on a given call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from assay.harness.attention import bugs
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import oracle, requests
from assay.harness.localize.cells import cells_of, deviation

SAFETY_FACTOR = 3.0
"""A bound is this multiple of the noise. Measured over 120 calls of 1 to 101 tokens in fp16, bf16 and fp32, on normal data, on
peaky data (q and k doubled and tripled) and with a constant added to K: the worst cell of SageAttention 1.0.6 was at most 2.1
times the noise simulated here, that of PyTorch's scaled_dot_product_attention at most 2.0 times the rounding."""
DRAWS = (1.0, 1.02, 1.05, 1.09, 1.14, 1.19)
"""Factors on the quantisation scales under which the noise is simulated. The error of a cell with one query and few keys depends
on a few rounding errors, which differ in another correct kernel (other block boundaries, another mean)."""
_MAX_WEIGHTS = 2**24
"""Most attention weights that are simulated at once: 128 MiB of float64."""
MIN_NOISE = {"int8_qk": 0.0156}
"""Least noise of a quantisation, by id: on calls of a few tokens the simulation can be exact by chance (a saturated softmax over
two keys has no noise). For int8 QK it is the published average over layers (arXiv 2410.02367, table 4); three times that is
0.047, next to 0.0511 in the worst published layer (table 5)."""


def noise_of(call: AttentionCall, dtype: torch.dtype) -> Tensor:
    """Relative L1 that rounding to a dtype costs on this call, by cell and head.

    Inputs and output in `dtype`, scores and sums in float32, weights rounded to `dtype` before they meet the values, as
    fused kernels (Triton, FlashAttention, PyTorch's own) compute it; compared with float64 on the same inputs.

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
    """Relative L1 that a declared quantisation costs on this call, by cell and head, in the shape of `noise_of`.

    "int8_qk" is SageAttention's: K minus its mean, Q and K in int8 with a scale per 128 queries and 64 keys of a head, weights
    and values in fp16 (arXiv 2410.02367), everything else in float64. SageAttention's published per-layer figures are a
    relative L1 of .0156 on average and .0511 in the worst layer (tables 4 and 5).

    Raises:
        ValueError: no such scheme.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"no quantisation is called {scheme!r}; expected one of {', '.join(SCHEMES)}")
    truth, cells = oracle(call), cells_of(call)
    weights = call.q.shape[1] * max(q * k for q, k in zip(call.lens_q, call.lens_k, strict=True))
    at_once = max(1, min(len(DRAWS), _MAX_WEIGHTS // weights))
    worst: list[Tensor] = []
    for start in range(0, len(DRAWS), at_once):
        stretches = torch.tensor(DRAWS[start : start + at_once], dtype=torch.float64, device=call.q.device)
        out = SCHEMES[scheme](call, stretches)
        # Draws take the place of heads, so that one pass over the outputs gives all deviations.
        off = deviation(out.flatten(1, 2), truth.repeat(1, len(stretches), 1), cells).relative_l1
        worst.append(off.view(len(cells.sequence), len(stretches), -1).amax(1))
    return torch.stack(worst).amax(0)


def least_bound(call: AttentionCall, scheme: str = "") -> float:
    """A lower limit of `bound_of` that needs no simulation: an own error up to this is within the bound.

    Raises:
        ValueError: no such scheme.
    """
    if scheme and scheme not in MIN_NOISE:
        raise ValueError(f"no quantisation is called {scheme!r}; expected one of {', '.join(MIN_NOISE)}")
    return SAFETY_FACTOR * max(torch.finfo(call.q.dtype).eps, MIN_NOISE[scheme] if scheme else 0.0)


def bound_of(call: AttentionCall, scheme: str = "") -> float:
    """Largest relative L1 that a correct kernel may have in any cell and head of this call.

    `SAFETY_FACTOR` times the larger of the rounding of the call's dtype and the noise of the declared quantisation, each in its
    worst cell and head; at least `least_bound`.

    Args:
        call: the call.
        scheme: quantisation that the kernel declares; empty for none.
    """
    worst = _worst(noise_of(call, call.q.dtype))
    if scheme:
        worst = max(worst, _worst(quantised_noise(call, scheme)))
    return max(SAFETY_FACTOR * worst, least_bound(call, scheme))


def _worst(noise: Tensor) -> float:
    """The largest noise; a cell in which the simulation itself overflows counts as noiseless."""
    return float(noise.masked_fill(~noise.isfinite(), 0.0).max())


def _int8_qk(call: AttentionCall, stretches: Tensor) -> Tensor:
    # As in the package, K minus its mean is rounded to the dtype of K before it is quantised, and the output is rounded too.
    outs = []
    for r in requests(replace(call, k=call.k - call.k.mean(dim=0, keepdim=True))):
        q, k = bugs.int8(r.q, bugs.Q_BLOCK, stretch=stretches), bugs.int8(r.k, bugs.K_BLOCK, stretch=stretches)
        logits = (r.scale * q @ k[:, r.kv_head].transpose(-2, -1)).masked_fill(~r.visible, float("-inf"))
        weights = (logits - logits.amax(-1, keepdim=True)).exp()
        sums = weights.half().double() @ r.v.half().double()[r.kv_head]
        outs.append(sums / weights.sum(-1, keepdim=True))
    return torch.cat(outs, dim=2).permute(2, 0, 1, 3).to(call.q.dtype)


SCHEMES: dict[str, Callable[[AttentionCall, Tensor], Tensor]] = {"int8_qk": _int8_qk}
"""Noise that a kernel may declare, by id: (call, factors on the scales [draws]) -> outputs
[total_q, draws, num_q_heads, head_dim_v]."""
