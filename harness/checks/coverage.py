"""The coverage of a check: the values of each axis, the reach of the calls, and the gaps."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch

from assay.harness.attention.adapters.adapter import PAGED
from assay.harness.attention.call import AttentionCall
from assay.harness.attention.interpreter import BFLOAT16_BROKEN
from assay.harness.attention.matrix import Case
from assay.harness.attention.model_shapes import SHAPES
from assay.harness.attention.oracle import feature_effects, oracle
from assay.harness.evidence.kernel_result import Coverage, Gap, Met, Pairs, Reach, common
from assay.harness.localize.bounds import bounds_of_queries
from assay.harness.localize.kernel_runs import CallResult
from assay.harness.stats.query_bounds import with_all_heads

Conditions = Mapping[str, str]
"""Axis -> value of one call, as `assay.harness.attention.matrix.Case.condition`."""


class Split(NamedTuple):
    """The values of an axis that calls of interest have, and those that only other calls have."""

    name: str
    inside: tuple[str, ...]
    outside: tuple[str, ...]


_VALUES: dict[str, Callable[[AttentionCall], object]] = {
    "dtype": lambda call: str(call.q.dtype).removeprefix("torch."),
    "head_dim": lambda call: call.q.shape[2],
    "head_dim_v": lambda call: call.v.shape[2] if call.v.shape[2] != call.q.shape[2] else "",
    "q/kv heads": lambda call: f"{call.q.shape[1]}/{call.k.shape[1]}",
    "layout": lambda call: call.spec.layout,
    "layer": lambda call: call.layer,
}
# Axes of drawn cases, which have words as values.
_DRAWN = ("data", "asked for")
_TOKENS, _SEQUENCES = (1, *(4**power for power in range(2, 16))), tuple(8**power for power in range(1, 11))
"""Last number of each band of lengths, and of numbers of sequences."""
_UNFELT = "it did not change any output by more than rounding, so a kernel could ignore it"
# An effect of this many times the widest bound of a call's cells exceeds that of a single query, which is costly to compute.
_CLEARLY = 10.0
# Axes whose values a kernel can declare.
DECLARABLE = ("dtype", "head_dim", "cached prefix")


def coverage_of(
    results: Sequence[tuple[Case, CallResult]],
    refused: Sequence[tuple[Case, str]],
    excluded: Sequence[tuple[Case, str]],
    declined: Sequence[str],
    left_out: Sequence[Case],
    runs: int,
    kernel: object = None,
) -> Coverage:
    """Determine what the computed calls cover.

    Args:
        results: the computed cases, with the kernel's outputs.
        refused: the cases that it did not compute, and why.
        excluded: the cases that its declaration excludes, and by what.
        declined: further omissions of its declaration.
        left_out: the cases that were not run because the kernel was already clearly wrong.
        runs: the number of runs of the kernel.
        kernel: the kernel. If it is an adapted function, parameters that no call passed are gaps.
    """
    cases, computed = [case for case, _ in results], [result.call for _, result in results]
    values = {
        axis: tuple(sorted({str(value) for call in computed if (value := value_of(call)) != ""}, key=_by_numbers))
        for axis, value_of in _VALUES.items()
    }
    values["data"] = tuple(dict.fromkeys(case.condition["data"] for case in cases if "data" in case.condition))
    shapes = {(call.q.shape[1], call.k.shape[1], call.q.shape[2]) for call in computed}
    values["shapes of"] = tuple(model for model, shape in SHAPES.items() if shape in shapes)
    ways = {way for call in computed for way in call.spec.ways} - {*getattr(kernel, "lacks", {})}
    sizes = {size for way in ways for name, _, size in (way.partition(": "),) if name == PAGED}
    values[PAGED] = tuple(sorted(sizes, key=_by_numbers))
    asked: dict[str, list[tuple[Case, CallResult]]] = {}
    for case, result in results:
        asked.setdefault(case.condition.get("asked for", "nothing"), []).append((case, result))
    feels = {id(result): _is_felt(result) for value, some in asked.items() if value != "nothing" for _, result in some}
    felt = {value: any(feels[id(each)] for _, each in some) for value, some in asked.items() if value != "nothing"}
    values["asked for"] = tuple(value for value, changed in felt.items() if changed)
    phases: dict[str, list[tuple[dict[str, str], AttentionCall]]] = {}
    for case, result in results:
        own = values_of(case, result.call)
        if not feels.get(id(result), True):
            own.pop("asked for")
        phases.setdefault(result.call.phase, []).append((own, result.call))
    unfelt = [
        Gap(what=value, why=_UNFELT, calls=len(asked[value]), example=asked[value][0][0].name)
        for value, changed in felt.items()
        if not changed
    ]
    return Coverage(
        values={axis: some for axis, some in values.items() if some},
        reach={phase: _reach(made) for phase, made in phases.items()},
        lses=sum(result.lse is not None for _, result in results),
        gaps=(*_left_out(left_out), *_uncalled(kernel), *_gaps(cases, refused, excluded, declined), *unfelt),
        runs=runs, device=computed[0].q.device.type if computed else "",
    )  # fmt: skip


def _reach(made: Sequence[tuple[Mapping[str, str], AttentionCall]]) -> Reach:
    """List the lengths and the numbers of sequences of some calls, and their reach with each of their values."""
    lens = [pair for _, call in made for pair in zip(call.lens_q, call.prefixes, strict=True)]
    counts = [(call.lens_q, call.lens_k, (len(call.lens_q),)) for _, call in made]
    by_value, by_pair = met_with([values for values, _ in made], counts)
    return Reach(
        new=tuple(sorted({new for new, _ in lens})),
        behind=tuple(sorted({new for new, cached in lens if cached})),
        keys=tuple(sorted({new + cached for new, cached in lens})),
        sequences=tuple(sorted({len(call.lens_q) for _, call in made})),
        met=by_value, pairs=by_pair,
    )  # fmt: skip


def values_of(case: Case, call: AttentionCall) -> dict[str, str]:
    """Return the values of the axes that a pass names: from the call, and from the case if it was drawn."""
    values = {axis: str(value) for axis, value_of in _VALUES.items() if (value := value_of(call)) != ""}
    return values | {axis: case.condition[axis] for axis in _DRAWN if axis in case.condition}


Counts = tuple[Iterable[int], Iterable[int], Iterable[int]]
"""The new tokens and keys of a call's sequences, and the number of sequences."""


