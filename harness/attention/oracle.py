"""The oracle: attention in float64, written for readability. Every other result is compared with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.sequence_groups import sequence_groups

NUMBERS_AT_ONCE = 2**22
"""Most scores, or quantised keys, that are held at a time: 16 MiB of float32, of which about four exist at once."""
_ON_CPU = 2**20
"""The same on a CPU, whose cache holds no more: 1.6 times as fast as with 2**22."""


_FEW, _SMALL = 4, 2**19
"""Sequences and scores of a call up to which it costs less to compute them one by one than to group them."""


def sequences(call: AttentionCall) -> list[tuple[slice, slice]]:
    """Return the rows of q and the rows of k and v of each sequence of the batch."""
    q, k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    return [(slice(q[b], q[b + 1]), slice(k[b], k[b + 1])) for b in range(len(q) - 1)]


def oracle(call: AttentionCall, rows: Tensor | None = None) -> Tensor:
    """Compute attention in float64: softmax(scale * q k^T) v per sequence and head.

    Args:
        call: the call.
        rows: packed query rows, int64 [rows], in increasing order; None for all.

    Returns:
        float64 [rows, num_q_heads, head_dim_v], on the call's device. A query that sees no key gives NaN.

    Raises:
        ValueError: the call asks for a feature that is not computed.
    """
    if call.spec.features:
        raise ValueError(
            f"the oracle does not compute {', '.join(call.spec.features)}; expected a call without features"
        )
    if rows is None and len(call.lens_q) <= _FEW and call.q.shape[0] * call.k.shape[0] * call.heads.q_heads <= _SMALL:
        return torch.cat([attend(request) for request in requests(call)], dim=1).transpose(0, 1)
    asked = call.q.shape[0] if rows is None else len(rows)
    result = torch.zeros(asked, call.q.shape[1], call.v.shape[2], dtype=torch.float64, device=call.q.device)
    numbers = numbers_at_once(call.q.device)
    for group in sequence_groups(call, rows, numbers // 4):
        k, v = group.k.double(), group.v.double()
        outs = []
        for some, seen in group.blocks(numbers):
            keys = seen.shape[-1]
            logits = _scores(group.queries(group.q, some).double(), k[:, :keys], seen, call.scale)
            outs.append(group.rows_first(_attend(logits, v[:, :keys])))
        group.put(outs, result)
    return result


def numbers_at_once(device: torch.device) -> int:
    """Return the most scores, or quantised keys, that are held at a time on a device."""
    return min(NUMBERS_AT_ONCE, _ON_CPU) if device.type == "cpu" else NUMBERS_AT_ONCE


def _scores(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    return (scale * q @ k.transpose(-2, -1)).masked_fill_(~visible, float("-inf"))


def _attend(logits: Tensor, v: Tensor) -> Tensor:
    return logits.softmax(-1) @ v


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
        mask: the mask of the call, of which `visible` is made.
        asked: int64 [asked], the queries whose output is asked for; None for all. A bug may depend on the others.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    kv_head: Tensor
    visible: Tensor
    scale: float
    mask: Mask
    asked: Tensor | None = None

    @property
    def asked_q(self) -> Tensor:
        """The queries that are asked for, [num_q_heads, asked, head_dim]."""
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
        rows: packed query rows whose output is asked for, int64; None for all.
    """
    device = call.q.device
    kv_head = call.heads.kv_head(torch.arange(call.heads.q_heads, device=device))
    found = []
    for rows_q, rows_k in sequences(call):
        q, k, v = (t.double().transpose(0, 1) for t in (call.q[rows_q], call.k[rows_k], call.v[rows_k]))
        visible = call.spec.mask.visible(torch.arange(q.shape[1], device=device), q.shape[1], k.shape[1])
        asked = None if rows is None else rows[(rows >= rows_q.start) & (rows < rows_q.stop)] - rows_q.start
        found.append(Request(q, k, v, kv_head, visible, call.scale, call.spec.mask, asked))
    return found


def scores(request: Request) -> Tensor:
    """Compute scale * q k^T, with -inf where a query does not see a key, [num_q_heads, asked, len_k]."""
    return _scores(request.asked_q, request.k[request.kv_head], request.asked_visible, request.scale)


def attend(request: Request, logits: Tensor | None = None) -> Tensor:
    """Compute the attention of one sequence, [num_q_heads, asked, head_dim_v]. A query that sees no key gives NaN.

    Args:
        request: the sequence: a mask, a head map and a dtype of any kind.
        logits: scores in place of `scores`, in the same shape; None for these.
    """
    return _attend(scores(request) if logits is None else logits, request.v[request.kv_head])
