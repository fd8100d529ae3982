"""The oracle: attention in float64, written for readability. Every other result is compared with it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec, Mask
from assay.harness.attention.sequence_groups import SequenceGroup, modified, sequence_groups, tempering

NUMBERS_AT_ONCE = 2**22
"""Most scores, or quantised keys, to hold at a time: 16 MiB of float32; about four such blocks exist at once."""
# The limit on a CPU, due to its cache: 1.6 times as fast as with 2**22.
_ON_CPU = 2**20


def sequences(call: AttentionCall) -> list[tuple[slice, slice]]:
    """Return the rows of q and the rows of k and v of each sequence of the batch."""
    q, k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    return [(slice(q[b], q[b + 1]), slice(k[b], k[b + 1])) for b in range(len(q) - 1)]


def oracle(call: AttentionCall, rows: Tensor | None = None) -> Tensor:
    """Compute attention in float64: softmax(scale * q k^T) v per sequence and head, with the features of the call.

    Args:
        call: the call.
        rows: packed query rows, int64 [rows], in increasing order, by default all that belong to a sequence.

    Returns:
        float64 [rows, num_q_heads, head_dim_v], on the call's device. A query that sees no key gives NaN.
    """

    def averaged(group: SequenceGroup, logits: Tensor, sinks: Tensor | None) -> Tensor:
        return _attend(logits, group.v[:, : logits.shape[-1]].double(), sinks)

    return _by_groups(call, rows, call.v.shape[2], averaged)


def log_sum_exp(call: AttentionCall, rows: Tensor | None = None) -> Tensor:
    """Compute the log-sum-exp of the scores of each query in float64, as `Outputs.lse` is defined.

    Args:
        call: the call.
        rows: packed query rows, int64 [rows], in increasing order, by default all.

    Returns:
        float64 [rows, num_q_heads], on the call's device; -inf for a query that sees no key.
    """

    def summed(group: SequenceGroup, logits: Tensor, sinks: Tensor | None) -> Tensor:
        return _with_sink(logits, sinks).logsumexp(-1, keepdim=True)

    return _by_groups(call, rows, 1, summed)[..., 0]


def _by_groups(
    call: AttentionCall,
    rows: Tensor | None,
    width: int,
    reduced: Callable[[SequenceGroup, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Reduce the scores [heads, rows, keys] of each group, and its sinks, to some numbers: float64 [rows, num_q_heads, width]."""
    asked = call.rows if rows is None else len(rows)
    result = torch.empty(asked, call.q.shape[1], width, dtype=torch.float64, device=call.q.device)
    numbers = numbers_at_once(call.q.device)
    for group in sequence_groups(call, rows, numbers // 4):
        k, outs = group.k.double(), []
        for some, seen in group.blocks(numbers):
            products = call.scale * group.queries(group.q, some).double() @ k[:, : seen.shape[-1]].transpose(-2, -1)
            logits = group.modified(products, seen, some)
            outs.append(group.rows_first(reduced(group, logits, group.of_heads(call.spec.sinks, some))))
        group.put(outs, result)
    return result


# The fields of a call that does not ask for a feature. Unlisted ones, such as a layout, apply to every call.
_WITHOUT: dict[str, dict[str, Any]] = {
    "window": {"mask": Mask()}, "softcap": {"softcap": 0.0}, "temperature": {"temperature": 0}, "sinks": {"sinks": ()},
}  # fmt: skip


def feature_effects(call: AttentionCall, rows: Tensor, right: Tensor, known: Collection[str] = ()) -> dict[str, Tensor]:
    """Compute the change of queries' outputs by each feature that a call asks for, except `known` ones.

    Args:
        call: the call.
        rows: packed query rows, int64 [rows], in increasing order.
        right: their output from `oracle`.
        known: features to skip.

    Returns:
        Feature -> output with it minus output without, float64 [rows, num_q_heads, head_dim_v]; 0 where that is undefined.
    """
    window, most = call.spec.mask.window, max(call.lens_k)
    return {
        name: torch.zeros_like(right)
        if name == "window" and window >= most
        else (right - oracle(call.with_spec(**_WITHOUT[name]), rows)).nan_to_num()
        for name in call.spec.features
        if name in _WITHOUT and name not in known
    }


def numbers_at_once(device: torch.device) -> int:
    """Return the most scores, or quantised keys, to hold at a time on a device."""
    return min(NUMBERS_AT_ONCE, _ON_CPU) if device.type == "cpu" else NUMBERS_AT_ONCE


def _attend(logits: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Average v [heads, keys, head_dim_v] by the softmax of scores [heads, rows, keys], with optional sinks [heads, rows]."""
    if sinks is None:
        return logits.softmax(-1) @ v if logits.shape[-1] else v.new_full((*logits.shape[:-1], v.shape[-1]), torch.nan)
    return _with_sink(logits, sinks).softmax(-1)[..., :-1] @ v


def _with_sink(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Append the score of a sink to the scores of each query, if there is one."""
    if sinks is None:
        return logits
    return torch.cat([logits, sinks.to(logits.dtype).expand(logits.shape[:-1])[..., None]], -1)


@dataclass(frozen=True)
class Request:
    """One sequence of a call in float64, heads first. A hypothesis changes one thing in it.

    Attributes:
        q: [num_q_heads, len_q, head_dim].
        k: [num_kv_heads, len_k, head_dim].
        v: [num_kv_heads, len_k, head_dim_v].
        kv_head: int64 [num_q_heads], the kv head that each q head reads.
        visible: bool [len_q, len_k], the keys that each query sees.
        scale: softmax scale, natural-exponent convention.
        mask: the mask of the call, from which `visible` is made.
        spec: the call's request beyond scale and mask.
        asked: int64 [asked], the queries whose output is wanted, by default all. A bug may depend on the others.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    kv_head: Tensor
    visible: Tensor
    scale: float
    mask: Mask
    spec: CallSpec
    asked: Tensor | None = None

    @property
    def asked_q(self) -> Tensor:
        """The queries whose output is wanted, [num_q_heads, asked, head_dim]."""
        return self.q if self.asked is None else self.q[:, self.asked]

    @property
    def asked_visible(self) -> Tensor:
        """The keys that they see, bool [asked, len_k]."""
        return self.visible if self.asked is None else self.visible[self.asked]

    @property
    def len_q(self) -> int:
        """New tokens."""
        return self.q.shape[1]

    @property
    def len_k(self) -> int:
        """All tokens: cached prefix and new tokens."""
        return self.k.shape[1]

    @property
    def prefix(self) -> int:
        """Cached prefix, in tokens."""
        return self.len_k - self.len_q


def requests(call: AttentionCall, rows: Tensor | None = None) -> list[Request]:
    """List the sequences of a call, one by one.

    Args:
        call: the call.
        rows: packed query rows whose output is wanted, int64, by default all.
    """
    device = call.q.device
    kv_head = call.heads.kv_head(torch.arange(call.heads.q_heads, device=device))
    requests: list[Request] = []
    for rows_q, rows_k in sequences(call):
        q, k, v = (t.double().transpose(0, 1) for t in (call.q[rows_q], call.k[rows_k], call.v[rows_k]))
        visible = call.spec.mask.visible(torch.arange(q.shape[1], device=device), q.shape[1], k.shape[1])
        asked = None if rows is None else rows[(rows >= rows_q.start) & (rows < rows_q.stop)] - rows_q.start
        requests.append(Request(q, k, v, kv_head, visible, call.scale, call.spec.mask, call.spec, asked))
    return requests


def scores(request: Request) -> Tensor:
    """Compute scale * q k^T, capped and tempered, with -inf where a key is not seen, [num_q_heads, asked, len_k]."""
    products = _of_kv_heads(request.scale * request.asked_q, request.k.transpose(-2, -1), request.kv_head)
    return modified(products, request.asked_visible, request.spec.softcap, factor_of(request))


def factor_of(request: Request) -> Tensor | None:
    """Return the factor of the scores of a sequence, [1, asked, 1], or None."""
    if not request.spec.temperature:
        return None
    rows = torch.arange(request.len_q, device=request.q.device) if request.asked is None else request.asked
    return tempering(request.spec.temperature, (rows + request.prefix)[None])


def attend(request: Request, logits: Tensor | None = None) -> Tensor:
    """Compute the attention of one sequence, [num_q_heads, asked, head_dim_v]. A query that sees no key gives NaN.

    Args:
        request: the sequence: a mask, a head map and a dtype of any kind.
        logits: scores to use instead of `scores`, in the same shape.
    """
    numbers, of = request.spec.sinks, request.q
    sinks = torch.tensor(numbers, dtype=of.dtype, device=of.device)[:, None] if numbers else None
    logits = scores(request) if logits is None else logits
    if not logits.shape[-1] or sinks is not None:
        return _attend(logits, request.v[request.kv_head], sinks)
    return _of_kv_heads(logits.softmax(-1), request.v, request.kv_head)


def _of_kv_heads(of_q: Tensor, of_kv: Tensor, kv_head: Tensor) -> Tensor:
    """Multiply [num_q_heads, rows, n] by the [num_kv_heads, n, m] of the kv head that each q head reads."""
    heads, group = len(of_kv), len(of_q) // len(of_kv)
    if not torch.equal(kv_head, torch.arange(heads, device=kv_head.device).repeat_interleave(group)):
        return of_q @ of_kv[kv_head]
    # Of the usual heads no K and V are copied: a call with the 128 heads of DeepSeek takes a 16th of the time.
    return (of_q.reshape(heads, -1, of_q.shape[-1]) @ of_kv).view(*of_q.shape[:2], of_kv.shape[-1])