def met_with(
    values: Sequence[Mapping[str, str]], counts: Sequence[Counts]
) -> tuple[dict[str, dict[str, Met]], dict[str, Pairs]]:
    """Determine the numbers of tokens, keys and sequences of calls with each value of an axis, and with all pairs of two axes.

    Args:
        values: each call's value by axis.
        counts: the counts of each call.
    """
    numbers: dict[tuple[tuple[str, str], ...], tuple[set[int], ...]] = {}
    for row, some in zip(values, counts, strict=True):
        known = tuple(map(frozenset, some))
        for pairs in (*combinations(row.items(), 1), *combinations(row.items(), 2)):
            for seen, more in zip(numbers.setdefault(pairs, (set(), set(), set())), known, strict=True):
                seen.update(more)
    by_value: dict[str, dict[str, Met]] = {}
    of_axes: dict[tuple[str, ...], list[Met]] = {}
    for pairs, (new, keys, sequences) in numbers.items():
        met = Met(
            new=_unbroken(new, _TOKENS), keys=_unbroken(keys, _TOKENS), sequences=_unbroken(sequences, _SEQUENCES)
        )
        if len(pairs) == 1:
            by_value.setdefault(pairs[0][0], {})[pairs[0][1]] = met
        else:
            of_axes.setdefault(tuple(axis for axis, _ in pairs), []).append(met)
    by_value = {axis: {v: some[v] for v in sorted(some, key=_by_numbers)} for axis, some in by_value.items()}
    return by_value, {
        ", ".join(axes): Pairs(met=len(mets), of=len(by_value[axes[0]]) * len(by_value[axes[1]]), **common(mets))
        for axes, mets in of_axes.items()
        if all(len(by_value[axis]) > 1 for axis in axes)
    }


def _unbroken(numbers: Iterable[int], ends: Sequence[int]) -> tuple[int, int]:
    """Return the smallest number, and the largest below the first band without one."""
    first, *others = sorted(numbers)
    last, band = first, bisect_left(ends, first)
    for number in others:
        if (there := bisect_left(ends, number)) > band + 1:
            break
        last, band = number, there
    return first, last


