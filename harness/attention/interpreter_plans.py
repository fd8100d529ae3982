"""Operators of Triton's interpreter, planned once: which steps one takes follows from the types of its operands.

For each `x + y` the interpreter works out anew what is cast, splatted and broadcast to what, which takes ten times as long as the
arithmetic. The steps are calls of the interpreter's builder, and they depend only on types, shapes and Python scalars. So an
operator is run once with a builder that notes them; from then on, the same calls of the same builder are made without the rest.
What an operator does besides, or what it does with a value that is neither an operand nor the result of a step, cannot be planned,
and is left to the interpreter.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NEEDED = ("TensorHandle", "TritonSemantic", "_patch_attr", "interpreter_semantic")
_NEEDED_TYPES = ("constexpr", "dtype", "pointer_type", "tensor")
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
_PLANNED = frozenset(
    (
        *(f"__{side}{name}__" for name in _OPERATORS for side in ("", "r")),
        *(f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "invert", "getitem")),
        *("add", "sub", "mul"),  # these are in the modules too, and what the tensors' own operators call
        *("arange", "broadcast_to", "cast", "dot", "expand_dims", "load", "maximum", "minimum", "store", "to", "where"),
        *("abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt"),
    )
)
"""Members of ``triton.language`` and of its tensors whose steps do not depend on what the tensors hold, but see `_depends`."""
_MEMORY = {"load": ("pointer", "mask", "other"), "store": ("pointer", "value", "mask")}
_MOST_PLANS = 4096
"""Plans that are kept. A kernel has some hundred; one whose scalars differ from call to call could have any number."""


def plan_operators(interpreter: Any) -> None:
    """Have the interpreter follow plans. One of another form is left as it is: slower, but right."""
    core = sys.modules.get("triton.language.core")  # the package is being imported, and lacks its names
    if not all(hasattr(interpreter, name) for name in _NEEDED) or not all(
        hasattr(core, needed_type) for needed_type in _NEEDED_TYPES
    ):
        return
    patch = interpreter._patch_attr
    if [*inspect.signature(patch).parameters] != ["obj", "name", "member", "builder", "scope"]:
        return
    plans = _Plans(interpreter, core)

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if name in _PLANNED:
            scope.set_attr(obj, name, plans.planned(name, member))
        else:
            patch(obj, name, member, builder, scope)

    interpreter._patch_attr = patch_attr


class _Plan:
    """The steps of an operator for operands of some types.

    Values are numbered: the handles of the operands, then constants, then what each step returned.

    Attributes:
        constants: what steps are given besides.
        steps: names of the builder's methods, and the numbers of the values that each is given.
        result: number of the result's handle; None where `made` is the result itself, as the one of a store is.
        made: the result's attributes, but for its handle; or the result.
    """

    __slots__ = ("constants", "made", "result", "steps")

    def __init__(
        self, constants: list[Any], steps: list[tuple[str, tuple[int, ...]]], result: int | None, made: Any
    ) -> None:
        self.constants, self.steps, self.result, self.made = constants, steps, result, made


class _Recorder:
    """The interpreter's builder, which notes what it is asked to do.

    Args:
        builder: the interpreter's.
        operands: handles of the operands.
        handle: class of a handle.
    """

    def __init__(self, builder: Any, operands: Sequence[Any], handle: type) -> None:
        self._builder, self._handle = builder, handle
        self._places: dict[int, tuple[str, int]] = {id(operand): ("operand", n) for n, operand in enumerate(operands)}
        self._operands = len(operands)
        self._constants: list[Any] = []
        self._steps: list[tuple[str, tuple[tuple[str, int], ...], Any]] = []
        self._is_whole = True

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._builder, name)
        if not callable(method):
            return method

        def noted(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self._note(name, args, kwargs, result)
            return result

        return noted

    def _note(self, name: str, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        taken = any(isinstance(argument, self._handle) for argument in args)
        if kwargs or (taken and not isinstance(result, self._handle | None)):
            self._is_whole = False
        elif isinstance(result, self._handle) and name.startswith("get_") and not taken:
            self._places.setdefault(id(result), ("constant", self._constant(result)))
        elif taken or isinstance(result, self._handle):
            self._steps.append((name, tuple(self._place(argument) for argument in args), result))
            self._places.setdefault(id(result), ("step", len(self._steps) - 1))

    def _place(self, value: Any) -> tuple[str, int]:
        if isinstance(value, self._handle):
            if id(value) in self._places:
                return self._places[id(value)]
            self._is_whole = False  # nobody knows where it comes from
        elif isinstance(value, list | tuple) and any(isinstance(part, self._handle) for part in value):
            self._is_whole = False
        return "constant", self._constant(value)

    def _constant(self, value: Any) -> int:
        self._constants.append(value)
        return len(self._constants) - 1

    def plan(self, out: Any, tensor: type[Any]) -> _Plan | None:
        """Return the plan that gives `out`; None if there is none."""
        if not self._is_whole or not isinstance(out, tensor):
            return None
        first = {"operand": 0, "constant": self._operands, "step": self._operands + len(self._constants)}

        def number(place: tuple[str, int]) -> int:
            return first[place[0]] + place[1]

        steps = [(name, tuple(number(place) for place in places)) for name, places, _ in self._steps]
        if out.handle is None:
            return _Plan(self._constants, steps, None, out)
        if id(out.handle) not in self._places:
            return None
        made = {name: value for name, value in vars(out).items() if name != "handle"}
        return _Plan(self._constants, steps, number(self._places[id(out.handle)]), made)


class _Plans:
    """The operators of an interpreter, each with its plans by the types of its operands.

    Args:
        interpreter: the module ``triton.runtime.interpreter``.
        core: the module ``triton.language.core``.
    """

    def __init__(self, interpreter: Any, core: Any) -> None:
        self._interpreter, self._core = interpreter, core
        self._tensor: type[Any] = core.tensor
        self._plans: dict[Any, _Plan | None] = {}
        self._types: dict[Any, int] = {}
        self._members: dict[
            int, tuple[Any, Callable[..., Any]]
        ] = {}  # with the member itself, so that no other one gets its id

    def planned(self, name: str, member: Any) -> Callable[..., Any]:
        """Wrap a member, so that it follows plans."""
        known = self._members.get(id(member))
        if known is None:
            known = self._members[id(member)] = member, self._planned(name, member)
        return known[1]

    def _planned(self, name: str, member: Any) -> Callable[..., Any]:
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
            # With one handle twice, the notes could not tell which operand a step takes.
            if plan is None or (len(handles) > 1 and len({*map(id, handles)}) < len(handles)):
                if key in plans or len({*map(id, handles)}) < len(handles) or not _is_told(key):
                    return member(*args, **kwargs, _semantic=semantic)
                return self._first(key, name, member, args, kwargs, handles)
            builder, values = semantic.builder, handles
            values += plan.constants
            for step, places in plan.steps:
                values.append(getattr(builder, step)(*[values[place] for place in places]))
            if plan.result is None:
                return plan.made
            out: Any = new(tensor)
            attributes = out.__dict__
            attributes.update(plan.made)
            attributes["handle"] = values[plan.result]
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
        """Describe what a plan depends on in an argument, hashable, with None for what is unknown. Adds its tensors' handles."""
        kind = type(value)
        if kind is self._tensor:
            attributes = value.__dict__
            handles.append(attributes["handle"])
            return attributes.get("assay_type") or self._type(value)
        if kind is int or kind is bool or kind is str:
            return kind, value
        if kind is tuple:
            return tuple([self._described(part, handles) for part in value])
        if value is None:
            return "None"
        if kind is float:
            return kind, value.hex()  # 0.0 == -0.0, and NaN is not NaN
        if kind is self._core.constexpr:
            return kind, self._described(value.value, handles)
        if kind is slice:
            return kind, *[self._described(bound, handles) for bound in (value.start, value.stop, value.step)]
        return (kind, value.name) if kind is self._core.dtype else None

    def _type(self, value: Any) -> int | None:
        """Return a number for the type of a tensor, which is kept with it."""
        type_ = value.type
        scalar = type_.scalar
        told: tuple[Any, ...] | None
        if type(scalar) is self._core.pointer_type:
            element = scalar.element_ty
            told = (element.name, scalar.address_space, scalar.const) if type(element) is self._core.dtype else None
        else:
            told = (scalar.name,) if type(scalar) is self._core.dtype else None
        if told is None:
            return None
        shape = tuple(int(extent) for extent in type_.shape) if type_.is_block() else None
        value.assay_type = self._types.setdefault((shape, told), len(self._types) + 1)
        return value.assay_type  # type: ignore[no-any-return]


def _is_told(key: Any) -> bool:
    """Return True if nothing in a description is missing."""
    return key is not None and (not isinstance(key, tuple) or all(_is_told(part) for part in key))


def _depends(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: type) -> bool:
    """Return True if the steps of a load or store depend on values: of `other`, or of the mask of a pointer that is no block."""
    given = {**dict(zip(_MEMORY.get(name, ()), args, strict=False)), **kwargs}
    pointer, mask = given.get("pointer"), given.get("mask")
    alone = not (isinstance(pointer, tensor) and pointer.type.is_block())  # type: ignore[attr-defined]
    return name in _MEMORY and (isinstance(given.get("other"), tensor) or (alone and isinstance(mask, tensor)))
