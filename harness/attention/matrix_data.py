"""Data of the op-level matrix: what the numbers of a call are like, in the ways in which attention kernels fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from assay.harness.attention.call import AttentionCall

Change = Callable[[AttentionCall], AttentionCall]
_ABOVE_ZERO = 110.0
"""A scaled score whose exponential overflows in float32, and whose negative's is zero."""
_UNSCALED, _SCALED = 1.5e5, 160.0
"""An unscaled score beyond the range of fp16 (65,504) and below every number that stands for minus infinity in kernels (-1e4, -5e4,
-65,504), and what it is when scaled: exp(-160 * 1e5 / 1.5e5), which a maximum that begins at -5e4 leaves, is zero in float32."""


def _offset(call: AttentionCall) -> AttentionCall:
    # Equal in every token, as in real K: what K smoothing removes (arXiv 2410.02367, section 4.2).
    common = torch.linspace(-6, 6, call.k.shape[2], device=call.k.device).to(call.k.dtype)
    return replace(call, k=call.k + common)


def _outliers(call: AttentionCall) -> AttentionCall:
    # Two dims of K, an eighth of all apart, are ten times as large as the others, as measured in trained models (arXiv 2402.02750).
    size = torch.ones(call.k.shape[2], device=call.k.device)
    size[[3, 3 + call.k.shape[2] // 8]] = 10.0
    return replace(call, k=call.k * size)


def _far_from_zero(sign: int, unscaled: float, call: AttentionCall) -> AttentionCall:
    # Each query sees the first new key alone: it scores `unscaled` and the others 0, or it -unscaled and the others twice that.
    # Scores need not be precise for that, so no noise family is in the way.
    size = (unscaled / call.q.shape[2]) ** 0.5
    steps = []
    for length, prefix in zip(call.lens_k, call.prefixes, strict=True):
        steps += [sign - 1.0 + (key == prefix) for key in range(length)]
    return replace(call, q=call.q + size, k=call.k + size * torch.tensor(steps).to(call.k)[:, None, None])


def _scaled_far(sign: int, call: AttentionCall) -> AttentionCall:
    return _far_from_zero(sign, _ABOVE_ZERO / call.scale, call)


def _unscaled_far(sign: int, call: AttentionCall) -> AttentionCall:
    return replace(_far_from_zero(sign, _UNSCALED, call), scale=_SCALED / _UNSCALED)


BEYOND_FP16 = ("unscaled scores above 1e5", "unscaled scores below -1e5")
"""Data of which fp16 does not hold the scores before they are scaled: no call for a kernel that declares to keep sums in fp16."""

DATA: dict[str, Change] = {
    "normal": lambda call: call,
    "peaky": lambda call: replace(call, q=2 * call.q, k=2 * call.k),
    "K offset": _offset,
    "K outliers": _outliers,
    "large values": lambda call: replace(call, v=300 * call.v),  # beyond fp8's 448, within fp16
}
"""Data of calls of the design."""

RARE: dict[str, Change] = {
    "other numbers": lambda call: call,  # drawn with another seed
    "scale 1.5 times": lambda call: replace(call, scale=1.5 * call.scale),
    "scores far above 0": partial(_scaled_far, 1),
    "scores far below 0": partial(_scaled_far, -1),
    BEYOND_FP16[0]: partial(_unscaled_far, 1),
    BEYOND_FP16[1]: partial(_unscaled_far, -1),
    # All of one sign: their sum over the keys is beyond fp16 unless it is divided in time.
    "large positive values": lambda call: replace(call, v=300 * call.v.abs()),
}
"""Data of calls beyond the design."""
