"""Kernels with a known fault: ``--candidate faulty:one_layer`` with this folder on ``PYTHONPATH``."""

from __future__ import annotations

import torch
import torch.distributed
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.sdpa import torch_sdpa

LAYER = 13


def right(call: AttentionCall) -> Tensor:
    """PyTorch's attention."""
    return torch_sdpa(call)


def wrong_scale(call: AttentionCall) -> Tensor:
    """PyTorch's attention with a scale that is 10 % too large."""
    return torch_sdpa(call.with_spec(scale=call.scale * 1.1))


def head_lost(call: AttentionCall) -> Tensor:
    """PyTorch's attention with one head unwritten."""
    out = torch_sdpa(call)
    out[:, 1] = 0
    return out


def one_layer(call: AttentionCall) -> Tensor:
    """PyTorch's attention, a million times too large in one layer: with random weights, nothing smaller shows in the text."""
    out = torch_sdpa(call)
    return out * 1e6 if call.layer == LAYER else out


def noisy(call: AttentionCall) -> Tensor:
    """PyTorch's attention with noise of a fifth of its own size: a model loses some of its answers."""
    return _with_noise(call, 0.2)


def very_noisy(call: AttentionCall) -> Tensor:
    """The same with noise of two fifths."""
    return _with_noise(call, 0.4)


def _with_noise(call: AttentionCall, share: float) -> Tensor:
    out = torch_sdpa(call)
    generator = torch.Generator(out.device).manual_seed(out.shape[0] + 1000 * call.layer)
    noise = torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32)
    return out + (share * out.float().square().mean().sqrt() * noise).to(out.dtype)


def second_rank(call: AttentionCall) -> Tensor:
    """PyTorch's attention, 10 % too large in the heads of the second of several ranks of a server."""
    ranks, out = torch.distributed, torch_sdpa(call)
    return out * 1.1 if ranks.is_initialized() and ranks.get_rank() == 1 else out
