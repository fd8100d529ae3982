"""Makes Triton's interpreter five times as fast.

How many times as long SageAttention takes in float16 without one of the patches (CPU time, one BLAS thread):

- 2.3: NumPy multiplies float16 and int8 element by element. BLAS does it in float32: int8 exactly, float16 in another order.
- 2.0: for each ``x + y`` the interpreter recomputes all casts, splats and broadcasts. These steps are calls of its builder, and
  depend only on types, shapes and Python scalars, so they are recorded once and replayed.
- 1.8: each call of a device function patches `triton.language` again, although the launch around it has done so.
- 1.3: integers are computed again in int64 to see whether they overflow, unless Triton's option for that is off.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

_NEEDED = (
    "InterpreterBuilder", "TensorHandle", "TritonSemantic", "_LangPatchScope", "_patch_attr", "_patch_lang", "interpreter_builder",
    "interpreter_semantic", "tl",
)  # fmt: skip
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
# Members of ``triton.language`` and of its tensors whose steps do not depend on what the tensors hold, but see `_depends`.
_PLANNED = frozenset(
    (
        *(f"__{side}{name}__" for name in _OPERATORS for side in ("", "r")),
        *(f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "invert", "getitem")),
        *("add", "sub", "mul"),  # these are in the modules too, and what the tensors' own operators call
        *("arange", "broadcast_to", "cast", "dot", "expand_dims", "load", "maximum", "minimum", "store", "to", "where"),
        *("abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt"),
    )
)
# Products of int8 whose sum float32 holds exactly: 1,024 times 2**14 is 2**24.
_MOST_TERMS = 1024
# Most plans to keep. A kernel has some hundred; one whose scalars change between calls could have any number.
_MOST_PLANS = 4096


def speed_up_interpreter(interpreter: Any) -> None:
    """Replace slow functions of the module ``triton.runtime.interpreter``."""
    if not all(hasattr(interpreter, name) for name in _NEEDED):
        return
    interpreter._patch_lang = _patching_once(interpreter, interpreter._patch_lang)
    builder, patch, shared = interpreter.InterpreterBuilder, interpreter._patch_attr, interpreter.interpreter_builder
    builder.create_dot = _dot(interpreter, builder.create_dot)
    shared.options = replace(shared.options, sanitize_overflow=False)
    core = sys.modules.get("triton.language.core")  # the package is being imported, and lacks its names
    if [*inspect.signature(patch).parameters] != ["obj", "name", "member", "builder", "scope"] or core is None:
        return
    plans = _Plans(interpreter, core)

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if name in _PLANNED:
            scope.set_attr(obj, name, plans.planned(name, member))
        else:
            patch(obj, name, member, builder, scope)

    interpreter._patch_attr = patch_attr


def _patching_once(interpreter: Any, patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap `_patch_lang` to do nothing while the same modules are patched already, and to look for a function's modules once."""
    modules = {id(interpreter.tl), id(interpreter.tl.core)}
    patched: set[int] = set()
    used: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()

    def patch_once(fn: Any) -> Any:
        if fn not in used:
            used[fn] = modules & {id(value) for value in fn.__globals__.values()}
        added = used[fn] - patched
        if used[fn] and not added:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        patched.update(added)
        restore = scope.restore

        def restored() -> None:
            restore()
            patched.difference_update(added)

        scope.restore = restored
        return scope

    return patch_once


