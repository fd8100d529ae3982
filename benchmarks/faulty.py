"""Kernels with a known fault, and a right one: ``--candidate faulty:one_layer`` with this folder on ``PYTHONPATH``."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.kernels import declares
from assay.harness.attention.sdpa import torch_sdpa
from assay.harness.bugs.faults import fault, rounded_oracle

LAYER = 13
FEATURES = ("window", "softcap", "temperature", "sinks", "stored_kv", "mla")
"""What layers of models ask for, of which the kernels below are right or wrong."""


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


@declares(features=FEATURES)
def right(call: AttentionCall) -> Tensor:
    """Attention in float64, rounded once, with whatever the call asks for."""
    return rounded_oracle(call)


@declares(features=FEATURES)
def short_window(call: AttentionCall) -> Tensor:
    """The same, with a window of one key fewer in decode."""
    window = call.spec.mask.window
    return rounded_oracle(
        call.with_spec(mask=Mask(window=window - 1)) if window > 1 and call.phase == "decode" else call
    )


@declares(features=FEATURES)
def without_window(call: AttentionCall) -> Tensor:
    """The same without the window."""
    return rounded_oracle(call.with_spec(mask=Mask()))


@declares(features=FEATURES)
def without_cap(call: AttentionCall) -> Tensor:
    """The same without the soft cap."""
    return rounded_oracle(call.with_spec(softcap=0.0))


@declares(features=FEATURES)
def without_sinks(call: AttentionCall) -> Tensor:
    """The same without the sinks."""
    return rounded_oracle(call.with_spec(sinks=()))


def _scaled(call: AttentionCall, k: str, v: str, power: int = 1) -> Tensor:
    """Attend to what is stored, multiplied by the scales of these names to a power."""
    tensors = call.tensors
    if call.stored_k is None:
        return rounded_oracle(call)
    found = {
        to: (tensors[f"stored_{to}"].float() * tensors[f"{of}_scale"] ** power).to(call.q.dtype)
        for to, of in (("k", k), ("v", v))
    }
    return rounded_oracle(replace(call, **found))


@declares(features=FEATURES)
def without_scales(call: AttentionCall) -> Tensor:
    """The same without the scales of the stored K and V."""
    return _scaled(call, "k", "v", 0)


@declares(features=FEATURES)
def scales_twice(call: AttentionCall) -> Tensor:
    """The same with both scales twice."""
    return _scaled(call, "k", "v", 2)


@declares(features=FEATURES)
def k_scale_for_v(call: AttentionCall) -> Tensor:
    """The same with V scaled by K's scale."""
    return _scaled(call, "k", "k")


@declares(features=FEATURES)
def without_rope_dims(call: AttentionCall) -> Tensor:
    """The same without the dims of latent attention that carry the position."""
    if "mla" not in call.features:
        return rounded_oracle(call)
    q = call.q.clone()
    q[..., call.v.shape[2] :] = 0
    return rounded_oracle(replace(call, q=q))


@declares(features=FEATURES)
def scale_of_576(call: AttentionCall) -> Tensor:
    """The same with the softmax scale of the dims of a latent, and not of a head's."""
    return rounded_oracle(call.with_spec(scale=576**-0.5) if "mla" in call.features else call)


@declares(features=FEATURES)
def k_scale_for_v_in_layer_1(call: AttentionCall) -> Tensor:
    """The same in layer 1 alone."""
    return k_scale_for_v(call) if call.layer == 1 else rounded_oracle(call)


@declares(features=FEATURES)
def scale_of_576_in_layer_1(call: AttentionCall) -> Tensor:
    """A latent's softmax scale in layer 1 alone."""
    return scale_of_576(call) if call.layer == 1 else rounded_oracle(call)


first_keys = declares(features=FEATURES)(fault("window-from-the-start"))
"""A right kernel, but for windows, which it counts from the first key of a sequence."""


@declares(features=FEATURES)
def steep(call: AttentionCall) -> Tensor:
    """The same with scores 5 % too large in layer 1."""
    return rounded_oracle(call.with_spec(scale=1.05 * call.scale) if call.layer == 1 else call)
