"""The oracle: attention in float64, written for readability. Every other result is compared with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall


def sequences(call: AttentionCall) -> list[tuple[slice, slice]]:
    """Rows of q and rows of k and v, for each sequence of the batch."""
    q, k = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    return [(slice(q[b], q[b + 1]), slice(k[b], k[b + 1])) for b in range(len(q) - 1)]


def right_aligned(len_q: int, len_k: int, device: torch.device) -> Tensor:
    """The causal mask, bool [len_q, len_k]: query i sees keys j <= i + (len_k - len_q)."""
    return torch.ones(len_q, len_k, dtype=torch.bool, device=device).tril(len_k - len_q)


SCORES_BYTES = 2**30
"""Most bytes of scores at a time. Queries are processed in blocks, since the scores of a long prompt would not fit into memory."""


def oracle(call: AttentionCall) -> Tensor:
    """Attention of a call: softmax(scale * q k^T) v per sequence and head, float64 [total_q, num_q_heads, head_dim_v]."""
    heads, groups = call.q.shape[1], call.q.shape[1] // call.k.shape[1]
    out = torch.empty(*call.q.shape[:2], call.v.shape[2], dtype=torch.float64, device=call.q.device)
    for rows_q, rows_k in sequences(call):
        k = call.k[rows_k].double().transpose(0, 1).repeat_interleave(groups, 0)
        v = call.v[rows_k].double().transpose(0, 1).repeat_interleave(groups, 0)
        visible = right_aligned(rows_q.stop - rows_q.start, k.shape[1], k.device)
        at_once = max(1, SCORES_BYTES // (8 * heads * max(1, k.shape[1])))
        for start in range(rows_q.start, rows_q.stop, at_once):
            rows = slice(start, min(start + at_once, rows_q.stop))
            scores = call.scale * call.q[rows].double().transpose(0, 1) @ k.transpose(1, 2)
            if call.causal:
                seen = visible[rows.start - rows_q.start : rows.stop - rows_q.start]
                scores = scores.masked_fill(~seen, float("-inf"))
            out[rows] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out


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
        causal: whether `visible` is the right-aligned causal mask.
        asked: int64 [asked], the queries whose output is asked for; None for all. A bug may depend on the others.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    kv_head: Tensor
    visible: Tensor
    scale: float
    causal: bool
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
    """The sequences of a call, one by one, in float64.

    Args:
        call: the call.
        rows: packed query rows whose output is asked for, int64; None for all.
    """
    device, heads, kv_heads = call.q.device, call.q.shape[1], call.k.shape[1]
    kv_head = torch.arange(heads, device=device) // (heads // kv_heads)
    found = []
    for rows_q, rows_k in sequences(call):
        q, k, v = (t.double().transpose(0, 1) for t in (call.q[rows_q], call.k[rows_k], call.v[rows_k]))
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=device)
        if call.causal:
            visible = right_aligned(q.shape[1], k.shape[1], device)
        asked = None if rows is None else rows[(rows >= rows_q.start) & (rows < rows_q.stop)] - rows_q.start
        found.append(Request(q, k, v, kv_head, visible, call.scale, call.causal, asked))
    return found


def scores(request: Request) -> Tensor:
    """scale * q k^T, with -inf where a query does not see a key, float64 [num_q_heads, asked, len_k]."""
    products = request.scale * request.asked_q @ request.k[request.kv_head].transpose(1, 2)
    return products.masked_fill_(~request.asked_visible, float("-inf"))


def attend(request: Request) -> Tensor:
    """Attention of one sequence, float64 [num_q_heads, asked, head_dim_v]. A query that sees no key gives NaN."""
    return scores(request).softmax(-1) @ request.v[request.kv_head]
