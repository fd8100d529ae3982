"""Triton's interpreter, made about 5 times as fast, with the same bits.

An interpreted kernel spends most of its time in Python. Six things can be left out, or done once, or by BLAS:

- Every sum and product of integers, mostly addresses, is computed again in int64 to see whether it overflows. Compiled kernels
  do not check that either.
- Every call of a device function patches `triton.language` again, although the launch around it has done so already.
- NumPy multiplies matrices of integers and of float16 in plain loops. Products of int8 are exact in float32 up to 1,040 terms,
  so BLAS may add them in any order. A float16 sum is kept in float32 and rounded once; here it is added in the same order.
- The table of NumPy's dtypes is built anew at each lookup.
- What follows from the shape of a block is computed anew for each tensor.
- What an operator does follows from the types of its operands, and is worked out anew each time: `interpreter_plans`.

`tests/harness/attention/test_interpreter_speed.py` compares the bits, `benchmarks/interpreter_speed.py` the times.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from assay.harness.attention.interpreter_plans import plan_operators

MAX_EXACT_INT8_TERMS = 2**24 // 127**2
"""Most products of two int8 in -127 to 127 whose sum is exact in float32."""
_NEEDED = (
    "InterpreterBuilder",
    "TensorHandle",
    "_LangPatchScope",
    "_get_np_dtype",
    "_patch_attr",
    "_patch_builtin",
    "_patch_lang",
    "interpreter_builder",
    "tl",
)


def speed_up_interpreter(interpreter: Any) -> None:
    """Replace what is slow. An interpreter of another form is left as it is: slower, but right."""
    if not all(hasattr(interpreter, name) for name in _NEEDED):
        return
    interpreter._patch_lang = _patching_once(interpreter, interpreter._patch_lang)
    interpreter._get_np_dtype = _np_dtypes(interpreter)
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _dot(interpreter, builder.create_dot)
    _remember_shapes(interpreter.tl)
    plan_operators(interpreter)
    if [*inspect.signature(interpreter._patch_builtin).parameters] == ["pkg", "builder", "scope"]:
        interpreter._patch_builtin = _patching_known(interpreter)
    shared = interpreter.interpreter_builder
    shared.options = replace(shared.options, sanitize_overflow=False)


def _remember_shapes(tl: Any) -> None:
    """Have types of blocks, and tensors, take what follows from a shape from a table: a kernel has few shapes and many tensors.

    A triton.language of another form is left as it is.
    """
    core = sys.modules.get("triton.language.core")
    if core is None or any(not hasattr(core, name) for name in ("block_type", "tensor", "constexpr", "tuple")):
        return
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    if [*inspect.signature(make_tensor).parameters] != ["self", "handle", "type"]:
        return
    types: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    constexpr = core.constexpr

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if isinstance(shape, constexpr):
            shape = shape.value
        key = tuple(extent.value if isinstance(extent, constexpr) else extent for extent in shape)
        known = types.get(key)
        if known is None:
            make_type(self, element_ty, shape)
            types[key] = (self.shape, self.numel, str(self.shape))
            return
        self.element_ty = element_ty
        self.shape, self.numel, name = known
        self.name = f"<{name}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        known = shapes.get(key)
        if known is None:
            make_tensor(self, handle, type)
            shapes[key] = (self.numel, self.shape)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _patching_once(interpreter: Any, patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap `_patch_lang` to do nothing while the same modules are patched already, and to look for a function's modules once."""
    tl = interpreter.tl
    patched: set[int] = set()
    used: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()

    def patch_once(fn: Any) -> Any:
        modules_used = used.get(fn)
        if modules_used is None:
            modules = (value for value in fn.__globals__.values() if isinstance(value, ModuleType))
            modules_used = used[fn] = {id(module) for module in modules if module in (tl, tl.core)}
        if modules_used and modules_used <= patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        added = modules_used - patched
        patched.update(added)
        restore = scope.restore

        def restored() -> None:
            restore()
            patched.difference_update(added)

        scope.restore = restored
        return scope

    return patch_once


def _patching_known(interpreter: Any) -> Callable[[Any, Any, Any], None]:
    """Wrap `_patch_builtin` to look for the members of a module or class once."""
    members: dict[int, tuple[Any, list[tuple[str, Any]]]] = {}

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        known = members.get(id(pkg))
        if known is None:
            is_builtin = interpreter.tl.core.is_builtin
            own = [(name, member) for name, member in inspect.getmembers(pkg) if is_builtin(member)]
            known = members[id(pkg)] = pkg, own
        for name, member in known[1]:
            interpreter._patch_attr(pkg, name, member, builder, scope)

    return patch_builtin


def _np_dtypes(interpreter: Any) -> Callable[[Any], Any]:
    """Wrap `_get_np_dtype` to remember the dtype of each scalar type by its name."""
    tl, lookup = interpreter.tl, interpreter._get_np_dtype
    pointer: Any = np.dtype(np.uint64)
    known: dict[str, Any] = {}

    def np_dtype(tt_dtype: Any) -> Any:
        scalar = tt_dtype.element_ty if isinstance(tt_dtype, tl.block_type) else tt_dtype
        if isinstance(scalar, tl.pointer_type):
            return pointer
        name = scalar.name
        if name not in known:
            known[name] = lookup(scalar)
        return known[name]

    return np_dtype


def _dot(interpreter: Any, dot: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `create_dot`, with BLAS for int8 and vectorised sums for float16."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        x, y, start = a.data, b.data, d.data
        if x.ndim != 2 or x.dtype != y.dtype:
            return dot(self, a, b, d, *options)
        if x.dtype == np.int8 and start.dtype == np.int32 and _is_exact(x, y):
            product: NDArray[Any] = (x.astype(np.float32) @ y.astype(np.float32)).astype(np.int32)
        elif x.dtype == np.float16 and start.dtype == np.float16:
            product = _float16_product(x, y)
        else:
            return dot(self, a, b, d, *options)
        return interpreter.TensorHandle(product + start, d.dtype.scalar)

    return create_dot


def _is_exact(x: NDArray[Any], y: NDArray[Any]) -> bool:
    """Return True if float32 holds every partial sum of x @ y: -128, which quantised values avoid, would allow fewer terms."""
    return x.shape[1] <= MAX_EXACT_INT8_TERMS and int(x.min(initial=0)) > -128 and int(y.min(initial=0)) > -128


def _float16_product(x: NDArray[Any], y: NDArray[Any]) -> NDArray[Any]:
    """Compute x @ y as NumPy does for float16: exact products, summed in float32 one after the other, rounded once."""
    columns, rows = np.ascontiguousarray(x.T, np.float32), y.astype(np.float32)
    total = np.zeros((x.shape[0], y.shape[1]), np.float32)
    term = np.empty_like(total)
    for column, row in zip(columns, rows, strict=True):
        np.multiply(column[:, None], row, out=term)
        total += term
    return total.astype(np.float16)
