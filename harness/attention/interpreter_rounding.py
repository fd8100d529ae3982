"""Triton's interpreter, made to round to bfloat16 and FP8 as compiled kernels do: to the nearest number, ties to even.

The interpreter of Triton 3.9 cuts the lower 16 bits of float32 off, which makes every number smaller, by 0.3 % on average. An
interpreted kernel would seem to scale its output, and would have more error than bfloat16 explains. In FP8 it halves what rounds up
to a power of two, and cuts small numbers off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FP8 = {"fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2"}
"""PyTorch's names of Triton's dtypes."""


def round_to_nearest(interpreter: Any) -> None:
    """Have the interpreter round. An interpreter of another form is left as it is."""
    if hasattr(interpreter, "_convert_float"):
        interpreter._convert_float = _nearest(interpreter, interpreter._convert_float)


def _nearest(interpreter: Any, convert: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_convert_float` to round to bfloat16 and FP8 unless it is asked to round towards zero."""
    tl, towards_zero = interpreter.tl, interpreter._ir.ROUNDING_MODE.RTZ

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16 and rounding != towards_zero:
            return _bfloat16_bits(np.asarray(data))
        if target.name in _FP8 and source in (tl.float32, tl.float16, tl.bfloat16) and rounding != towards_zero:
            floats = np.float16 if source == tl.float16 else np.float32
            bits = np.asarray(data).astype(np.uint32) << 16 if source == tl.bfloat16 else np.asarray(data)
            return _fp8_bits(bits.view(floats), _FP8[target.name])
        return convert(data, source, target, rounding)

    return convert_float


def _bfloat16_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Compute the bits of the bfloat16 numbers that are nearest to x, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)  # carries into the exponent, up to infinity
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded >> 16).astype(np.uint16).reshape(np.shape(x))


def _fp8_bits(x: NDArray[np.floating[Any]], dtype: str) -> NDArray[np.uint8]:
    """Compute the bits of the numbers of a dtype of PyTorch that are nearest to x: of the largest one beyond that, as on a GPU."""
    import torch

    of, numbers = getattr(torch, dtype), torch.from_numpy(np.ascontiguousarray(x, np.float32))
    bits: NDArray[np.uint8] = numbers.clamp(-torch.finfo(of).max, torch.finfo(of).max).to(of).view(torch.uint8).numpy()
    return bits.reshape(np.shape(x))
