"""Data of the op-level matrix: distributions of a call's numbers on which attention kernels fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.noise import FORMATS, NoiseFamily

_Change = Callable[[AttentionCall], AttentionCall]
# A scaled score whose exponential overflows in float32, and whose negative's is zero.
_ABOVE_ZERO = 110.0
# An unscaled score beyond the range of fp16 (65,504) and below every number that stands for minus infinity in kernels (-1e4,
# -5e4, -65,504), and what it is when scaled: below all but the last of these, and at least so large that exp(-160 * 1e5 / 1.5e5),
# which a maximum that begins at -5e4 leaves, is zero in float32.
_UNSCALED, _SCALED = 1.5e5, {1: 160.0, -1: 6e4}


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
    return _far_from_zero(sign, _UNSCALED, call).with_spec(scale=_SCALED[sign] / _UNSCALED)


def _scale(scale: float, call: AttentionCall) -> AttentionCall:
    # The scores do not change.
    return replace(call, q=call.q * (call.scale / scale)).with_spec(scale=scale)


_SINK_Q = 0.4
# Scaled score of a sink above the others': exp(-16) is 1e-7, what a kernel that skips small weights may take for nothing.
_SINK = 16.0


def _one_dim(call: AttentionCall, q: float, k: torch.Tensor) -> AttentionCall:
    """Set dim 0 of every query, and of every key [total_k], in the call."""
    queries, keys = call.q.clone(), call.k.clone()
    queries[..., 0], keys[..., 0] = q, k.to(keys)[:, None]
    return replace(call, q=queries, k=keys)


def _sink(call: AttentionCall) -> AttentionCall:
    # The first token takes nearly all of the weight, and its value is small, as in trained models (arXiv 2309.17453, 2410.10781):
    # the output is what the small weights of the other tokens give.
    first = call.cu_seqlens_k[:-1].long()
    score = torch.zeros(call.k.shape[0])
    score[first] = _SINK / (_SINK_Q * call.scale)
    values = call.v.clone()
    values[first] *= 1e-4
    return replace(_one_dim(call, _SINK_Q, score), v=values)


def _near(score: float, call: AttentionCall) -> AttentionCall:
    # All scores are raised by the same, which changes no weight.
    return _one_dim(call, 4.0, torch.full((call.k.shape[0],), score / (4.0 * call.scale)))


def _far_keys(call: AttentionCall) -> AttentionCall:
    # One dim of K is some hundred in every token, as the bias of Qwen2's key projection makes it; queries are small there.
    return _one_dim(call, 0.02, 300.0 + torch.linspace(-9, 9, call.k.shape[0]))


def _beyond_float16(call: AttentionCall) -> AttentionCall:
    # Numbers of heads 0, 2, ... are too large for float16, the others' too small, by powers of two: scores do not change.
    q_heads, kv_heads = call.q.shape[1], call.k.shape[1]
    size = torch.tensor([2.0**17, 2.0**-20], device=call.k.device).repeat(kv_heads)[:kv_heads, None]
    return replace(call, q=call.q / size.repeat_interleave(q_heads // kv_heads, 0), k=call.k * size, v=call.v * size)


# Tokens: two and a half pages of 16.
_EQUAL = 40


def _equal_first(call: AttentionCall) -> AttentionCall:
    # Sequences that share a prompt have its keys and values in common, each in its own rows here; they part within a page.
    keys, values = call.k.clone(), call.v.clone()
    starts, lens = call.cu_seqlens_k.tolist(), call.lens_k
    longest = starts[lens.index(max(lens))]
    for start, length in zip(starts, lens, strict=False):
        equal = min(length, _EQUAL)
        keys[start : start + equal], values[start : start + equal] = (
            x[longest : longest + equal] for x in (call.k, call.v)
        )
    return replace(call, k=keys, v=values)


def _ties(call: AttentionCall) -> AttentionCall:
    # Every key occurs twice in its sequence, so that two keys share each maximum, and the values of the first are zero. In every
    # second sequence, the first query is zero, and sees all keys alike.
    q, k, v = call.q.clone(), call.k.clone(), call.v.clone()
    for start, stop in pairwise(call.cu_seqlens_k.tolist()):
        pairs = (stop - start) // 2
        k[start + 1 : start + 2 * pairs : 2] = k[start : start + 2 * pairs : 2]
        v[start : min(start + 1, stop)] = 0
    for start, stop in list(pairwise(call.cu_seqlens_q.tolist()))[::2]:
        q[start : min(start + 1, stop)] = 0
    return replace(call, q=q, k=k, v=v)


# What a quarter of normal numbers are larger than.
_QUARTER = 1.15


def _on_grid(scale: float, call: AttentionCall) -> AttentionCall:
    # Numbers are 0, three quarters of them, or 1 or -1: each format with any scale holds them. Keys come in pairs of opposite ones,
    # so that K has the mean 0, which smoothing subtracts. Every third query is 0, and so averages all keys that it sees alike.
    q, k, v = (torch.where(x.abs() > _QUARTER, x.sign(), 0.0) for x in (call.q, call.k, call.v))
    for start, stop in pairwise(call.cu_seqlens_k.tolist()):
        pairs = (stop - start) // 2
        k[start + 1 : start + 2 * pairs : 2] = -k[start : start + 2 * pairs : 2]
        if (stop - start) % 2:
            k[stop - 1] = 0
    q[2::3] = 0
    return replace(call, q=q, k=k, v=v).with_spec(scale=scale, on_grid=True)


BEYOND_FP16 = ("unscaled scores above 1e5", "unscaled scores below -1e5", "scores near 95")
"""Data whose scores fp16 cannot hold before they are scaled, or only to a tenth."""
BEYOND_FLOAT16 = "beyond float16"
"""Data of bfloat16 that float16 does not hold: K and V of a kernel that casts them."""
ONE_SIGN = "large positive values"
"""Data whose weighted values add up beyond fp16 unless they are divided in time, and errors of the weights with them."""
ON_GRID, WEIGHTS_ON_GRID = "on the grid", "on the grid, weights of 0 and 1"
"""Data of kernels that declare a quantisation, which costs nothing here; the second also where weights are quantised."""

DATA: dict[str, _Change] = {
    "normal": lambda call: call,
    "peaky": lambda call: replace(
        call, q=2 * call.q, k=2 * call.k
    ),  # scores that are kept in few bits, or overflow unscaled
    "K offset": _offset,  # K smoothing that is lost, or subtracts another mean
    "K outliers": _outliers,  # one scale for dims of different sizes
    "large values": lambda call: replace(call, v=300 * call.v),  # values that saturate: beyond fp8's 448, within fp16
}
"""Data of calls of the design."""

RARE: dict[str, _Change] = {
    "other numbers": lambda call: call,  # drawn with another seed, for results that are kept by shape
    "scale 1.5 times": lambda call: call.with_spec(
        scale=1.5 * call.scale
    ),  # kernels that compute head_dim ** -0.5 themselves
    "scale 1": partial(_scale, 1.0),  # T5
    "unscaled scores": lambda call: call.with_spec(
        scale=1.0
    ),  # scores that are clipped at some 10, or kept in few bits
    "scale 1/128": partial(_scale, 1 / 128),  # Granite
    "attention sink": _sink,  # small weights that are skipped
    BEYOND_FP16[2]: partial(_near, 95.0),  # exponentials without a maximum; each partition has its own
    "K far from 0": _far_keys,  # sums of scores in 16 bits
    "equal first tokens": _equal_first,  # sequences that are told apart by their first tokens
    "equal keys and zeros": _ties,  # maxima that several keys share; rows of zeros that something is divided by
    ON_GRID: partial(_on_grid, 0.5),
    WEIGHTS_ON_GRID: partial(_on_grid, 128.0),  # the weight of a score that is 1 smaller is 0 in float32
    "scores far above 0": partial(_scaled_far, 1),  # exponentials that overflow without a maximum
    "scores far below 0": partial(_scaled_far, -1),  # a maximum that begins at 0: all weights are zero
    BEYOND_FP16[0]: partial(_unscaled_far, 1),  # unscaled scores in fp16
    BEYOND_FP16[1]: partial(_unscaled_far, -1),  # -1e4, -5e4 or -65,504 for minus infinity
    BEYOND_FLOAT16: _beyond_float16,
    # Sums that are kept in fp16, with weights that are alike.
    ONE_SIGN: lambda call: replace(call, q=call.q / 8, v=300 * call.v.abs()),
}
"""Data of calls beyond the design."""


def excluded(noise: NoiseFamily, data: str) -> str:
    """Explain why honest kernels of a family may be wrong on such data, or return an empty string if they may not.

    Sums in fp16 end at 65,504. Weights of 8 bits round alike where they are alike, and values of one sign do not cancel that: of
    27 honest matrices of ``int8_qk_fp8_pv`` one was 1 % beyond its bound (``benchmarks/honest_kernels.py --seed 501``).
    """
    if data == BEYOND_FLOAT16 and any((noise.q, noise.k, noise.v, noise.p)):
        return "numbers beyond float16 in fewer bits"
    if noise.accumulation == "fp16" and data in (*BEYOND_FP16, BEYOND_FLOAT16, ONE_SIGN):
        return "sums beyond fp16"
    rounded = noise.p is not None and FORMATS[noise.p.format].scaled
    return "values of one sign with weights of 8 bits" if rounded and data == ONE_SIGN else ""