def _dot(interpreter: Any, dot: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `create_dot` to multiply float16 and int8 in float32, which BLAS does, and to round the product once."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        kinds = [operand.data.dtype for operand in (a, b, d)]
        exact = kinds == [np.int8, np.int8, np.int32] and a.data.shape[-1] <= _MOST_TERMS
        if a.data.ndim != 2 or not (exact or kinds == [np.float16] * 3):
            return dot(self, a, b, d, *options)
        product = a.data.astype(np.float32) @ b.data.astype(np.float32)
        return interpreter.TensorHandle(product.astype(kinds[2]) + d.data, d.dtype.scalar)

    return create_dot


# A plan: the values (constants are kept); for each step the number of its result, the builder's method and the numbers of its
# arguments; the number of the result's handle, or None if the next item is the result, as for a store; and the result's
# attributes. Values are numbered: first the handles of operands, then constants and results in order.
_Plan = tuple[list[Any], list[tuple[int, str, tuple[int, ...]]], int | None, Any]


class _Recorder:
    """The interpreter's builder, which records the operations on the handles of operands."""

    def __init__(self, builder: Any, operands: Sequence[Any], handle: type) -> None:
        self._builder, self._handle, self._is_whole = builder, handle, True
        self._numbers = {id(operand): number for number, operand in enumerate(operands)}
        self._values: list[Any] = [None] * len(operands)
        self._steps: list[tuple[int, str, tuple[int, ...]]] = []
        self._alive: list[Any] = []  # results, so that nothing else gets the id of one

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._builder, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            taken, made = any(isinstance(x, self._handle) for x in args), isinstance(result, self._handle)
            if kwargs or (taken and not made and result is not None):
                self._is_whole = False
            elif taken or made:
                is_step = taken or not name.startswith("get_")  # else it is a constant
                given = tuple(map(self._number, args)) if is_step else ()
                self._steps += [(len(self._values), name, given)] * is_step
                self._numbers.setdefault(id(result), len(self._values))
                self._values.append(None if is_step else result)
                self._alive.append(result)
            return result

        return noted if callable(method) else method

    def _number(self, value: Any) -> int:
        if isinstance(value, self._handle) and id(value) in self._numbers:
            return self._numbers[id(value)]
        parts = value if isinstance(value, list | tuple) else (value,)
        self._is_whole &= not any(isinstance(part, self._handle) for part in parts)  # nobody knows where it comes from
        self._values.append(value)
        return len(self._values) - 1

    def plan(self, out: Any, tensor: type[Any]) -> _Plan | None:
        """Return the plan that gives `out`, or None."""
        if not self._is_whole or not isinstance(out, tensor):
            return None
        if out.handle is None:
            return self._values, self._steps, None, out
        made = {name: value for name, value in vars(out).items() if name != "handle"}
        number = self._numbers.get(id(out.handle))
        return None if number is None else (self._values, self._steps, number, made)


class _Plans:
    """The operators of an interpreter, each with its plans by the types of its operands."""

    def __init__(self, interpreter: Any, core: Any) -> None:
        self._interpreter, self._core = interpreter, core
        self._tensor: type[Any] = core.tensor
        self._plans: dict[Any, _Plan | None] = {}
        self._types: dict[Any, int] = {}
        self.planned = cache(self._planned)

    def _planned(self, name: str, member: Any) -> Callable[..., Any]:
        """Wrap a member of this name, so that it follows plans."""
        interpreter, tensor, plans, describe = self._interpreter, self._tensor, self._plans, self._described
        new, of = object.__new__, id(member)

        def operator(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            if _semantic is not None and isinstance(_semantic.builder, _Recorder):
                return member(*args, **kwargs, _semantic=_semantic)  # part of an operator that is being planned
            semantic = interpreter.interpreter_semantic
            handles: list[Any] = []
            key: Any = (of, *[describe(argument, handles) for argument in args])
            if kwargs:
                key = key, describe(tuple(kwargs.items()), handles)
            plan = plans.get(key)
            # With one handle twice, it is not known which of them a step takes.
            if plan is None or (len(handles) > 1 and len({*map(id, handles)}) < len(handles)):
                if key in plans or len({*map(id, handles)}) < len(handles) or not _is_told(key):
                    return member(*args, **kwargs, _semantic=semantic)
                return self._first(key, name, member, args, kwargs, handles)
            constants, steps, result, made = plan
            values = handles + constants[len(handles) :]
            for number, step, places in steps:
                values[number] = getattr(semantic.builder, step)(*[values[place] for place in places])
            if result is None:
                return made
            out: Any = new(tensor)
            out.__dict__.update(made, handle=values[result])
            return out

        return operator

    def _first(self, key: Any, name: str, member: Any, args: Any, kwargs: Any, handles: list[Any]) -> Any:
        """Run a member for the first time with operands of these types, and keep its plan."""
        interpreter = self._interpreter
        recorder = _Recorder(interpreter.interpreter_semantic.builder, handles, interpreter.TensorHandle)
        out = member(*args, **kwargs, _semantic=interpreter.TritonSemantic(recorder))
        if len(self._plans) >= _MOST_PLANS:
            self._plans.clear()
        if type(out) is self._tensor:
            self._type(out)  # once for all results of the plan
        self._plans[key] = None if _depends(name, args, kwargs, self._tensor) else recorder.plan(out, self._tensor)
        return out

    def _described(self, value: Any, handles: list[Any]) -> Any:
        """Describe the parts of an argument that a plan depends on, hashable, and add its tensors' handles."""
        kind = type(value)
        if kind is self._tensor:
            attributes = value.__dict__
            handles.append(attributes["handle"])
            return attributes.get("assay_type") or self._type(value)
        if kind is int or kind is bool or kind is str:
            return kind, value
        if kind is tuple:
            return tuple([self._described(part, handles) for part in value])
        if kind is float:
            return kind, value.hex()  # 0.0 == -0.0, and NaN is not NaN
        if kind is slice:
            return kind, self._described((value.start, value.stop, value.step), handles)
        if kind is self._core.constexpr:
            return kind, self._described(value.value, handles)
        return "None" if value is None else (kind, value.name) if kind is self._core.dtype else None

    def _type(self, value: Any) -> int:
        """Return a number for the type of a tensor, which is kept with it."""
        value.assay_type = number = self._types.setdefault(str(value.type), len(self._types) + 1)
        return number


def _is_told(key: Any) -> bool:
    """Return True if nothing in a description is missing."""
    return key is not None and (not isinstance(key, tuple) or all(map(_is_told, key)))


def _depends(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: type[Any]) -> bool:
    """Return True if the steps of a load or store depend on values: of `other`, or of the mask of a pointer that is not a block."""
    names = {"load": ("pointer", "mask", "other"), "store": ("pointer", "value", "mask")}.get(name, ())
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tensors = {name for name, value in given.items() if isinstance(value, tensor)}
    is_block = "pointer" in tensors and given["pointer"].type.is_block()
    return bool(names) and ("other" in tensors or (not is_block and "mask" in tensors))