def _is_felt(result: CallResult) -> bool:
    """Return True if each feature that can be left out changes the output of a query by more than the query's bound."""
    call, felt, ends = result.call, set[str](), torch.unique(result.call.cu_seqlens_q[1:].long()) - 1
    every = torch.arange(call.rows, device=call.q.device) if result.cells.rows is None else result.cells.rows
    for rows in (
        ends[ends >= 0],
        every,
    ):  # the last queries of the sequences nearly always show it, at a fraction of the cost
        right = oracle(call, rows)
        effects = feature_effects(call, rows, right, felt)
        clear = _CLEARLY * float(result.bounds.max()) * with_all_heads(right.abs().sum(-1))
        sums = {name: with_all_heads(effect.abs().sum(-1)) for name, effect in effects.items()}
        felt |= {name for name, some in sums.items() if bool((some > clear).any())}
        if sums.keys() <= felt:
            return True
    for some in (sums[name] for name in sums.keys() - felt):
        place = some[:, -1].argmax()[None]  # the most affected query
        own = some[place].cpu()
        if not bool((own > bounds_of_queries(call, result.limits.family, every[place], own).cpu()).any()):
            return False
    return True


def _by_numbers(value: str) -> tuple[object, ...]:
    """Return a key that sorts numbers, and texts with pairs of numbers, by size."""
    return [int(part) for part in re.findall(r"\d+", value)], value


def _left_out(cases: Sequence[Case]) -> list[Gap]:
    """Make the gap of cases that were not run because the kernel was already clearly wrong."""
    why = "not run, since the kernel was already clearly wrong; the matrix of size full always runs completely"
    return [Gap(what="the rest of the matrix", why=why, calls=len(cases), example=cases[0].name)] if cases else []


def _uncalled(kernel: object) -> list[Gap]:
    """List the ways in which an adapted function cannot be called, as it states them, and its parameters that no call passed."""
    gaps = [Gap(what=way, why=said) for way, said in getattr(kernel, "lacks", {}).items()]
    unpassed = getattr(kernel, "unpassed", ())
    return gaps + ([Gap(what=f"parameters {', '.join(unpassed)}", why="no call passes them")] if unpassed else [])


def _gaps(
    cases: Sequence[Case],
    refused: Sequence[tuple[Case, str]],
    excluded: Sequence[tuple[Case, str]],
    declined: Sequence[str],
) -> list[Gap]:
    """List the gaps, declared ones first; refusals for the same reason are one gap, with the values that separate them."""
    gaps = [Gap(what=what) for what in declined]
    for why, some in _by_reason([(case, why) for case, why in excluded]).items():
        gaps.append(Gap(what=why, calls=len(some), example=some[0].name))
    for why, some in _by_reason(refused).items():
        conditions, others = [case.condition for case in some], [case.condition for case in cases]
        axis, only, advice = separating(conditions, others), "", ""
        if why == BFLOAT16_BROKEN:
            only = "bfloat16"
        elif axis is not None:
            plain = (axis.name, axis.outside) == ("cached prefix", ("none",))
            only = "a cached prefix" if plain else f"{axis.name} {', '.join(axis.inside)}"
            advice = advice_on(axis.name, [condition[axis.name] for condition in others])
        gaps.append(Gap(what=only, why=f"{why}{advice}", calls=len(some), example=some[0].name))
    return gaps


def _by_reason(pairs: Sequence[tuple[Case, str]]) -> dict[str, list[Case]]:
    by_reason: dict[str, list[Case]] = {}
    for case, why in pairs:
        by_reason.setdefault(why, []).append(case)
    return by_reason


def separating(refused: Sequence[Conditions], computed: Sequence[Conditions]) -> Split | None:
    """Find the axis whose values tell the refused calls from the computed ones, or None if there is none.

    If several do, an axis that a kernel can declare is what it may have intended, and then the one with the fewest values.
    """
    split = []
    for name in dict.fromkeys(name for condition in (*refused, *computed) for name in condition):
        values, others = (
            sorted({condition[name] for condition in some if name in condition}, key=_by_numbers)
            for some in (refused, computed)
        )
        if values and others and not set(values) & set(others):
            split.append(Split(name, tuple(values), tuple(others)))
    return min(
        split, key=lambda axis: (axis.name not in DECLARABLE, len(axis.inside) + len(axis.outside)), default=None
    )


def advice_on(axis: str, computed: Sequence[str]) -> str:
    """Explain how a kernel declares the values of an axis that it computes, or return "" for an axis that it cannot declare."""
    values = sorted(dict.fromkeys(computed), key=lambda value: (len(value), value) if value.isdecimal() else (0, value))
    if axis == "cached prefix" and set(values) == {"none"}:
        return "; declare what it supports: prefix=False"
    if axis not in ("dtype", "head_dim") or not values:
        return ""
    words = [f'"{value}"' if axis == "dtype" else value for value in values]
    return f"; declare what it supports: {axis}s=({', '.join(words)}{',' * (len(words) == 1)})"
