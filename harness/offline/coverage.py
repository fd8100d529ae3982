"""The coverage of a check: dtypes, head dims, ratios of heads and lengths of the calls that a kernel computed, and the gaps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import combinations, product
from typing import TypeVar

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.interpreter import BFLOAT16_BROKEN
from assay.harness.attention.matrix import Case
from assay.harness.localize import axes
from assay.harness.text import counted, one_line

DECLARED = "by declaration"
_Value = TypeVar("_Value", str, int)


@dataclass(frozen=True)
class Lengths:
    """Lengths of the calls of one phase.

    Attributes:
        new: fewest and most new tokens of a sequence.
        cached: fewest and most cached tokens of a sequence.
        sequences: most sequences of a call.
        keys: most keys of a call, of all its sequences.
        calls: how many calls.
    """

    new: tuple[int, int]
    cached: tuple[int, int]
    sequences: int
    keys: int
    calls: int


@dataclass(frozen=True)
class Reach:
    """The reach of calls, each quantity by itself.

    Attributes:
        new: most new tokens of a sequence.
        behind: most new tokens of a sequence with a cached prefix.
        cached: most cached tokens of a sequence.
        keys: most keys of a sequence, cached or new.
        sequences: most sequences of a call.
    """

    new: int
    behind: int
    cached: int
    keys: int
    sequences: int

    def words(self, phase: str) -> str:
        """Describe the reach of the calls of a phase."""
        new = f"{self.new:,} new tokens, {self.behind:,} behind a cached prefix, " if phase == "extend" else ""
        return f"{phase} to {new}{self.keys:,} keys of a sequence and {counted(self.sequences, 'sequence')}"


@dataclass(frozen=True)
class Core:
    """A product of which every combination was computed, in each phase.

    Attributes:
        dtypes: of q, k and v.
        head_dims: of q and k.
        heads: (q heads, kv heads).
        reach: by phase, how far the calls of every combination reach: the least of them.
    """

    dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    reach: Mapping[str, Reach] = field(default_factory=dict)


@dataclass(frozen=True)
class Gap:
    """Calls that were not computed.

    Attributes:
        what: which, in words: "head_dim 80 or 96", "float32".
        why: "by declaration", or what the kernel or its environment said.
        calls: how many; 0 if the matrix has none.
        example: name of the first of them; empty if the matrix has none.
    """

    what: str
    why: str
    calls: int = 0
    example: str = ""

    @property
    def sentence(self) -> str:
        """The gap in words."""
        extent = f" ({counted(self.calls, 'call')})" if self.calls else ""
        if self.why == DECLARED:
            return f"{self.what}, {self.why}{extent}"
        return f"{self.what or f'some, as {self.example}'}{extent}: {one_line(self.why)}"


@dataclass(frozen=True)
class Coverage:
    """The coverage of a check.

    `core` is a product that holds. The others list each axis by itself.

    Attributes:
        dtypes: of the computed calls.
        head_dims: of q and k, ascending.
        head_dims_v: those of v that are not that of q and k, ascending.
        ratios: q heads on each kv head, ascending.
        kv_heads: numbers of kv heads, ascending.
        layers: that called, ascending.
        device: type of device of the calls.
        lengths: by phase.
        gaps: what was not computed, and why.
        runs: how many times the kernel ran.
        core: the largest product of dtypes, head dims and heads that was computed as a whole.
        beyond: what single calls reach: each value of head dim, heads and layout outside of the core with the most keys of a
            sequence there, and all calls of a phase.
    """

    dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    head_dims_v: tuple[int, ...] = ()
    ratios: tuple[int, ...] = ()
    kv_heads: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    device: str = ""
    lengths: Mapping[str, Lengths] | None = None
    gaps: tuple[Gap, ...] = ()
    runs: int = 0
    core: Core = Core()
    beyond: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The coverage in one line; empty if nothing was covered."""
        if not self.lengths:
            return ""
        core = self.core
        parts: list[str] = []
        if core.reach:
            parts.append(self._product())
        parts += (
            [f"{'Beyond that, single' if parts else 'Single'} calls: {'; '.join(self.beyond)}"] if self.beyond else []
        )
        return ". ".join([*parts, f"{self.runs:,} runs on {self.device}"])

    def _product(self) -> str:
        """Describe the product that was computed."""
        core = self.core
        each = f"each of {', '.join(core.dtypes)} with head_dim {_listed(core.head_dims)} and {_heads(core.heads)} q/kv heads"
        # Four conditions at a time are tried in some combinations only, so the line must not read as a product of its limits.
        limits = "; ".join(reach.words(phase) for phase, reach in core.reach.items())
        return f"{each}, at sampled lengths: {limits}; each limit by itself, not their combinations"


NOTHING = Coverage()
"""That of no call."""


