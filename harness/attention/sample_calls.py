"""Calls on synthetic data, for trying a kernel without a model."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec, cumulative

# Numbers that the calls of a matrix share: 32 MiB in float32.
_POOL = 2**23
_LATENT_HEADS = 16


def call_of(
    lens: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    pool: int | None = None,
) -> AttentionCall:
    """Make a call on normal data.

    Args:
        lens: (new tokens, cached prefix) per sequence.
        heads: (q heads, kv heads).
        head_dim: head dim of q, k and v.
        dtype: dtype of q, k and v.
        device: device of the call.
        seed: seed of the data.
        pool: seed of numbers that calls share: this call takes a slice at an offset drawn from `seed`, and must not be written
            to. Many calls then take a tenth of the time and memory. q, k and v of a call share no numbers. By default, the call
            draws new numbers.
    """
    total_q, total_k = sum(new for new, _ in lens), sum(new + prefix for new, prefix in lens)
    shapes = [
        (rows, count, head_dim) for rows, count in zip((total_q, total_k, total_k), (*heads, heads[1]), strict=True)
    ]
    sizes = [math.prod(shape) for shape in shapes]
    if pool is None or sum(sizes) >= _POOL:
        generator = torch.Generator().manual_seed(seed)
        parts = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
    else:
        start = random.Random(seed).randrange(_POOL - sum(sizes))
        parts = list(torch.split(_numbers(pool, dtype, device)[start : start + sum(sizes)], sizes))
    q, k, v = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
    of_q = cumulative((new for new, _ in lens), device)
    # Where nothing is cached, engines pass one tensor for both: every second seed does.
    shared = seed % 2 and not any(prefix for _, prefix in lens)
    of_k = of_q if shared else cumulative((new + prefix for new, prefix in lens), device)
    return AttentionCall(q, k, v, of_q, of_k, CallSpec(scale=head_dim**-0.5))


def latent_call(lens: list[tuple[int, int]], dtype: torch.dtype, device: str) -> AttentionCall:
    """Make a call of absorbed latent attention, with enough heads for the kernels that are made for it."""
    wide = call_of(lens, (_LATENT_HEADS, 1), 576, dtype, device)
    return replace(wide, v=wide.k[..., :512]).with_spec(layout="v in k", scale=192**-0.5)


@lru_cache(maxsize=4)
def _numbers(seed: int, dtype: torch.dtype, device: str) -> Tensor:
    """Draw the shared numbers of calls: in float32, then rounded."""
    if (dtype, device) != (torch.float32, "cpu"):
        return _numbers(seed, torch.float32, "cpu").to(device, dtype)
    return torch.randn(_POOL, generator=torch.Generator().manual_seed(seed))
