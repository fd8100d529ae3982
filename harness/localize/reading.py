"""Reads the weights that a kernel gives to values.

Attention is linear in V, so with one-hot values the output consists of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import oracle, sequences
from assay.harness.attention.sequence_groups import tempering

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]
_Asked = Callable[[AttentionCall], "Tensor | None"]
"""Runs a kernel: returns the output, float64 [total_q, num_q_heads, head_dim_v] on the CPU, or None if there is none."""
# Least size of an output for a relative error: far below float32's resolution of an output, but not zero.
_SMALLEST = 1e-12


@dataclass(frozen=True)
class WeightReading:
    """A kernel's weights for the values of a call, as read.

    Attributes:
        call: the call.
        rows: the packed rows of q, int64 [rows].
        weights: float64 [rows, num_q_heads, num_kv_heads, total_k]: out = sum of weights * V, plus `constant`.
        constant: the part that does not depend on V, float64 [rows, num_q_heads, head_dim_v].
        off: distance of the kernel's output on ordinary values from the one that the weights give, relative L1, float64 [rows,
            num_q_heads]. It is large if the kernel is not linear in V, or mixes the dimensions of V.
    """

    call: AttentionCall
    rows: NDArray[np.int64]
    weights: Numbers
    constant: Numbers
    off: Numbers

    @cached_property
    def scores(self) -> Numbers:
        """Scores of the rows; see `scores_of`."""
        return scores_of(self.call, self.rows)

    @cached_property
    def expected(self) -> Numbers:
        """The correct weights, in the shape of `weights`."""
        return right_weights(self.call, self.rows, self.scores)

    @cached_property
    def visible(self) -> Flags:
        """The keys that a query should see, bool [rows, total_k]."""
        return visible(self.call, self.rows)


def scores_of(call: AttentionCall, rows: NDArray[np.int64]) -> Numbers:
    """Compute the scores of some rows with every key of every kv head, capped and tempered as the call asks for.

    Returns:
        float64 [rows, num_q_heads, num_kv_heads, total_k].
    """
    q, k = call.q[torch.from_numpy(rows).to(call.q.device)].double().cpu(), call.k.double().cpu()
    products = call.scale * torch.einsum("thd,kcd->thck", q, k)
    if call.spec.softcap:
        products = call.spec.softcap * (products / call.spec.softcap).tanh()
    if call.spec.temperature:
        starts, prefixes = call.cu_seqlens_q.cpu(), torch.tensor(call.prefixes)
        of = torch.searchsorted(starts, torch.from_numpy(rows), right=True) - 1
        factor = tempering(call.spec.temperature, torch.from_numpy(rows) - starts[of] + prefixes[of])
        products = products * factor[..., None, None]
    return products.numpy()


def sinks_of(call: AttentionCall) -> Numbers | None:
    """Return the score of each q head's sink, float64 [num_q_heads, 1], or None without sinks."""
    return np.array(call.spec.sinks, dtype=np.float64)[:, None] if call.spec.sinks else None


def visible(call: AttentionCall, rows: NDArray[np.int64]) -> Flags:
    """Return flags of the packed keys that each query should see, bool [rows, total_k]."""
    seen = np.zeros((len(rows), call.k.shape[0]), bool)
    for rows_q, rows_k in sequences(call):
        here = np.flatnonzero((rows >= rows_q.start) & (rows < rows_q.stop))
        its = torch.from_numpy(rows[here] - rows_q.start)
        seen[here, rows_k] = call.spec.mask.visible(its, rows_q.stop - rows_q.start, rows_k.stop - rows_k.start)
    return seen


def softmax(scores: Numbers, seen: Flags, sinks: Numbers | None = None) -> Numbers:
    """Compute the weights of the visible keys, or zeros if no key is visible.

    `seen` broadcasts to the scores. `sinks` are scores that count only in the denominator; they broadcast to the scores except
    for their last axis, which is 1.
    """
    masked = np.where(seen, scores, -np.inf)
    top = masked.max(-1, keepdims=True, initial=-np.inf)  # a call may have no keys at all
    top = np.where(np.isfinite(top), top, 0.0) if sinks is None else np.maximum(top, sinks)
    masked -= top
    np.exp(masked, out=masked)
    total = masked.sum(-1, keepdims=True) + (0.0 if sinks is None else np.exp(sinks - top))
    masked /= np.where(total > 0, total, 1.0)
    return masked


def right_weights(call: AttentionCall, rows: NDArray[np.int64], scores: Numbers) -> Numbers:
    """Compute the correct weights, float64 in the shape of the scores."""
    heads = np.arange(call.heads.q_heads)
    own = call.heads.kv_head(heads)
    weights = np.zeros_like(scores)
    weights[:, heads, own] = softmax(scores[:, heads, own], visible(call, rows)[:, None], sinks_of(call))
    return weights


def read(ask: _Asked, call: AttentionCall, rows: Sequence[int]) -> WeightReading | None:
    """Read the weights of some queries of a call, with ceil(total_k / (head_dim_v // num_kv_heads)) + 2 calls.

    Args:
        ask: runs the kernel, or returns None.
        call: the call, whose head_dim_v is at least num_kv_heads.
        rows: packed rows of q.

    Returns:
        The weights, or None if the kernel did not answer one of the calls, or an answer is not finite.
    """
    keys, kv_heads, dim = call.v.shape
    chosen = torch.as_tensor(list(rows))
    weights = torch.zeros(len(rows), call.q.shape[1], kv_heads, keys, dtype=torch.float64)
    empty = ask(replace(call, v=torch.zeros_like(call.v)))
    if empty is None:
        return None
    # A kernel that divides by the largest value may return NaN if all values are zero, and only then.
    constant = empty[chosen] if bool(empty[chosen].isfinite().all()) else torch.zeros_like(empty[chosen])
    width = dim // kv_heads  # every kv head has codes in every probe, so that none is all zeros
    for start in range(0, keys, width):
        stop = min(start + width, keys)
        v = torch.zeros_like(call.v)
        for head in range(kv_heads):
            v[torch.arange(start, stop), head, head * width + torch.arange(stop - start)] = 1.0
        out = ask(replace(call, v=v))
        if out is None or not bool(out[chosen].isfinite().all()):
            return None
        codes = (out[chosen] - constant)[..., : kv_heads * width]
        weights[..., start:stop] = codes.reshape(*codes.shape[:-1], kv_heads, width)[..., : stop - start]
    plain = ask(call)
    if plain is None:
        return None
    given = torch.einsum("thck,kcd->thd", weights, call.v.double().cpu()) + constant
    gap, size = (given - plain[chosen]).abs().sum(-1), plain[chosen].abs().sum(-1).clamp(min=_SMALLEST)
    off = (gap / size).nan_to_num(nan=np.inf).numpy()
    return WeightReading(call, chosen.numpy(), weights.numpy(), constant.numpy(), off)


def row_errors(call: AttentionCall, out: Tensor) -> Numbers:
    """Compute the error of each query and head relative to the size of its correct output: L1, float64 [total_q, num_q_heads].

    It is infinite where the output is not finite.
    """
    right = oracle(call).cpu()
    size = right.abs().sum(-1).clamp(min=_SMALLEST)
    return ((out - right).abs().sum(-1) / size).nan_to_num(nan=np.inf, posinf=np.inf).numpy()
