"""Attention through PyTorch's fused kernels, one sequence at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from assay import AttentionCall, KernelRefused, declares


@declares(package="fastattn", about="scaled_dot_product_attention, sequence by sequence")
def forward(call: AttentionCall) -> Tensor:
    """Attention of a packed batch.

    Args:
        call: q [total_q, heads, head_dim], k and v [total_k, kv heads, head_dim]; see `assay.AttentionCall`.

    Returns:
        [total_q, heads, head_dim_v], in the dtype of q.

    Raises:
        KernelRefused: The call is not causal.
    """
    if not call.causal:
        raise KernelRefused("fastattn computes causal attention only")
    rows_q, rows_k = (pairwise(edges.tolist()) for edges in (call.cu_seqlens_q, call.cu_seqlens_k))
    outs = []
    for (q0, q1), (k0, k1) in zip(rows_q, rows_k, strict=True):
        len_q, len_k = q1 - q0, k1 - k0
        # Aligned right: with a cached prefix, the first new token sees the whole prefix and itself.
        mask = torch.ones(len_q, len_k, dtype=torch.bool, device=call.q.device).tril(len_k - len_q)
        q, k, v = (t.transpose(0, 1)[None] for t in (call.q[q0:q1], call.k[k0:k1], call.v[k0:k1]))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
