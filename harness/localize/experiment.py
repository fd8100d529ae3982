"""Finds the condition under which a kernel is wrong, and tests it on fresh calls before reporting it.

Around the smallest failing shape, each axis is varied with all others held, and borders of lengths are found by bisection. The
simplest rules that agree with every sequence so far are tested on fresh calls: where the rules disagree, on both sides of the
first rule, and at its limits. Calls that contradict it join the runs.

After Alhazen (Kampmann et al., "When does my program do this?", ESEC/FSE 2020), which refines a theory of
failures by further inputs, and Hypothesis's explain phase.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise, zip_longest
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from assay.harness.attention.matrix_features import values_of
from assay.harness.attention.shapes import Lens, Shape, shape_of
from assay.harness.evidence.kernel_result import Axis, Tried, Value
from assay.harness.localize.drawing import MOST_WORK, Axes, Drawer
from assay.harness.localize.faults import OUTPUT, Came, wrong_sequences
from assay.harness.localize.features import ASKS, TILES, Known, features
from assay.harness.localize.kernel_runs import CallResult, truth
from assay.harness.localize.lab import KEPT_WORK, Lab, Place, SpentError, work_of
from assay.harness.localize.rules import Points, Rule, cost, holds, meets, necessary, rules
from assay.harness.stats.error_sums import relative_l1
from assay.harness.stats.query_bounds import least_error

_SCANNED = sorted(
    {*range(21), 40, 77, 100, 150, 200, 300, 417}
    | {n + d for n in (32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512) for d in (-1, 0, 1)}
)
"""Lengths to try for a sequence: all small ones, and those around multiples of 16 and 64."""
_COMPANY: tuple[Lens, ...] = (((7, 0),), ((9, 40),), ((3, 300),), ((0, 20),), ((1, 33),), ((70, 12),))
"""Neighbours to put before, after and around a sequence."""
_COUNTS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 32, 33)
_HEADS = (
    (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (16, 1), (2, 2), (4, 2), (6, 2), (8, 2), (10, 2), (14, 2),
    (20, 2), (24, 2), (3, 3), (6, 3), (4, 4), (8, 4), (8, 8), (32, 8),
)  # fmt: skip
_LAYERS = (0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 21, 27, 31)
_DATA = ("normal", "peaky", "K offset", "K outliers", "large values", "scale 1.5 times")
_USUAL: tuple[dict[str, Any], ...] = (
    {"grad_mode": ""}, {"layout": "packed"}, {"ways": ()}, {"asked": ()}, {"first_head": 0}, {"layer": 0},
    {"data": "normal"}, {"head_dim_v": 0}, {"dtype": torch.float32}, {"head_dim": 64}, {"heads": (4, 2)}, {"heads": (2, 1)},
)  # fmt: skip
# Features that a context can hold fixed, by the field of the shape that decides them. If no rule holds on all calls, contexts
# hold more and more of these fields.
_HELD = {
    "phase": ("phase",), "dtype": ("dtype",), "asked": ("asked",), "data": ("data",), "layer": ("layer",), "layout": ("layout",),
    "grad_mode": ("autograd",), "first_head": ("first_head",), "head_dim": ("head_dim",),
    "heads": ("q_heads", "kv_heads"), "lens": ("company",),
}  # fmt: skip
_NARROW = 10  # fields
_CONTEXTS = (*map(tuple[str, ...], ((), ("dtype",))), *(tuple(_HELD)[:n] for n in (1, 2, 3, -1, len(_HELD))))
_CELL_ROUNDS, _ROUNDS, _DRAWN, _TELLING, _NEAR, _BESIDE = 3, 8, 1500, 12, 4, 12
_EACH_SIDE, _LEAST_EACH_SIDE, _MOST_EACH_SIDE, _LACKING = 15, 8, 150, 40
# A rule is a rival of the first if it costs at most this much more.
_TIE = 0.3
# An error depends on the numbers if more than one in `_MIXED` wrong sequences was right with others, or if the simplest wrong call
# is right with one of `_SEEDS` others: a call that is wrong half the time shows that in all but 0.4 % of kernels.
_MIXED, _SEEDS = 20, 8
# Share of the budget for varying one axis at a time. The rest is for testing the condition.
_SCANNING = 0.5
# Shapes drawn for callers that separate rivals.
_LOOKED_AT = 400
# Number of wrong calls whose cells are examined, and the least error of a wrong cell: absolute, and in roundings.
_TOLD, _SEEN, _ROUNDINGS = 20, 1e-3, 30.0


def simplest(lab: Lab, place: Place) -> Place:
    """Simplify a failing shape as long as the sequence stays wrong: usual values, no company, few tokens."""
    while (simpler := next((other for other in _simpler(place) if lab.wrong(other.shape, other.at)), None)) is not None:
        place = simpler
    return place


def _simpler(place: Place) -> Iterator[Place]:
    shape, at = place.shape, place.at
    for change in _USUAL:
        other = replace(shape, **change)
        fewer = "heads" not in change or change["heads"][0] < shape.heads[0]
        if other != shape and fewer:
            yield Place(other, at)
    if len(shape.lens) > 1:
        yield Place(replace(shape, lens=(place.own,)), 0)
    for b in range(len(shape.lens)):
        if b != at and len(shape.lens) > 2:
            yield Place(replace(shape, lens=shape.lens[:b] + shape.lens[b + 1 :]), at - (b < at))
    new, prefix = place.own
    decode = shape.phase == "decode"
    for fewer in _fewer(prefix, int(decode)):
        yield place.with_own(new, fewer)
    for fewer in () if decode else _fewer(new, 1):
        yield place.with_own(fewer, prefix)


def _fewer(count: int, least: int) -> list[int]:
    steps = {least, least + 1, 2, 5, 20, count // 2, count * 3 // 4, count - 16, count - 1}
    return sorted(n for n in steps if least <= n < count)


def _axes(lab: Lab) -> Axes:
    """Return the fields of a shape to vary, and their values. A kernel of latents has no other head_dim.

    Inference mode is left, but never entered: see `run_calls`.
    """
    asked = [()] + [(value,) for values in values_of(lab.guard.assay.features).values() for value in values]
    layouts = ("packed", "sliced", "heads first", "each its own")
    axes = {
        "heads": _HEADS, "head_dim": sorted(d for d, v in lab.dims if d == v), "dtype": lab.dtypes,
        "layer": _LAYERS, "layout": layouts, "data": _DATA, "grad_mode": ("",), "asked": asked, "first_head": (0, 4),
    }  # fmt: skip
    return {name: values for name, values in axes.items() if values}


def _one_axis_at_a_time(lab: Lab, place: Place, axes: Axes) -> tuple[Axis, ...]:
    """Vary each axis of a shape with all others held, within the budget; return the axes with a value that is correct."""
    by_axis: dict[str, dict[Value, bool]] = {}

    def tell(axis: str, shape: Shape, at: int) -> bool | None:
        answer, value = lab.ask(shape)[at], _value(axis, features(shape, at))
        if answer is not None and value is not None:
            by_axis.setdefault(axis, {})[value] = answer
        return answer

    lab.share = _SCANNING
    with suppress(SpentError):
        _vary(lab, place, axes, tell)
    lab.share = 1.0
    return tuple(
        Axis(
            name=name,
            wrong=tuple(v for v, bad in seen.items() if bad),
            right=tuple(v for v, bad in seen.items() if not bad),
        )
        for name, seen in by_axis.items()
    )


def agreeing(axes: Iterable[Axis], wrong: Sequence[Known]) -> tuple[Axis, ...]:
    """Move the values with which a sequence of any call was wrong; return the axes that still have values of both kinds.

    If a number that was right around one call is wrong elsewhere, such an axis does not decide by itself, and is left out.

    Args:
        axes: the axes of one call, each varied alone.
        wrong: the known features of wrong sequences of all calls.
    """
    agreed = []
    for axis in axes:
        bad = dict.fromkeys([*axis.wrong, *(v for known in wrong if (v := _value(axis.name, known)) is not None)])
        right = [value for value in axis.right if value not in bad]
        moved = any(value in bad and not isinstance(value, str) for value in axis.right)
        if bad and right and not moved:
            agreed.append(Axis(name=axis.name, wrong=sorted(bad, key=_by_size), right=sorted(right, key=_by_size)))
    return tuple(agreed)


def _value(axis: str, known: Known) -> Value | None:
    """Return the value of an axis for a sequence with these features, or None if they do not include it."""
    if axis == "sequences alike":
        return known["sequences"] if known["company"] in ("alone", "alike") else None
    if axis == "q heads/kv heads":
        return f"{known['q_heads']:g}/{known['kv_heads']:g}"
    return known.get(_FEATURE_OF.get(axis, axis))


_FEATURE_OF = {"asked for": "asked", "first head": "first_head", "cached prefix": "prefix", "new tokens": "new"}


def _vary(lab: Lab, place: Place, axes: Axes, tell: Callable[[str, Shape, int], bool | None]) -> None:
    """Ask for each value of each axis through `tell`; find the borders of lengths by bisection."""
    shape, own = place.shape, place.own
    for name, values in axes.items():
        for value in dict.fromkeys((getattr(shape, name), *values)):
            tell(_AXIS_WORDS.get(name, name), replace(shape, **{name: value}), place.at)
    decode = shape.phase == "decode"
    if own[0] == 1 and own[1] and len(shape.lens) == 1:
        for phase in ("extend", "decode"):
            tell("phase", replace(shape, phase=phase), 0)
    for given in _COMPANY:
        company = tuple((1, n + p) for n, p in given) if decode else given
        for lens in ((own, *company), (*company, own), (*company, own, *company)):
            lab.ask(replace(shape, lens=lens))
    for count in _COUNTS:
        if work_of(many := replace(shape, lens=(own,) * count)) < MOST_WORK:
            tell("sequences alike", many, 0)
    for which in (1,) if decode else (1, 0):

        def asked(n: int, which: int = which) -> bool | None:
            pair = (own[0], n) if which else (n, own[1])
            return tell("cached prefix" if which else "new tokens", place.with_own(*pair).shape, place.at)

        seen = [(n, asked(n)) for n in sorted({*_SCANNED, own[which]}) if n or (which and not decode)]
        for (low, below), (high, above) in pairwise([(n, wrong) for n, wrong in seen if wrong is not None]):
            while below != above and high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if asked(middle) == below else (low, middle)


_AXIS_WORDS = {
    "heads": "q heads/kv heads",
    "asked": "asked for",
    "grad_mode": "autograd",
    "first_head": "first head",
}


def _by_size(value: Value) -> tuple[str, float]:
    """Sort words before numbers, and words that end in a number by it."""
    if not isinstance(value, str):
        return "~", value
    name, _, number = value.rpartition(" ")
    return (name, float(number)) if number.replace(".", "").isdigit() else (value, 0.0)


@dataclass(frozen=True)
class Experiments:
    """Results of experiments.

    Attributes:
        tried: the condition under which sequences are wrong, or None if no simple one agrees with every call or the budget ran
            out.
        place: the simplest wrong sequence, or None if no sequence is wrong for all numbers.
        axes: its axes, each varied alone, as all calls allow.
        by_numbers: whether its outcome, or that of many calls, depends on the numbers: no axis describes that.
        kept: small calls that were made, with their shapes.
        points: the features of all sequences that were run, and whether each was wrong.
        drawer: draws more shapes.
        failed: what went wrong in them, as lines of evidence.
    """

    tried: Tried | None = None
    place: Place | None = None
    axes: tuple[Axis, ...] = ()
    by_numbers: bool = False
    kept: Sequence[tuple[Shape, CallResult]] = ()
    points: Sequence[tuple[Known, bool]] = ()
    drawer: Drawer | None = None
    failed: tuple[str, ...] = ()

    @property
    def said(self) -> dict[str, object]:
        """The fields of a `KernelResult` that they fill."""
        return {"tried": self.tried, "axes": self.axes, "by_numbers": self.by_numbers}

    def drawn(self) -> Iterator[Shape]:
        """Yield shapes of untried calls like those that were tried, or nothing if nothing was tried."""
        if self.drawer is None:
            return iter(())
        self.drawer.held = ()
        return self.drawer(_LOOKED_AT)


NOTHING_TRIED = Experiments()


def experiment(
    lab: Lab, failing: Iterable[Place], others: Iterable[tuple[Shape, Came]] = (), seed: int = 0
) -> Experiments:
    """Find the condition under which sequences are wrong, and the simplest wrong sequence.

    Args:
        lab: the kernel.
        failing: wrong sequences, smallest calls first. The first that stays wrong with other numbers becomes the base.
        others: earlier calls and their outcomes.
        seed: the seed of all draws.
    """
    place: Place | None = None
    varied: tuple[Axis, ...] = ()
    drawer: Drawer | None = None
    try:
        place = next((at for at in failing if lab.wrong(at.shape, at.at)), None)
        if place is None:
            return _shown(lab)
        place = simplest(lab, place)
        lab.base, axes = place.shape, _axes(lab)
        varied = _one_axis_at_a_time(lab, place, axes)
        for shape, came in others:
            lab.learn(shape, came)
        drawer = Drawer(lab, place, axes, seed)
        for shape in drawer(40):
            lab.ask(shape)
        own = features(place.shape, place.at)
        for drawer.held in _CONTEXTS:
            if len(drawer.held) >= _NARROW and len(lab.mixed) * _NARROW > lab.points.wrong.count(True):
                break  # with all else held, a fault that depends on the numbers can look like any condition
            context = {name: own[name] for field in drawer.held for name in _HELD[field]}
            # Within a context, "every call is wrong" was tried on one side alone.
            if (tried := _challenged(lab, drawer, context)) is not None and (tried.rule or not drawer.held):
                if lab.name == OUTPUT:
                    tried = tried.model_copy(update={"part": _part(lab, drawer, tried)})
                return _shown(lab, tried if lab.repeats() else None, place, varied, drawer)
    except SpentError:
        pass
    return _shown(lab, None, place, varied, drawer)


def standing(tried: Tried, wrong: Sequence[Known]) -> Tried | None:
    """Return a condition with the number of wrong sequences outside its context, or None if it calls one inside correct.

    A condition on features that are not known of a sequence is not compared with it: only a lab knows the kind of data in a call.

    Args:
        tried: the condition.
        wrong: the known features of wrong sequences that it was not compared with so far.
    """
    named = {*tried.context, *(prop.feature for prop in tried.rule)}
    inside = [tried.context.items() <= known.items() for known in wrong if named <= known.keys()]
    kept = [known for known in wrong if named <= known.keys()]
    if any(there and not holds(tried.rule, known) for there, known in zip(inside, kept, strict=True)):
        return None
    return tried.model_copy(update={"outside": tried.outside + inside.count(False)})


def known_of_wrong(results: Iterable[CallResult]) -> list[Known]:
    """List the features of the wrong sequences of calls, except for the kind of data, which a call does not show."""
    every = [(shape_of(result.call), wrong_sequences(result)) for result in results]
    known = [features(shape, b) for shape, answer in every for b, wrong in enumerate(answer) if wrong]
    return [{name: value for name, value in of.items() if name != "data"} for of in known]


def _shown(
    lab: Lab,
    tried: Tried | None = None,
    place: Place | None = None,
    varied: tuple[Axis, ...] = (),
    drawer: Drawer | None = None,
) -> Experiments:
    # Within its context, the condition agrees with all of these.
    tried = tried and standing(
        tried, [known for known, bad in zip(lab.points.known, lab.points.wrong, strict=True) if bad]
    )
    by_numbers = place is not None and (tried is None or tried.outside > 0) and _by_numbers(lab, place)
    tried = _needed(lab, drawer, None if by_numbers else tried)
    kept = [(shape, came) for shape, came in lab.kept if isinstance(came, CallResult)]
    points = list(zip(lab.points.known, lab.points.wrong, strict=True))
    wrong = [known for known, bad in points if bad]
    return Experiments(tried, place, () if by_numbers else agreeing(varied, wrong), by_numbers, kept, points, drawer)


def _needed(lab: Lab, drawer: Drawer | None, tried: Tried | None) -> Tried | None:
    """Return a condition that all wrong sequences meet instead of none, or of one that leaves some of them out."""
    if drawer is None or lab.name != OUTPUT or (tried is not None and not tried.outside):
        return tried
    rule = _tested(lab, drawer) if tried is None else tried.rule
    points = _of_any_numbers(lab)
    bad, met = np.array(points.wrong, dtype=bool), points.meeting(rule)
    if not rule or (bad & ~met).any() or not lab.repeats():
        return tried
    return Tried(rule=rule, wrong=int(bad.sum()), right=int((~met).sum()), calls=lab.asked, always=False)


def _tested(lab: Lab, drawer: Drawer) -> Rule:
    """Return the properties that all wrong sequences have, fresh ones included that lack one; without a limit if time is up."""
    drawer.held = ()
    for _ in range(_CELL_ROUNDS):
        rule = necessary(_of_any_numbers(lab))
        try:
            for prop in rule:
                others = tuple(other for other in rule if other != prop)
                lacking = (shape for shape in drawer(_DRAWN) if any(
                    new and holds(others, known := features(shape, b)) and not holds((prop,), known)
                    for b, (new, _) in enumerate(shape.lens)
                ))  # fmt: skip
                for shape in islice(lacking, _LACKING):
                    lab.ask(shape)
        except SpentError:
            return tuple(prop for prop in rule if prop.kind == "in")
        if not rule or necessary(_of_any_numbers(lab)) == rule:
            return rule
    return ()


def _of_any_numbers(lab: Lab) -> Points:
    """Return the points, with those as wrong that were wrong with some numbers."""
    return Points([*lab.points.known, *lab.mixed], [*lab.points.wrong, *[True] * len(lab.mixed)])


def _by_numbers(lab: Lab, place: Place) -> bool:
    """Return True if the outcome of the simplest call, or of many calls, changes with the numbers."""
    if len(lab.mixed) * _MIXED > lab.points.wrong.count(True):
        return True
    again = (lab.told(place.shape, lab.made(place.shape, seed)) for seed in range(2, 2 + _SEEDS))
    return any(answer[place.at] is False for answer in again)


def _challenged(lab: Lab, drawer: Drawer, context: Mapping[str, Value]) -> Tried | None:
    """Return a rule within a context that survives fresh calls, or None if there is none."""
    for _ in range(_ROUNDS):
        rivals = rules(lab.points.within(context))
        if not rivals:
            return None
        shapes, drawn = list[Shape](), Points()
        for shape in drawer(_DRAWN):
            for b, (new, _) in enumerate(shape.lens):
                known = features(shape, b)
                if new and context.items() <= known.items():
                    shapes.append(shape)
                    drawn.add(known, False)
        met = np.array([drawn.meeting(rule) for rule in rivals])
        counts, refuted = {True: 0, False: 0}, False
        telling = ((shapes[int(i)], None) for i in _telling(lab.points.within(context), drawn, rivals[0], met))
        between = ((shape, None) for shape in _between(lab, drawer, context, rivals[0]))
        others = ((shapes[int(i)], side) for side in counts for i in np.flatnonzero(met[0] == side)[:_MOST_EACH_SIDE])
        for shape, side in chain(telling, between, others):
            if shape in lab.known or (side is not None and counts[side] >= _EACH_SIDE):
                continue
            answer = lab.ask(shape)
            for b, (new, _) in enumerate(shape.lens):
                known = features(shape, b)
                if new and lab.counts(shape, answer[b]) and context.items() <= known.items():
                    inside = holds(rivals[0], known)
                    refuted |= inside != answer[b]
                    counts[inside] += 1
        within = lab.points.within(context)
        still = rules(within)
        if not refuted and still[:1] == rivals[:1]:
            enough = counts[True], counts[False] if rivals[0] else _LEAST_EACH_SIDE
            if min(enough) < _LEAST_EACH_SIDE or not within.confirm(rivals[0], 0, _LEAST_EACH_SIDE):
                return None
            alike = [rule for rule in still[1:] if rule in rivals and cost(rule) <= cost(still[0]) + _TIE]
            ties = [rule for rule in alike if {prop.feature for prop in {*rule} ^ {*still[0]}} - _FOLLOW]
            return Tried(
                fault=lab.name, rule=within.stated(rivals[0]), context=dict(context), wrong=counts[True], right=counts[False],
                calls=lab.asked, rivals=tuple(map(within.stated, ties[:1])),
            )  # fmt: skip
    return None


def _telling(points: Points, drawn: Points, rule: Rule, met: NDArray[np.bool_]) -> Iterator[np.intp]:
    """Yield the drawn sequences to ask for: those on which rivals differ, and those nearest to a limit of the first.

    A call that lacks exactly one property of a rule says more than one that lacks several. So does a call that meets the rule but
    lacks another property that all wrong calls shared.
    """
    for rival in met[1:]:
        yield from np.flatnonzero(rival != met[0])[:_NEAR]
    inside = np.flatnonzero(met[0])
    lacks = ~np.array([drawn.meeting((prop,))[inside] for prop in points.common()])
    for _ in range(_TELLING):
        best = int(lacks.sum(0).argmax()) if lacks.size else 0
        if not lacks.size or not lacks[:, best].any():
            break
        yield inside[best]
        lacks = lacks[~lacks[:, best]]
    for prop in rule:
        others = drawn.meeting(tuple(other for other in rule if other != prop))
        for side, most in ((met[0], _NEAR), (others & ~met[0], _LEAST_EACH_SIDE)):
            there = np.flatnonzero(side)
            yield from there[np.argsort(drawn.off(prop)[there], kind="stable")][:most]


def _between(lab: Lab, drawer: Drawer, context: Known, rule: Rule) -> Iterator[Shape]:
    """Yield shapes with a sequence between the correct and the wrong ones at each limit of a rule, to bisect the limits."""
    inside = np.array([context.items() <= known.items() for known in lab.points.known])
    places = [place for place, there in zip(lab.places, inside, strict=True) if there]
    points = lab.points.within(context)
    for prop, wrong, right in list(points.gaps(rule)):
        others, (low, high), middle = (
            tuple(other for other in rule if other != prop),
            sorted((wrong, right)),
            (wrong + right) / 2,
        )
        off = points.off(prop)  # infinite where a sequence has no such number
        there = np.flatnonzero(points.meeting(others) & np.isfinite(off))
        nearest = [places[int(i)] for i in there[np.argsort(off[there], kind="stable")]]
        kinds: dict[tuple[object, ...], Place] = {}
        for place in nearest:
            kinds.setdefault((place.shape.phase, place.shape.heads, len(place.shape.lens)), place)
        drawn: dict[Value, Shape] = {}
        for place in islice(kinds.values(), _BESIDE):
            now = features(place.shape, place.at)[prop.feature]
            for shape in drawer.beside(place.shape, round(middle - float(now))):
                known = features(shape, place.at)
                value = known[prop.feature]
                if low < float(value) < high and context.items() <= known.items() and holds(others, known):
                    drawn.setdefault(value, shape)
        for value in sorted(drawn, key=lambda value: abs(float(value) - middle))[:_NEAR]:
            yield drawn[value]


# Features that follow from each other if sequences have one new token or are alone, and features that calls ask for.
_FOLLOW = {
    "prefix", "length", "prefix-new", "key_end", "longest", "longest_prefix", "shortest", "least_new", "least_prefix", "new",
    "earlier-length", "total_keys", "row_end", "total_new", "row", "length-first", "prefix-first", "length-before", "prefix-before",
    "first_prefix", "asked", "window", "length-window", "softcap", "sinks", "temperature", "stored", "packed", "ratio",
    *(f"asks: {what}" for what in ASKS), *(f"{of}_of_{tile}" for of in ("tiles", "items") for tile in TILES),
}  # fmt: skip


def _part(lab: Lab, drawer: Drawer, tried: Tried) -> Rule:
    """Return the rule for the wrong queries, heads and dims that holds on fresh calls too, or () if all of them are wrong."""
    cells, dims = Points(), Points()

    def there(shape: Shape) -> list[int]:
        known = [features(shape, b) for b in range(len(shape.lens))] if shape.dtype == drawer.dtype else []
        return [b for b, of in enumerate(known) if shape.lens[b][0] and meets(tried, of)]

    kept = {shape: came for shape, came in lab.kept if isinstance(came, CallResult)}
    for shape in _unlike(filter(there, kept), _TOLD):
        _add_cells(kept[shape], there(shape), cells, dims)
    part: Rule = ()
    for points in (cells, dims):
        for _ in range(_CELL_ROUNDS):
            if not any(chosen := rules(points, 1)):
                break
            before = len(points.known)
            fresh = (shape for shape in drawer(_DRAWN) if work_of(shape) <= KEPT_WORK and there(shape))
            for shape in _unlike(fresh, _EACH_SIDE):
                if isinstance(came := lab.made(shape, 0), CallResult):
                    _add_cells(came, there(shape), cells, dims)
            if points.confirm(chosen[0], before, _LEAST_EACH_SIDE):
                part += chosen[0]
                break
    return part


def _unlike(shapes: Iterable[Shape], most: int) -> Iterator[Shape]:
    """Yield shapes that differ in more than lengths before those that do not."""
    kinds: dict[tuple[object, ...], list[Shape]] = {}
    for shape in shapes:
        kinds.setdefault((shape.asked, shape.phase, shape.heads, shape.head_dim), []).append(shape)
    return islice((shape for some in zip_longest(*kinds.values()) for shape in some if shape is not None), most)


def _ends(wrong: torch.Tensor) -> list[int]:
    """List some indices of a row of flags: around its first changes, and at the borders of blocks."""
    changes = (wrong[1:] != wrong[:-1]).nonzero().flatten()[:4].tolist()
    near = {place + more for place in changes for more in (0, 1)}
    return sorted(
        n for n in near | {0, 1, 15, 16, 31, 32, 63, 64, 128, len(wrong) - 2, len(wrong) - 1} if 0 <= n < len(wrong)
    )


def _add_cells(result: CallResult, sequences: Iterable[int], cells: Points, dims: Points) -> None:
    """Add some queries and heads of a call's sequences, and some dims of wrong ones, but nothing that is borderline."""
    call, ratio, exact = result.call, result.call.heads.group, least_error(result.call.q.dtype)
    off, right = relative_l1(result.by_row).nan_to_num(nan=np.inf), truth(call)
    wrong_from, width = max(_SEEN, _ROUNDINGS * exact), right.shape[-1]
    size = right.abs().mean(-1, keepdim=True)
    by_dim = ((result.out[: len(right)] - right).abs() / size).nan_to_num(nan=np.inf)
    shows = (right.abs() / size).nan_to_num() > wrong_from  # a dim that is nearly zero may be correct by chance
    for b in sequences:
        start, new, q_heads = call.cu_seqlens_q.tolist()[b], call.lens_q[b], call.q.shape[1]
        for i in _ends((off[start : start + new] >= wrong_from).any(1)):
            for head in _ends((off[start : start + new] >= wrong_from).any(0)):
                error = float(off[start + i, head])
                if exact < error < wrong_from:
                    continue
                cells.add(
                    {
                        "query": i, "queries_after": new - 1 - i, "position": i + call.prefixes[b], "query_row": start + i,
                        "head": head, "heads_after": q_heads - 1 - head, "kv_head": head // ratio, "head_in_group": head % ratio,
                        "packed_row": i * ratio + head % ratio,
                        "position-window": i + call.prefixes[b] - (call.spec.mask.window or np.nan),
                    },
                    error >= wrong_from,
                )  # fmt: skip
                if error >= wrong_from and i in (0, new - 1) and head in (0, q_heads - 1):
                    for dim in _ends(by_dim[start + i, head] > wrong_from / 10):
                        known = {"dim": dim, "dims_after": width - 1 - dim, "width": width}
                        if (off_there := bool(by_dim[start + i, head, dim] > wrong_from / 10)) or shows[
                            start + i, head, dim
                        ]:
                            dims.add(known, off_there)
