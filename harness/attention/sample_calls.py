"""Calls on synthetic data, for trying a kernel without a model."""

from __future__ import annotations

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec, cumulative


def call_of(
    lens: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: str, seed: int = 0
) -> AttentionCall:
    """Make a call on normal data. `lens` is (new tokens, cached prefix) per sequence; `heads` is (q heads, kv heads)."""
    generator = torch.Generator().manual_seed(seed)
    total_q, total_k = sum(new for new, _ in lens), sum(new + prefix for new, prefix in lens)

    def normal(rows: int, count: int) -> Tensor:
        return torch.randn(rows, count, head_dim, generator=generator).to(device, dtype)

    return AttentionCall(
        q=normal(total_q, heads[0]),
        k=normal(total_k, heads[1]),
        v=normal(total_k, heads[1]),
        cu_seqlens_q=cumulative((new for new, _ in lens), device),
        cu_seqlens_k=cumulative((new + prefix for new, prefix in lens), device),
        spec=CallSpec(scale=head_dim**-0.5),
    )
