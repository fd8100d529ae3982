"""Bugs of precision and range: accumulators, saturation and overflow."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import Bug, changing, code, lines
from assay.harness.attention.bugs.quantisation import K_BLOCK
from assay.harness.attention.oracle import Request, attend, scores

# Largest finite fp8 e4m3fn.
_E4M3_MAX = 448.0
FP16_MAX = 65504.0
"""Largest finite fp16."""
_ACCUMULATOR = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    scores = (scale * q @@ k.transpose(1, 2)).masked_fill(~seen, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.@)
    for start in range(0, keys, 64):
        part = slice(start, start + 64)
        total = (total + weights[..., part] @@ v[:, part]).to(total.dtype)
    return total / weights.sum(-1, keepdim=True)
"""
_VALUES = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
@    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    scores = scale * q @@ k.transpose(1, 2)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_PRODUCTS = """\
def attend(q, k, v, scale):
    new, keys = q.shape[1], k.shape[1]
    products = q @@ k.transpose(1, 2)
@    seen = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    return (scale * products).masked_fill(~seen, float("-inf")).softmax(-1) @@ v
"""
_LIMITS = (("fp8 e4m3", _E4M3_MAX), ("fp16", FP16_MAX))


def _accumulator(dtype: torch.dtype, r: Request) -> Tensor | None:
    """Round the sums over values to a dtype after each block of keys. (Another order of summation rounds differently.)"""
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
    """Compute q k^T of the queries asked for, before the scale, zero where a key is not seen, [num_q_heads, asked, len_k]."""
    return (r.asked_q @ r.k[r.kv_head].transpose(1, 2)) * r.asked_visible


def _reaches(r: Request, limit: float) -> bool:
    """Return True if a q·k product of any query is beyond a limit."""
    if float(r.q.norm(dim=-1).amax()) * float(r.k.norm(dim=-1).amax()) <= limit:  # Cauchy-Schwarz
        return False
    return bool((_products(replace(r, asked=None)).abs() > limit).any())


def _values_saturate(limit: float, r: Request) -> Request | None:
    return replace(r, v=r.v.clamp(-limit, limit)) if bool((r.v.abs() > limit).any()) else None


def _scores_saturate(limit: float, r: Request) -> Tensor | None:
    """Clamp q k products before they are scaled."""
    if not _reaches(r, limit):
        return None
    clamped = (_products(r).clamp(-limit, limit) * r.scale).masked_fill(~r.asked_visible, float("-inf"))
    return attend(r, clamped)


def _scores_overflow(r: Request) -> Tensor | None:
    """Make the output of a query with a q k product beyond fp16 not finite."""
    if not _reaches(r, FP16_MAX) or not bool((_products(replace(r, asked=None)) > FP16_MAX).any()):
        return None
    return attend(r).masked_fill((_products(r) > FP16_MAX).any(-1, keepdim=True), float("inf"))


def _values_overflow(r: Request) -> Tensor | None:
    """Make every output infinite that a value beyond fp16 contributes to."""
    beyond = (r.v.abs() > FP16_MAX).double()[r.kv_head]
    return attend(r).masked_fill(r.asked_visible.double() @ beyond > 0, float("inf")) if bool(beyond.any()) else None


BUGS = (
    *(Bug(f"accumulator-{name}", f"{name} accumulator", f"sums over values are kept in {name}, rounded every {K_BLOCK} keys",
          f"accumulates in {name}", "accumulator", changing(partial(_accumulator, dtype)),
          code(_ACCUMULATOR, str(dtype).removeprefix("torch."), "float32"), reports=reports, severity="warning")
      for name, dtype, reports in (
          ("fp16", torch.float16, ("vllm-project/vllm#23813", "vllm-project/vllm#27889")), ("bf16", torch.bfloat16, ()))),
    *(Bug(f"values-saturate-{name.replace(' ', '-')}", f"values saturate at {name}", f"values beyond {limit:g} are clamped",
          f"clamps values to the range of {name}", "saturation", changing(partial(_values_saturate, limit)),
          code(_VALUES, lines(f"v = v.clamp(-{limit:g}, {limit:g})"), ""),
          reports=("vllm-project/vllm!54705",) if limit == _E4M3_MAX else ()) for name, limit in _LIMITS),
    *(Bug(f"scores-saturate-{name.replace(' ', '-')}", f"scores saturate at {name}", f"q k products beyond {limit:g} are clamped",
          f"clamps scores to the range of {name}", "saturation", changing(partial(_scores_saturate, limit)),
          code(_PRODUCTS, lines(f"products = products.clamp(-{limit:g}, {limit:g})"), "")) for name, limit in _LIMITS),
    Bug("scores-overflow-fp16", "scores overflow fp16", f"q k products beyond {FP16_MAX:g} become infinite",
        "overflows fp16 in its scores", "overflow", changing(_scores_overflow),
        code(_PRODUCTS, lines('products = products.masked_fill(products > 65504, float("inf"))'), "")),
    Bug("values-overflow-fp16", "values overflow fp16", f"values beyond {FP16_MAX:g} become infinite",
        "overflows fp16 in its values", "overflow", changing(_values_overflow),
        code(_VALUES, lines('v = v.masked_fill(v.abs() > 65504, float("inf"))'), "")),
)  # fmt: skip


def inputs_rounded(dtype: torch.dtype, names: str, r: Request) -> Request:
    """Round Q, K or V ("q", "k", "v") to the precision of `dtype`, which the kernel does not declare."""
    return replace(r, **{name: getattr(r, name).to(dtype).double() for name in names})


def weights_rounded(dtype: torch.dtype, r: Request) -> Tensor:
    """Round attention weights to `dtype` before they meet the values."""
    return scores(r).softmax(-1).to(dtype).double() @ r.v[r.kv_head]


def scores_rounded(dtype: torch.dtype, r: Request) -> Tensor:
    """Round the scores to `dtype` before the softmax."""
    return attend(r, scores(r).to(dtype).double())


def denominator_rounded(r: Request) -> Tensor | None:
    """Keep the sum of the weights in bfloat16, so that small weights are lost from it."""
    if r.len_k <= K_BLOCK:
        return None
    logits = scores(r)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    total = torch.zeros_like(weights[..., :1], dtype=torch.bfloat16)
    for start in range(0, r.len_k, _SUMMED):
        total = (total.double() + weights[..., start : start + _SUMMED].sum(-1, keepdim=True)).bfloat16()
    return weights @ r.v[r.kv_head] / total.double()


# Weights that are added before their sum is rounded.
_SUMMED = 16
