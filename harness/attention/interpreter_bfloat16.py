"""Triton's interpreter, kept from computing bfloat16 wrongly: a kernel that asks for that is refused, with the reason.

The interpreter holds bfloat16 as the integers of its bits. Loads, stores and conversions know that; the interpreters of Triton 3.8
and 3.9 multiply and add the bits as integers, so that a right kernel is off by 1e10. Whether that is so is tried once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from assay.harness.attention.call import KernelRefused

BFLOAT16_BROKEN = "Triton's interpreter computes bfloat16 wrongly in this version; a GPU covers it"
"""Why a call in bfloat16 was refused."""
_ONE, _TWO = 0x3F80, 0x4000
"""The bits of 1 and of 2 in bfloat16."""
_TERMS = 16


def refuse_broken_bfloat16(interpreter: Any) -> None:
    """Have the interpreter refuse what it computes wrongly. An interpreter of another form is left as it is."""
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
    except Exception:  # what cannot be computed is not right either
        return False


def _product_is_right(interpreter: Any, binary: Callable[..., Any]) -> bool:
    """Return True if 2 times 1 is 2."""
    a, b = (interpreter.TensorHandle(np.full(1, bits, np.uint16), interpreter.tl.bfloat16) for bits in (_TWO, _ONE))
    try:
        return bool((binary(interpreter.interpreter_builder, a, b, np.multiply).data == _TWO).all())
    except Exception:  # as above
        return False
