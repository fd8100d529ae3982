"""An adapter turns a function with another signature into a kernel of the contract."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.call import WITHOUT_LSE, AttentionCall, KernelRefused, Outputs
from assay.harness.attention.declaration import Declaration, declaration
from assay.harness.attention.forms import feature_of, lacking
from assay.harness.attention.paging import PagedKV
from assay.harness.conditions import PHASES

Attend = Callable[[], "Tensor | Outputs"]
"""Computes a call after it was laid out."""

WITHOUT_SCALE = "without scale"
"""A value of `CallSpec.ways`, like `WITHOUT_LSE`: the scale is left out if it is head_dim ** -0.5, the usual default."""
WITH_OUT = "with out"
"""The function writes to memory from the caller, which is filled with NaN: it must write everything that is read afterwards."""
ROUNDED_Q, ROUNDED_K = "max_seqlen_q rounded up", "max_seqlen_k rounded up"
"""Rounded up to the capacity of a CUDA graph: all rows of the batch, and the length of the context."""
PAGED = "with block table"
"""K and V lie in a paged cache. If several page sizes are possible, the way is ``with block table: pages of 16 tokens``."""
SIZE_WORDS = ("page size", "page_size", "block size", "block_size")
"""Texts in errors about the size of a page."""
# Tokens up to which an engine's graphs compute, unless a call is longer.
_CONTEXT = 4096


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function; of a class with `plan` and `run`, those of the two.

    Attributes:
        names: all of them; with ``**kwargs``, or where Python does not know them, also those that the docstring documents. Of a
            class, also "forward" if it has that method.
        required: those without a default.
        any_name: whether there are ``**kwargs``.
    """

    names: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    any_name: bool = False

    def first(self, names: Iterable[str]) -> str:
        """Return the first of some names that is a parameter, or an empty string."""
        return next((name for name in names if name in self.names), "")

    @classmethod
    def of(cls, function: Any) -> Parameters:
        """Read the parameters of a function, or of a class with `plan` and `run`."""
        parts = (function.plan, function.run) if _is_planned(function) else (function,)
        read = [cls._of_part(part, bound=not _is_planned(function)) for part in parts]
        return cls(
            frozenset(
                chain(*(part.names for part in read), ("forward",) * (len(parts) > 1 and hasattr(function, "forward")))
            ),
            frozenset(chain.from_iterable(part.required for part in read)),
            any(part.any_name for part in read),
        )

    @classmethod
    def _of_part(cls, function: Any, bound: bool) -> Parameters:
        try:
            given = list(inspect.signature(function).parameters.values())[0 if bound else 1 :]
        except (TypeError, ValueError):  # of a built-in function
            return cls._documented(function)
        by_name = [
            parameter
            for parameter in given
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        names = {parameter.name for parameter in by_name}
        any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in given)
        if any_name:
            names |= set(re.findall(r"^\s+(\w+) ?: ", function.__doc__ or "", re.MULTILINE))
        return cls(
            frozenset(names),
            frozenset(parameter.name for parameter in by_name if parameter.default is parameter.empty),
            any_name,
        )

    @classmethod
    def _documented(cls, function: Any) -> Parameters:
        """Read the signature at the beginning of a built-in function's docstring, as PyTorch has it."""
        begins = re.match(rf"\s*{re.escape(getattr(function, '__name__', ''))}\((.*?)\)", function.__doc__ or "", re.S)
        try:
            arguments = ast.parse(f"def function({begins[1] if begins else ''}): ...").body[0].args  # type: ignore[attr-defined]
        except SyntaxError:
            return cls()
        names = [argument.arg for argument in arguments.args]
        required = names[: len(names) - len(arguments.defaults)]
        return cls(frozenset([*names, *(argument.arg for argument in arguments.kwonlyargs)]), frozenset(required))


FP8_PER_TENSOR = ("stored_kv: e4m3 per tensor", "stored_kv: e5m2 per tensor")
"""Forms of a signature that takes a cache in FP8, with one scale of K and one of V."""


def scales_of(call: AttentionCall, forms: Sequence[str] = FP8_PER_TENSOR) -> tuple[Tensor, Tensor] | None:
    """Return the scales of a call's stored K and V, each float32 [1], or [num_kv_heads] if they are per head, or None.

    Args:
        call: the call.
        forms: those that the signature declares: of "stored_kv", per tensor and per head.

    Raises:
        KernelRefused: K and V are stored in another form.
    """
    if call.stored is None:
        return None
    if lacks := [lack for lack in lacking(forms, call) if lack.startswith("stored_kv")]:
        known = " or ".join(form.removeprefix("stored_kv: ") for form in forms)
        raise KernelRefused(f"the signature has no {lacks[0]}: it takes {known}")
    return call.stored.k_scale.flatten(), call.stored.v_scale.flatten()


