"""Attention functions of packages that cast Q and weights to FP8 beside a cache in FP8, with what that costs declared.

``assay check benchmarks.beside_fp8:extend`` asks them for K and V stored in FP8 too, with their scales.

    python benchmarks/beside_fp8.py          # on a Hopper GPU with FlashAttention 3: how much of the weights it sums, by keys

There, Q and K are random and every element of V is 1, so that every output should be 1, however the weights are rounded.
"""

from __future__ import annotations

from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from assay.harness.attention.declaration import declares

_OPS = "sglang.srt.layers.attention.triton_ops" if find_spec("sglang") and not find_spec("sglang.kernels") else (
    "sglang.kernels.ops.attention"
)  # fmt: skip
PATHS = {
    "extend": f"{_OPS}.extend_attention:extend_attention_fwd",
    "decode": f"{_OPS}.decode_attention:decode_attention_fwd",
    "fa3": "sgl_kernel.flash_attn:flash_attn_varlen_func",
    "fa3_interface": "flash_attn_interface:flash_attn_varlen_func",
}


def __getattr__(name: str) -> Any:
    """Import a function of `PATHS`."""
    if name not in PATHS:
        raise AttributeError(name)
    module, _, function = PATHS[name].partition(":")
    found = getattr(import_module(module), function)
    return declares(noise="fp8_qp")(wraps(found)(partial(found)))


def main() -> None:
    """Print the mean output of FlashAttention 3 in FP8 where V is 1, by number of keys."""
    import torch

    function = import_module("sgl_kernel.flash_attn").flash_attn_varlen_func
    for keys in (128, 256, 1_024, 4_096, 16_384, 65_536):
        torch.manual_seed(0)
        q, k = (torch.randn(length, 8, 64, device="cuda").to(torch.float8_e4m3fn) for length in (64, keys))
        ends = [torch.tensor([0, length], dtype=torch.int32, device="cuda") for length in (64, keys)]
        scales = {f"{name}_descale": torch.ones(1, 8, device="cuda") for name in "qkv"}
        out = function(
            q,
            k,
            torch.ones(k.shape, device="cuda").to(k.dtype),
            *ends,
            64,
            keys,
            softmax_scale=0.125,
            causal=False,
            **scales,
        )
        out = out[0] if isinstance(out, tuple) else out
        print(f"{keys:>6,} keys: {float(out.double().mean()):.4f}")


if __name__ == "__main__":
    main()
