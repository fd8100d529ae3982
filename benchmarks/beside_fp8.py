"""Attention functions of packages that cast Q and weights to FP8 beside a cache in FP8, with what that costs declared.

``assay check benchmarks.beside_fp8:extend`` asks them for K and V stored in FP8 too, with their scales.
"""

from __future__ import annotations

from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from assay.harness.attention.kernels import declares

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