def _is_declared(features: Sequence[str], feature: str) -> bool:
    """Return True if a function declares a feature or form, either itself or the whole feature."""
    return feature in features or feature_of(feature) in features


def _is_planned(function: Any) -> bool:
    """Return True for a class with `plan` for a batch and `run`, like FlashInfer's wrappers."""
    return inspect.isclass(function) and callable(getattr(function, "plan", None)) and hasattr(function, "run")


_LayOut = Callable[[Any, Parameters, AttentionCall], Attend]
"""(function, its parameters, call) -> a callable that calls the function."""


@dataclass(frozen=True)
class Adapter:
    """A known signature, and the way to pass a call to a function with it.

    Attributes:
        name: the signature's name. Two functions of one package may share a name.
        passes: parameters that are passed in every call. A function with all of them has the signature.
        asks: feature of a call, or form of one -> its parameters, any of which passes it on, or () if a parameter of `passes`
            does.
        lay_out: lays a call out.
        phases: phases that such a function computes.
        also: other parameters that are passed if the function has them.
        ways: supported value of `CallSpec.ways` -> its parameters, one of which is passed or left out, or () if parameters of
            `passes` get other values. Other words in an error that refuses it may follow.
        in_fewer_bits: features that such a function computes with Q and weights in fewer bits: only functions that declare a
            noise family get them.
        pages: page sizes that a function with these parameters accepts, or () if it accepts any one size.
    """

    name: str
    passes: tuple[str, ...]
    asks: Mapping[str, tuple[str, ...]]
    lay_out: _LayOut
    phases: tuple[str, ...] = PHASES
    also: tuple[str, ...] = ()
    in_fewer_bits: tuple[str, ...] = ()
    ways: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pages: Callable[[Parameters], tuple[int, ...]] = lambda _: ()

    def missing(self, parameters: Parameters) -> tuple[str, ...]:
        """List the parameters that a signature lacks to be this one."""
        return tuple(name for name in self.passes if name not in parameters.names)

    def unknown(self, parameters: Parameters) -> tuple[str, ...]:
        """List the parameters that a signature requires and this one does not have."""
        return tuple(sorted(parameters.required - {*self.passes, *self.also, *chain.from_iterable(self.asks.values())}))

    def features(self, parameters: Parameters, noise: str) -> tuple[str, ...]:
        """List the features that a function with these parameters and this declared noise family supports."""
        return tuple(
            feature
            for feature, names in self.asks.items()
            if (not names or parameters.names.intersection(names))
            and (noise or feature_of(feature) not in self.in_fewer_bits)
        )

    def ways_of(self, parameters: Parameters) -> tuple[str, ...]:
        """List the ways in which a function with these parameters can be called."""
        left_out = WITHOUT_LSE, WITHOUT_SCALE
        sized = [f"{PAGED}: pages of {size} tokens" for size in self.pages(parameters)]
        return tuple(
            each
            for way, names in self.ways.items()
            for each in ((way == PAGED and sized) or [way])
            if (not names or parameters.first(names))
            and not (way in left_out and parameters.first(names) in parameters.required)
        )

    def refuses(self, way: str, error: Exception) -> bool:
        """Return True if an error rejects a way of calling the function; for page sizes, the error may have any type."""
        name, _, size = way.partition(": ")
        plain = isinstance(error, AssertionError | NotImplementedError)
        words = (*(self.ways[name] if plain else ()), *(SIZE_WORDS if size else ()))
        return any(word in str(error).lower() for word in words)

    def names(self, asked: Sequence[str]) -> Iterator[str]:
        """Yield the names of features that a call asks for, and the parameters that pass them on."""
        yield from asked
        for feature, names in self.asks.items():
            yield from names if feature_of(feature) in asked else ()