def coverage_of(
    computed: Sequence[AttentionCall],
    cases: Sequence[Case],
    refused: Sequence[tuple[Case, str]],
    excluded: Sequence[tuple[Case, str]],
    declined: Sequence[str],
    left_out: Sequence[Case],
    runs: int,
    lses: int = 0,
) -> Coverage:
    """Determine what the computed calls cover.

    Args:
        computed: calls that the kernel computed.
        cases: their cases.
        refused: cases that it did not compute, and why.
        excluded: cases that its declaration excludes, and by what.
        declined: what else its declaration leaves out.
        left_out: cases that were not run, as the kernel was clearly wrong before.
        runs: how many times the kernel ran.
        lses: calls of which the log-sum-exps were compared.
    """
    phases: dict[str, list[AttentionCall]] = {}
    for call in computed:
        phases.setdefault(call.phase, []).append(call)
    heads = {_heads_of(call) for call in computed}
    claimed: dict[str, list[AttentionCall]] = {}  # what nobody claims is tried in single calls alone
    for call, case in zip(computed, cases, strict=True):
        if not case.beyond and not call.features:
            claimed.setdefault(call.phase, []).append(call)
    core = _core(claimed)
    return Coverage(
        dtypes=tuple(dict.fromkeys(sorted(str(call.q.dtype).removeprefix("torch.") for call in computed))),
        head_dims=_ascending(call.q.shape[2] for call in computed),
        head_dims_v=_ascending(call.v.shape[2] for call in computed if call.v.shape[2] != call.q.shape[2]),
        ratios=_ascending(q // kv for q, kv in heads),
        kv_heads=_ascending(kv for _, kv in heads),
        layers=_ascending(call.layer for call in computed),
        device=computed[0].q.device.type if computed else "",
        lengths={phase: _lengths(calls) for phase, calls in phases.items()},
        gaps=(*_left_out(left_out), *_gaps(cases, refused, excluded, declined)),
        runs=runs,
        core=core,
        beyond=(*_beyond(core, phases), *_asked_for(cases), *[f"log-sum-exps of {counted(lses, 'call')}"] * (lses > 0)),
    )


def _heads_of(call: AttentionCall) -> tuple[int, int]:
    return call.q.shape[1], call.k.shape[1]


def _heads(heads: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{q}/{kv}" for q, kv in heads)


def _dtype(call: AttentionCall) -> str:
    return str(call.q.dtype).removeprefix("torch.")


def _core(phases: Mapping[str, Sequence[AttentionCall]]) -> Core:
    """Find the largest product that was computed in each phase, and how far every one of its combinations reaches."""
    by_kind: dict[tuple[str, str, int, tuple[int, int]], list[AttentionCall]] = {}
    for phase, calls in phases.items():
        for call in calls:
            if call.spec.layout == "packed" and call.v.shape[2] == call.q.shape[2]:
                by_kind.setdefault((phase, _dtype(call), call.q.shape[2], _heads_of(call)), []).append(call)
    heads = sorted({kind[3] for kind in by_kind})
    best = Core()
    for dtypes, dims in product(_subsets({kind[1] for kind in by_kind}), _subsets({kind[2] for kind in by_kind})):
        all_ = tuple(head for head in heads if all((*kind, head) in by_kind for kind in product(phases, dtypes, dims)))
        if len(dtypes) * len(dims) * len(all_) > len(best.dtypes) * len(best.head_dims) * len(best.heads):
            best = Core(dtypes, dims, all_)
    combinations_ = list(product(best.dtypes, best.head_dims, best.heads))
    if not combinations_:  # as where a kernel raised on all calls of a phase but a few
        return Core()
    reach = {phase: _least([_reach(by_kind[phase, *kind]) for kind in combinations_]) for phase in phases}
    return Core(best.dtypes, best.head_dims, best.heads, reach)


def _subsets(values: set[_Value]) -> Iterator[tuple[_Value, ...]]:
    """Yield all subsets but the empty one, the largest first."""
    for size in range(len(values), 0, -1):
        yield from combinations(sorted(values), size)


def _reach(calls: Sequence[AttentionCall]) -> Reach:
    """Measure how far some of the calls reach."""
    lens = [pair for call in calls for pair in zip(call.lens_q, call.prefixes, strict=True)]
    return Reach(
        new=max(new for new, _ in lens),
        behind=max((new for new, cached in lens if cached), default=0),
        cached=max(cached for _, cached in lens),
        keys=max(new + cached for new, cached in lens),
        sequences=max(len(call.cu_seqlens_q) - 1 for call in calls),
    )


def _least(reached: Sequence[Reach]) -> Reach:
    """Return how far all of them reach."""
    return Reach(**{field_.name: min(getattr(each, field_.name) for each in reached) for field_ in fields(Reach)})


def _beyond(core: Core, phases: Mapping[str, Sequence[AttentionCall]]) -> Iterator[str]:
    """Describe what single calls reach beyond the core; each value with the fewest keys to which one of them reaches."""
    every = [call for calls in phases.values() for call in calls]
    values: tuple[tuple[str, Callable[[AttentionCall], object], Iterable[object]], ...] = (
        ("dtype {}", _dtype, core.dtypes),
        ("head_dim {}", lambda call: call.q.shape[2], core.head_dims),
        ("head_dim_v {}", lambda call: call.v.shape[2] if call.v.shape[2] != call.q.shape[2] else 0, (0,)),
        ("{} q/kv heads", lambda call: _heads([_heads_of(call)]), [_heads([head]) for head in core.heads]),
        ("inputs {}", lambda call: call.spec.layout, ("packed",)),
        ("layers {}", lambda call: call.layer, (0,)),
    )
    for words, value_of, known in values:
        keys: dict[object, int] = {}
        for call in every:
            value = value_of(call)
            if value not in (*known,):
                keys[value] = max(keys.get(value, 0), *call.lens_k)
        if keys:
            listed = ", ".join(map(str, sorted(keys, key=_by_numbers)))
            yield f"{words.format(listed)} (to {min(keys.values()):,} keys)"
    for phase, calls in phases.items():
        if core.reach.get(phase) != (reach := _reach(calls)):
            yield reach.words(phase)


def _asked_for(cases: Sequence[Case]) -> Iterator[str]:
    """List the values of features that calls asked for."""
    values = dict.fromkeys(case.condition.get("asked for", "nothing") for case in cases)
    if asked := [value for value in values if value != "nothing"]:
        yield f"asked for: {', '.join(asked)}"


def _by_numbers(value: object) -> tuple[object, ...]:
    """Return a key that sorts numbers, and pairs of them in words, by size."""
    return tuple(int(part) for part in re.findall(r"\d+", str(value))) or (str(value),)


def _ascending(values: object) -> tuple[int, ...]:
    return tuple(sorted(set(values)))  # type: ignore[call-overload]


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def _lengths(calls: Sequence[AttentionCall]) -> Lengths:
    new = [length for call in calls for length in call.lens_q]
    cached = [prefix for call in calls for prefix in call.prefixes]
    return Lengths(
        (min(new), max(new)), (min(cached), max(cached)), max(len(call.cu_seqlens_q) - 1 for call in calls),
        max(call.k.shape[0] for call in calls), len(calls),
    )  # fmt: skip


def _left_out(cases: Sequence[Case]) -> list[Gap]:
    """Make the gap of cases that were not run, as the kernel was clearly wrong before."""
    why = "not run, as the kernel was clearly wrong before; the matrix of size full is always run as a whole"
    return [Gap("the rest of the matrix", why, len(cases), cases[0].name)] if cases else []


def _gaps(
    cases: Sequence[Case],
    refused: Sequence[tuple[Case, str]],
    excluded: Sequence[tuple[Case, str]],
    declined: Sequence[str],
) -> list[Gap]:
    """List the gaps: those that are declared first; refusals for one reason as one, with the values that separate them."""
    gaps = [Gap(what, DECLARED) for what in declined]
    for why, some in _by_reason([(case, why) for case, why in excluded]).items():
        gaps.append(Gap(why, DECLARED, len(some), some[0].name))
    for why, some in _by_reason(refused).items():
        conditions, others = [case.condition for case in some], [case.condition for case in cases]
        found_axes = separating(conditions, others)
        only = "bfloat16" if why == BFLOAT16_BROKEN else _words(found_axes)
        axis = found_axes[0].name if len(found_axes) == 1 else ""
        advice = advice_on(axis, [c[axis] for c in others]) if axis and why != BFLOAT16_BROKEN else ""
        gaps.append(Gap(only, f"{why}{advice}", len(some), some[0].name))
    return gaps


def _words(separated: Sequence[axes.Axis]) -> str:
    """Describe the refused values of axes: "head_dim 80, 96"."""
    return " with ".join(
        "a cached prefix"
        if axis.name == "cached prefix" and axis.right == ("none",)
        else f"{axis.name} {', '.join(axis.failing)}"
        for axis in separated
    )


def _by_reason(pairs: Sequence[tuple[Case, str]]) -> dict[str, list[Case]]:
    by_reason: dict[str, list[Case]] = {}
    for case, why in pairs:
        by_reason.setdefault(why, []).append(case)
    return by_reason


def separating(refused: Sequence[axes.Conditions], computed: Sequence[axes.Conditions]) -> list[axes.Axis]:
    """Find the axes that separate refused calls from computed ones, as a kernel may have meant it.

    Of several that separate them equally well, that which a kernel can declare: dtype, head dim, cached prefix.
    """
    for axis in axes.by_axis(refused, computed):
        if axis.name in DECLARABLE and axis.right and not any(axes.holds([axis], case) for case in computed):
            return [axis]
    return axes.confining(refused, computed)


def advice_on(axis: str, computed: Sequence[str]) -> str:
    """Explain how a kernel declares the values of an axis that it computes; empty for what is not declared."""
    values = sorted(dict.fromkeys(computed), key=lambda value: (len(value), value) if value.isdecimal() else (0, value))
    if axis == "cached prefix" and set(values) == {"none"}:
        return "; declare what it supports: prefix=False"
    if axis not in ("dtype", "head_dim") or not values:
        return ""
    words = [f'"{value}"' if axis == "dtype" else value for value in values]
    return f"; declare what it supports: {axis}s=({', '.join(words)}{',' * (len(words) == 1)})"


DECLARABLE = ("dtype", "head_dim", "cached prefix")
"""Axes whose values a kernel can declare."""
