"""Adapts Triton's interpreter for machines without a GPU: corrects it where it differs from a GPU, or makes it refuse."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.harness.attention.call import KernelRefused
from assay.harness.attention.interpreter_bounds import check_bounds
from assay.harness.attention.interpreter_speed import speed_up_interpreter

_MODULE = "triton.runtime.interpreter"
# PyTorch's names of Triton's dtypes.
_FP8 = {"fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2"}
BFLOAT16_BROKEN = "Triton's interpreter computes bfloat16 wrongly in this version; a GPU covers it"
"""Why a call in bfloat16 was refused."""
# The bits of 1 and of 2 in bfloat16.
_ONE, _TWO = 0x3F80, 0x4000
_TERMS = 16


def interpret_without_gpu() -> None:
    """Interpret Triton kernels if there is no GPU. Call this before importing a kernel: Triton decides on import."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        for change in (_round_to_nearest, speed_up_interpreter, check_bounds, _refuse_broken_bfloat16):
            if _MODULE in sys.modules:
                _change(change, sys.modules[_MODULE])
            elif not any(isinstance(finder, _Finder) and finder.change is change for finder in sys.meta_path):
                sys.meta_path.insert(0, _Finder(change))


def _change(change: Callable[[Any], None], interpreter: ModuleType) -> None:
    """Change the interpreter's module, once."""
    done = vars(interpreter).setdefault("assay_changes", [])
    if change not in done:
        done.append(change)
        change(interpreter)


class _Finder(MetaPathFinder):
    """Finds the interpreter as usual, and changes it once it is imported."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                _change(self.change, module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


def _round_to_nearest(interpreter: Any) -> None:
    """Have the interpreter round to bfloat16 and FP8 as compiled kernels do: to the nearest number, ties to even.

    The interpreter of Triton 3.9 truncates the lower 16 bits of float32, which makes every number smaller, by 0.3 % on average.
    An interpreted kernel would seem to scale its output, and would have more error than bfloat16 explains. In FP8 it halves
    numbers that round up to a power of two, and truncates small ones. An unknown interpreter stays unchanged.
    """
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


def _refuse_broken_bfloat16(interpreter: Any) -> None:
    """Have the interpreter refuse operations that it computes wrongly in bfloat16, with the reason.

    The interpreter holds bfloat16 as the integers of its bits. Loads, stores and conversions know that; the interpreters of Triton
    3.8 and 3.9 multiply and add the bits as integers, so that a correct kernel is off by 1e10. One trial decides. An unknown
    interpreter stays unchanged.
    """
    builder = getattr(interpreter, "InterpreterBuilder", None)
    for name, right in (("create_dot", _dot_is_right), ("binary_op", _product_is_right)):
        if hasattr(builder, name):
            setattr(builder, name, _refusing(interpreter, getattr(builder, name), right))


def _refusing(
    interpreter: Any, operation: Callable[..., Any], right: Callable[[Any, Callable[..., Any]], bool]
) -> Callable[..., Any]:
    @cache
    def is_right() -> bool:
        return right(interpreter, operation)

    def guarded(self: Any, a: Any, b: Any, *more: Any) -> Any:
        if "bf16" in (a.dtype.scalar.name, b.dtype.scalar.name) and not is_right():
            raise KernelRefused(BFLOAT16_BROKEN)
        return operation(self, a, b, *more)

    return guarded


def _dot_is_right(interpreter: Any, dot: Callable[..., Any]) -> bool:
    """Return True if each element of a product of two matrices of ones equals the number of its terms."""
    ones = np.full((_TERMS, _TERMS), _ONE, np.uint16)
    a, b = (interpreter.TensorHandle(ones.copy(), interpreter.tl.bfloat16) for _ in range(2))
    start = interpreter.TensorHandle(np.zeros((_TERMS, _TERMS), np.float32), interpreter.tl.float32)
    try:
        return bool((dot(interpreter.interpreter_builder, a, b, start, None, 0).data == _TERMS).all())
    except Exception:  # an error is not a correct result either
        return False


def _product_is_right(interpreter: Any, binary: Callable[..., Any]) -> bool:
    """Return True if 2 times 1 is 2."""
    a, b = (interpreter.TensorHandle(np.full(1, bits, np.uint16), interpreter.tl.bfloat16) for bits in (_TWO, _ONE))
    try:
        return bool((binary(interpreter.interpreter_builder, a, b, np.multiply).data == _TWO).all())
    except Exception:  # as above
        return False