class Adapted:
    """A function with a known signature as a kernel of the contract.

    Args:
        function: the function, or a class with `plan` and `run`.
        adapter: its signature.
        parameters: its parameters.

    Attributes:
        assay: its own declaration, with the phases and the features that its signature has.
        function: the function.
        lacks: ways of calling that the function rejected, with its messages.
    """

    def __init__(self, function: Any, adapter: Adapter, parameters: Parameters) -> None:
        self.function = function
        self.lacks: dict[str, str] = {}
        self._adapter, self._parameters = adapter, parameters
        self._passed: set[str] = set(adapter.passes)
        own = declaration(function)
        features = adapter.features(parameters, own.noise)
        self.assay = replace(
            own if isinstance(getattr(function, "assay", None), Declaration) else Declaration(),
            phases=tuple(phase for phase in own.phases if phase in adapter.phases),
            features=tuple(filter(partial(_is_declared, own.features), features)) if own.features else features,
            ways=adapter.ways_of(parameters),
        )

    @property
    def unpassed(self) -> tuple[str, ...]:
        """Parameters of the function that no call has passed so far, in the order of their names."""
        return tuple(sorted(self._parameters.names - self._passed))

    def __call__(self, call: AttentionCall) -> Tensor | Outputs:
        """Compute the output, [total_q, num_q_heads, head_dim_v].

        Raises:
            KernelRefused: the signature cannot express this, or the function rejects a request of the call by an AssertionError
                or a NotImplementedError that names it. Also whatever else the function raises.
        """
        ways = tuple(way for way in call.spec.ways if way not in self.lacks)
        asked = call.with_spec(ways=ways) if ways != call.spec.ways else call
        try:
            return self._adapter.lay_out(_Noted(self.function, self._passed), self._parameters, asked)()
        except Exception as error:
            plain, said = isinstance(error, AssertionError | NotImplementedError), str(error).lower()
            if plain and any(name in said for name in self._adapter.names(call.features)):
                raise KernelRefused(str(error)) from error
            lacks = [way for way in ways if self._adapter.refuses(way, error)]
            if not lacks:
                raise
            made = self(call.with_spec(ways=tuple(way for way in ways if way not in lacks)))
            self.lacks |= dict.fromkeys(lacks, str(error).partition("\n")[0])
            return made


class _Noted:
    """A function or planned class that records the names of its arguments and of the attributes that are read."""

    def __init__(self, called: Any, names: set[str]) -> None:
        self._called, self._names = called, names

    def __call__(self, *args: Any, **passed: Any) -> Any:
        self._names.update(passed)
        made = self._called(*args, **passed)
        return _Noted(made, self._names) if isinstance(self._called, type) else made

    def __getattr__(self, name: str) -> Any:
        self._names.add(name)
        return _Noted(getattr(self._called, name), self._names)


def scaled(call: AttentionCall, name: str) -> dict[str, Any]:
    """Return the scale of a call by the name of its parameter, or an empty dict if the call can omit it."""
    default = WITHOUT_SCALE in call.spec.ways and call.scale == call.q.shape[2] ** -0.5
    return {} if default else {name: call.scale}


def longest(call: AttentionCall) -> tuple[int, int]:
    """Return the most new tokens and the most keys to pass to a function, rounded up if the call asks for that."""
    most_q, most_k = max(call.lens_q), max(call.lens_k)
    if ROUNDED_Q in call.spec.ways:
        most_q = call.q.shape[0]
    return most_q, max(most_k, _CONTEXT) if ROUNDED_K in call.spec.ways else most_k


def block_table(pool: PagedKV, page: int, keys: int) -> Tensor:
    """Return the block table of a pool, int32 [batch, pages], as part of a wider one like in engines.

    It has a column more than the longest sequence has pages: engines make tables for the model's whole context.
    """
    table = pool.block_table
    width = max(table.shape[1] + 1, -(-keys // page))
    return torch.nn.functional.pad(table, (0, width + 1 - table.shape[1]), value=pool.stale)[:, :width]


def beside_each_other(pool: PagedKV) -> PagedKV:
    """Lay K and V out as parts of one cache, [pages, 2, ...], like vLLM if head_dim_v equals head_dim."""
    if pool.k.shape != pool.v.shape:
        return pool
    as_bytes = torch.stack([pool.k.view(torch.uint8), pool.v.view(torch.uint8)], 1)  # FP8 cannot be stacked
    k, v = as_bytes.view(pool.k.dtype).unbind(1)
    return replace(pool, k=k, v=v)


def out_of(call: AttentionCall) -> Tensor:
    """Make the memory of an output, all NaN."""
    return call.q.new_empty(*call.q.shape[:2], call.v.shape[2]).fill_(torch.nan)
