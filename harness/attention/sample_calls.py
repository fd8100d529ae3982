"""Calls on synthetic data, for trying a kernel without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, cumulative

GRID = ((24, 0), (190, 0), (512, 0), (9, 64), (49, 46), (128, 512), (300, 1000), (1, 90))
"""Eight conditions, as (new tokens, cached prefix) of one sequence."""


def call_of(
    lens: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: str, seed: int = 0
) -> AttentionCall:
    """A call on normally distributed data. `lens` is (new tokens, cached prefix) per sequence; `heads` is (q heads, kv heads)."""
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
        scale=head_dim**-0.5,
        causal=True,
    )


def grid_of(
    layers: int,
    conditions: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: str,
) -> list[AttentionCall]:
    """A call of one sequence for each layer and condition, made by `call_of`, each with different data."""
    return [
        replace(call_of([lens], heads, head_dim, dtype, device, seed=layer * len(conditions) + i), layer=layer)
        for layer in range(layers)
        for i, lens in enumerate(conditions)
    ]
