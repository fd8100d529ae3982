"""Which calls a wrong kernel gets wrong: tried before it is said.

Around the smallest failing shape one axis at a time is varied with all others held,
and borders are found by bisection. The simplest
rules that agree with every sequence that was run are tried on fresh calls: on those on which they disagree, and on calls that meet
the first and that do not. What contradicts it joins the runs. After Alhazen (Kampmann et al., "When does my program do this?",
ESEC/FSE 2020), which refines a theory of failures by further inputs, and Hypothesis's explain phase.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.matrix_features import longest_window, values_of
from assay.harness.attention.shapes import Lens, Shape, shape_of
from assay.harness.evidence.kernel_result import Axis, Tried, Value
from assay.harness.localize.faults import OUTPUT, Came, Fault, WrongOutputs, came_of, wrong_sequences
from assay.harness.localize.guard import Guard
from assay.harness.localize.kernel_runs import CallResult, truth
from assay.harness.localize.rules import ASKS, Known, Points, Rule, cost, holds, meets, rules
from assay.harness.stats.error_sums import relative_l1
from assay.harness.stats.query_bounds import least_error

_SCANNED = sorted(
    {*range(21), 40, 77, 100, 150, 200, 300, 417}
    | {n + d for n in (32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512) for d in (-1, 0, 1)}
)
"""Lengths that are tried of a sequence: all small ones, and those around multiples of 16 and 64."""
_BLOCKS = (16, 32, 64, 128, 256)
_COMPANY: tuple[Lens, ...] = (((7, 0),), ((9, 40),), ((3, 300),), ((0, 20),), ((1, 33),), ((70, 12),))
"""Neighbours that are put before, behind and around a sequence."""
_COUNTS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 32, 33)
_HEADS = (
    (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (16, 1), (2, 2), (4, 2), (6, 2), (8, 2), (10, 2), (14, 2),
    (3, 3), (6, 3), (4, 4), (8, 4), (8, 8), (32, 8),
)  # fmt: skip
_LAYERS = (0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 21, 27, 31)
_DATA = ("normal", "peaky", "K offset", "K outliers", "large values", "scale 1.5 times")
_USUAL: tuple[dict[str, Any], ...] = (
    {"grad_mode": ""}, {"layout": "packed"}, {"ways": ()}, {"asked": ()}, {"first_head": 0}, {"layer": 0},
    {"data": "normal"}, {"head_dim_v": 0}, {"dtype": torch.float32}, {"head_dim": 64}, {"heads": (4, 2)}, {"heads": (2, 1)},
)  # fmt: skip
# Features that a context holds, by the field of the shape that decides them, and the fields that contexts hold, narrower and
# narrower, where no rule holds on all calls.
_HELD = {
    "phase": ("phase",), "dtype": ("dtype",), "asked": ("asked",), "data": ("data",), "layer": ("layer",), "layout": ("layout",),
    "grad_mode": ("autograd",), "first_head": ("first_head",), "head_dim": ("head_dim",),
    "heads": ("q_heads", "kv_heads"), "lens": ("company",),
}  # fmt: skip
_NARROW = 10  # fields
_CONTEXTS = (*map(tuple[str, ...], ((), ("dtype",))), *(tuple(_HELD)[:n] for n in (1, 2, 3, -1, len(_HELD))))
_CELL_ROUNDS, _ROUNDS, _DRAWN, _TELLING, _NEAR, _BESIDE = 3, 8, 1500, 12, 4, 12
_EACH_SIDE, _LEAST_EACH_SIDE, _MOST_EACH_SIDE = 15, 8, 150
# What a rule may cost more than the first and still be its rival.
_TIE = 0.3
# Products of queries, keys, q heads and head dim of a call that is drawn: a few milliseconds.
_MOST_WORK = 2**24
# The same of a call whose result is kept, to try on it what is said.
_KEPT_WORK = 2**22
# Share of the budget up to which axes are varied one at a time: the rest is for what is said.
_SCANNING = 0.5
# Calls that are made again at the end: so many of the first ones, and as many of all.
_AGAIN = 8
# Wrong calls that are made with other numbers too before only each so manieth is.
_ALWAYS_AGAIN, _NOW_AND_THEN = 30, 5
# Shapes that are drawn for whoever tells rivals apart.
_LOOKED_AT = 400
# Wrong calls whose cells are looked at, and the least error of a cell that counts as wrong, also in roundings.
_TOLD, _SEEN, _ROUNDINGS = 20, 1e-3, 30.0
# Seed of the numbers that calls have in common.
_POOL = 4711
_TILES = (16, 64, 128)


def features(shape: Shape, at: int) -> dict[str, Value]:
    """List what is known of a sequence of a call: of itself, of its company, and of the call."""
    (new, prefix), lens = shape.lens[at], [n + p for n, p in shape.lens]
    others = [pair for b, pair in enumerate(shape.lens) if b != at]
    before, first = shape.lens[at - 1] if at else (np.nan, np.nan), shape.lens[0] if at else (np.nan, np.nan)
    (q_heads, kv_heads), window, ratio = shape.heads, longest_window(shape.asked), shape.heads[0] // shape.heads[1]
    earlier = shape.lens[:at] or ((np.nan, np.nan),)
    row, key_row = sum(n for n, _ in shape.lens[:at]), sum(lens[:at])
    known: dict[str, Value] = {
        "new": new, "prefix": prefix, "length": new + prefix, "prefix-new": prefix - new,
        "sequences": len(lens), "index": at, "after": len(lens) - 1 - at,
        "total_new": sum(n for n, _ in shape.lens), "total_keys": sum(lens), "row": row, "row_end": row + new, "key_row": key_row,
        "key_end": key_row + new + prefix, "packed": new * ratio, "longest-length": max(lens) - new - prefix,
        "longest": max(lens), "longest_new": max(n for n, _ in shape.lens),
        "longest_prefix": max(p for _, p in shape.lens), "shortest": min(lens), "least_new": min(n for n, _ in shape.lens),
        "least_prefix": min(p for _, p in shape.lens), "earlier_least_new": min(n for n, _ in earlier),
        "earlier-length": max(n + p for n, p in earlier) - new - prefix, "before_new": before[0], "before_prefix": before[1],
        "first_new": first[0], "first_prefix": first[1], "length-first": new + prefix - sum(first),
        "length-before": new + prefix - sum(before), "new-before": new - before[0], "prefix-before": prefix - before[1],
        "prefix-first": prefix - first[1],
        "q_heads": q_heads, "kv_heads": kv_heads, "ratio": ratio, "head_dim": shape.head_dim,
        "head_dim_v": shape.head_dim_v or np.nan, "layer": shape.layer, "first_head": shape.first_head,
        "window": window or np.nan, "length-window": new + prefix - window if window else np.nan, "items": len(lens) * q_heads,
        "phase": shape.phase, "dtype": str(shape.dtype).removeprefix("torch."), "data": shape.data,
        "layout": shape.layout, "autograd": shape.grad_mode or "as called",
        "softcap": _number(shape, "softcap"), "sinks": _number(shape, "sinks near"), "temperature": _number(shape, "temperature"),
        "stored": next((name for name in shape.asked if name.startswith("K and V")), "none"),
        **{f"asks: {what}": str(any(start in name for name in shape.asked)) for what, start in ASKS.items()},
        "asked": " and ".join(sorted(shape.asked)) or "nothing", "ways": " and ".join(shape.ways) or "none",
        "cached": {0: "none", len(lens): "all"}.get(sum(p > 0 for _, p in shape.lens), "some"),
        "company": "alone" if not others else "alike" if len(set(shape.lens)) == 1 else "unlike",
        "as_long_as_another": str(new + prefix in [n + p for n, p in others]),
        "as_many_new_as_another": str(new in [n for n, _ in others]), "an_empty_one": str(any(not n for n, _ in shape.lens)),
        "one_prefix": str(len({p for _, p in shape.lens}) == 1),
        "another_without_prefix": str(any(not p for _, p in others)), "another_with_prefix": str(any(p for _, p in others)),
    }  # fmt: skip
    for tile in _TILES:
        tiles = [-(-n // tile) for n, _ in shape.lens]
        known |= {f"tiles_of_{tile}": sum(tiles), f"items_of_{tile}": sum(tiles[: at + 1]) * q_heads}
    return known


def _number(shape: Shape, what: str) -> float:
    """Return the number of a feature that a call asks for, NaN for none."""
    return next((float(name.rpartition(" ")[2]) for name in shape.asked if name.startswith(f"{what} ")), np.nan)


def drawn_call(shape: Shape, device: str, seed: int = 0) -> AttentionCall:
    """Make the call that a lab asks of a shape; errors are those of `Shape.make`."""
    return shape.make(zlib.crc32(repr((shape, seed)).encode()), device, _POOL)


class SpentError(Exception):
    """As many calls were made, or as much time was taken, as was allowed."""


@dataclass
class Lab:
    """A kernel that is asked for calls of given shapes.

    Attributes:
        guard: the kernel.
        dims: (head_dim, head_dim_v) that it is asked for: with others, a kernel may write beyond its output.
        dtypes: dtypes that it is asked for.
        device: of the calls.
        spent: returns the share of the time that is used up.
        most: most calls.
        fault: tells whether a sequence is wrong.
        name: of the fault.
        points: the sequences that were run.
        places: where they lie.
        asked: calls that were made.
        share: of time and calls, what may be used for now.
        mixed: sequences that were wrong with some numbers and right with others.
        base: the failing shape that experiments begin at.
        known: the answers by shape.
        wrong_ones: those with a sequence that is wrong.
        kept: what came of small calls.
    """

    guard: Guard
    dims: frozenset[tuple[int, int]]
    dtypes: tuple[torch.dtype, ...]
    device: str
    spent: Callable[[], float]
    most: int = 1500
    fault: Fault = field(default_factory=WrongOutputs)
    name: str = OUTPUT
    points: Points = field(default_factory=Points)
    places: list[Place] = field(default_factory=list)
    asked: int = 0
    share: float = 1.0
    mixed: int = 0
    base: Shape | None = None
    known: dict[Shape, tuple[bool | None, ...]] = field(default_factory=dict)
    wrong_ones: list[Shape] = field(default_factory=list)
    kept: list[tuple[Shape, Came]] = field(default_factory=list)

    def ask(self, shape: Shape) -> tuple[bool | None, ...]:
        """Tell for each sequence whether it is wrong; None where that depends on the numbers, or no query of it was computed.

        Calls that have a wrong sequence are made again with other numbers: all of them while that matters.

        Raises:
            SpentError: nothing is left of the budget, or of what may be used for now.
        """
        if shape not in self.known:
            if max(self.asked / self.most, self.spent()) >= self.share:
                raise SpentError
            self.known[shape] = answer = self._answer(shape)
            if True in answer:
                self.wrong_ones.append(shape)
            self._add(shape, answer)
        return self.known[shape]

    def _add(self, shape: Shape, answer: Sequence[bool | None]) -> None:
        for b, wrong in enumerate(answer):
            if shape.lens[b][0] and self.counts(shape, wrong):
                self.points.add(features(shape, b), bool(wrong))
                self.places.append(Place(shape, b))

    def wrong(self, shape: Shape, at: int) -> bool:
        """Return True if this sequence is wrong, with all numbers that were tried."""
        return self.ask(shape)[at] is True

    def repeats(self) -> bool:
        """Return True if some calls, at least one, give the same answers again.

        Of a kernel that keeps state, no condition of a call is true.
        """
        kept = [(shape, came) for shape, came in self.kept if self.base is None or shape.data == self.base.data]
        chosen = [*kept[:_AGAIN], *kept[:: max(1, len(kept) // _AGAIN)]]
        same = [self.told(shape, came) == self.told(shape, self.made(shape, 0)) for shape, came in chosen]
        return bool(same) and all(same)

    def told(self, shape: Shape, came: Came | None) -> tuple[bool | None, ...]:
        """Tell for each sequence whether it is wrong, by what came of the call; None where that cannot be told."""
        answer = None if came is None else self.fault(came)
        return answer if isinstance(answer, tuple) else (answer,) * len(shape.lens)

    def learn(self, shape: Shape, came: Came) -> None:
        """Take a call that was made before into account."""
        self._add(shape, self.told(shape, came))

    def counts(self, shape: Shape, wrong: bool | None) -> bool:
        """Return True if an answer says where the kernel is wrong: on data of a kind of its own, a small error may not show."""
        shows = self.base is None or self.base.data != "normal" or shape.data == "normal"
        return wrong is True or (wrong is False and shows)

    def made(self, shape: Shape, seed: int) -> Came | None:
        """Have the kernel compute a call of a shape; None if it is not asked for such calls, or the numbers overflow the dtype."""
        if any(new + prefix < 0 for new, prefix in shape.lens):  # in cross attention, keys may be fewer than queries
            return None
        try:
            call = drawn_call(shape, self.device, seed)
        except (LookupError, ValueError):
            return None
        if not self._may_ask(call):
            return None
        self.asked += 1
        return came_of(self.guard, call)

    def _may_ask(self, call: AttentionCall) -> bool:
        declared, dims = self.guard.assay, (call.q.shape[2], call.v.shape[2])
        asked = call.phase in declared.phases and not declared.excludes(call)
        return asked and dims in self.dims and call.q.dtype in self.dtypes

    def _answer(self, shape: Shape) -> tuple[bool | None, ...]:
        first = self.made(shape, 0)
        drawn = self.told(shape, first)
        if first is not None and _work(shape) <= _KEPT_WORK:
            if isinstance(first, CallResult) and isinstance(self.fault, WrongOutputs):
                first = first.updated(clearly=self.fault.clearly(shape.dtype))
            self.kept.append((shape, first))
        # A fault that never depended on the numbers is asked now and then whether it does.
        doubted = self.mixed or len(self.wrong_ones) < _ALWAYS_AGAIN or not len(self.wrong_ones) % _NOW_AND_THEN
        other = self.told(shape, self.made(shape, 1)) if any(drawn) and doubted else drawn
        self.mixed += sum(a is not b is not None for a, b in zip(drawn, other, strict=True))
        pairs = zip(drawn, other, shape.lens, strict=True)
        return tuple(a if b in (a, None) and new else None for a, b, (new, _) in pairs)


@dataclass(frozen=True)
class Place:
    """A sequence of a call that is wrong."""

    shape: Shape
    at: int

    @property
    def own(self) -> tuple[int, int]:
        """Its new tokens and its prefix."""
        return self.shape.lens[self.at]

    def with_own(self, new: int, prefix: int) -> Place:
        """Return the same with other lengths."""
        lens = tuple((new, prefix) if b == self.at else pair for b, pair in enumerate(self.shape.lens))
        return Place(replace(self.shape, lens=lens), self.at)


def simplest(lab: Lab, place: Place) -> Place:
    """Make a failing shape simpler as long as the sequence stays wrong: usual values, no company, few tokens."""
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


Axes = Mapping[str, Sequence[Any]]


def _axes(lab: Lab) -> Axes:
    """Return the fields of a shape that are varied, and their values."""
    asked = [()] + [(value,) for values in values_of(lab.guard.assay.features).values() for value in values]
    layouts = ("packed", "sliced", "heads first", "each its own")
    return {
        "heads": _HEADS, "head_dim": sorted(d for d, v in lab.dims if d == v), "dtype": lab.dtypes,
        "layer": _LAYERS, "layout": layouts, "data": _DATA, "grad_mode": ("", "inference_mode"), "asked": asked, "first_head": (0,
        4),
    }  # fmt: skip


def _one_axis_at_a_time(lab: Lab, place: Place, axes: Axes) -> tuple[Axis, ...]:
    """Vary each axis of a shape with all others held, as far as the budget for it goes.

    Returns:
        The axes that have a value with which the sequence is right.
    """
    by_axis: dict[str, dict[Value, bool]] = {}

    def tell(axis: str, value: Value, answer: bool | None) -> None:
        if answer is not None:
            by_axis.setdefault(axis, {})[value] = answer

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
        for name, seen in ((name, dict(sorted(seen.items(), key=_by_size))) for name, seen in by_axis.items())
        if not all(seen.values())
    )


def _vary(lab: Lab, place: Place, axes: Axes, tell: Callable[[str, Value, bool | None], None]) -> None:
    """Ask for each value of each axis, and tell what came of it; find the borders of lengths by bisection."""
    shape, own = place.shape, place.own
    for name, values in axes.items():
        for value in values:
            tell(_AXIS_WORDS.get(name, name), _in_words(value), lab.ask(replace(shape, **{name: value}))[place.at])
    decode = shape.phase == "decode"
    if own[0] == 1 and own[1] and len(shape.lens) == 1:
        tell("phase", shape.phase, True)
        other = "extend" if decode else "decode"
        tell("phase", other, lab.ask(replace(shape, phase=other))[0])
    for given in _COMPANY:
        company = tuple((1, n + p) for n, p in given) if decode else given
        for lens in ((own, *company), (*company, own), (*company, own, *company)):
            lab.ask(replace(shape, lens=lens))
    for count in _COUNTS:
        if _work(many := replace(shape, lens=(own,) * count)) < _MOST_WORK:
            tell("sequences alike", count, lab.ask(many)[0])
    for which in (1,) if decode else (1, 0):

        def asked(n: int, which: int = which) -> bool | None:
            pair = (own[0], n) if which else (n, own[1])
            answer = lab.ask(place.with_own(*pair).shape)[place.at]
            tell("cached prefix" if which else "new tokens", n, answer)
            return answer

        seen = [(n, asked(n)) for n in _SCANNED if n or (which and not decode)]
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


def _in_words(value: object) -> Value:
    if isinstance(value, tuple):
        return " and ".join(value) or "nothing" if not value or isinstance(value[0], str) else "/".join(map(str, value))
    return value if isinstance(value, int) else str(value).removeprefix("torch.")


def _by_size(pair: tuple[Value, bool]) -> float:
    return float("-inf") if isinstance(pair[0], str) else pair[0]


def _work(shape: Shape) -> int:
    return sum(n * (n + p) for n, p in shape.lens) * shape.heads[0] * shape.head_dim


class _Drawer:
    """Draws shapes at random: around a failing one, and around those that were run."""

    def __init__(self, lab: Lab, place: Place, axes: Axes, seed: int) -> None:
        self._lab, self._place, self._axes, self._random = lab, place, axes, random.Random(seed)
        self._most, self._longest = max(_MOST_WORK, 4 * _work(place.shape)), max(600, 2 * sum(place.own))
        self.held: Collection[str] = ()
        self.dtype = place.shape.dtype

    def __call__(self, count: int) -> Iterator[Shape]:
        """Yield shapes that were not asked for, at most so many, that have the base's values of the fields that are held."""
        base = {name: getattr(self._place.shape, name) for name in self.held if name != "lens"}
        for _ in range(count):
            shape = replace(self._changed() if self._random.random() < 0.5 else self._fresh(), **base)
            lens = shape.lens[:1] if "lens" in self.held else shape.lens
            if shape.phase == "decode":
                lens = tuple((1, max(1, n + p - 1)) for n, p in lens)
            shape = replace(shape, lens=lens)
            if shape not in self._lab.known and _work(shape) <= self._most:
                yield shape

    def beside(self, shape: Shape, by: int) -> Iterator[Shape]:
        """Yield shapes that differ from one in a length, by a few tokens or about this number, or in heads."""
        if "heads" not in self.held:
            yield from (replace(shape, heads=heads) for heads in _HEADS)
        steps = {-2, -1, 1, 2, *(by // n for n in {1, 2, shape.heads[0], shape.heads[0] // shape.heads[1]})} - {0}
        for b, (new, prefix) in enumerate(shape.lens):
            pairs = [(new, prefix + step) for step in steps]
            pairs += [(new + step, prefix) for step in steps if shape.phase != "decode" and new]
            for pair in pairs:
                if pair[0] >= 1 and pair[1] >= (shape.phase == "decode"):
                    changed = replace(shape, lens=(*shape.lens[:b], pair, *shape.lens[b + 1 :]))
                    if changed not in self._lab.known and _work(changed) <= self._most:
                        yield changed

    def _changed(self) -> Shape:
        """Draw a shape that differs from one that was run in an axis or a sequence."""
        chance = self._random
        shape = chance.choice(self._lab.wrong_ones if chance.random() < 0.5 else list(self._lab.known))
        if chance.random() < 0.4:
            name = chance.choice(list(self._axes))
            return replace(shape, **{name: self._value(name)})
        lens = list(shape.lens)
        b, decode = chance.randrange(len(lens)), shape.phase == "decode"
        new, prefix = lens[b]
        if chance.random() < 0.5 and not decode:
            new = max(1, new + chance.choice((-17, -1, 1, 16, 64)) if chance.random() < 0.5 else self._length(1, 300))
        else:
            drawn = (
                prefix + chance.choice((-17, -1, 1, 16, 64))
                if chance.random() < 0.5
                else self._length(0, self._longest)
            )
            prefix = max(int(decode), drawn)
        lens[b] = new, prefix
        return replace(shape, lens=tuple(lens))

    def _fresh(self) -> Shape:
        chance, shape = self._random, self._place.shape
        changes = {name: self._value(name) for name in self._axes if chance.random() < 0.25}
        if "heads" in changes and chance.random() < 0.5:  # numbers of q heads that say nothing of their ratio
            kv_heads = chance.randint(1, 8)
            changes["heads"] = kv_heads * chance.randint(1, 8), kv_heads
        phase = shape.phase if chance.random() < 0.75 else chance.choice(self._lab.guard.assay.phases)
        decode = phase == "decode"
        single = decode or chance.random() < 0.15  # extend with sequences of one new token looks like decode
        count = 1 if chance.random() < 0.45 else chance.choice((2, 2, 3, 4, 5, 7))
        lens = [self._sequence(single, count) for _ in range(count)]
        if chance.random() < 0.2:
            lens = lens[:1] * count
        if chance.random() < 0.15 and not decode:
            lens.insert(chance.randrange(count + 1), (0, chance.choice((0, 20))))
        if chance.random() < 0.4:
            lens[chance.randrange(len(lens))] = self._place.own
        return replace(shape, phase=phase, lens=tuple(lens), **changes)

    def _value(self, name: str) -> Any:
        """Draw a value of an axis; of what calls ask for, every third is of two features."""
        drawn: Any = self._random.choice(self._axes[name])
        if name == "asked" and self._random.random() < 0.3:
            more: tuple[str, ...] = self._random.choice(self._axes[name])
            drawn = drawn if {value[:5] for value in drawn} & {value[:5] for value in more} else (*drawn, *more)
        return drawn

    def _sequence(self, single: bool, count: int) -> tuple[int, int]:
        few = count < 3
        if few and self._random.random() < 0.06:  # what holds of long prefixes may end at a longer one
            return 1 if single else self._random.randint(1, 20), self._random.randint(self._longest, 3 * self._longest)
        cached = single or self._random.random() < 0.75
        prefix = self._length(int(single), self._longest if few else 200) if cached else 0
        return 1 if single else self._length(1, 300 if few else 100), prefix

    def _length(self, least: int, most: int) -> int:
        """Draw a length: half of them at the edge of a block."""
        chance = self._random
        if chance.random() < 0.5:
            n = chance.choice(_BLOCKS) * chance.choice((1, 1, 1, 2, 3)) + chance.choice((-1, 0, 0, 1))
        else:
            n = chance.randrange(least, 24 if chance.random() < 0.3 else most)
        return max(least, min(most, n))


@dataclass(frozen=True)
class Experiments:
    """What experiments showed.

    Attributes:
        tried: the condition under which sequences are wrong; None if no simple one agrees with every call, or the budget was spent.
        place: the simplest sequence that is wrong; None if none is whatever the numbers are.
        axes: its axes, varied one at a time.
        kept: small calls that were made, with their shapes.
        points: all sequences that were run, by their features, and whether they were wrong.
        drawer: draws further ones.
    """

    tried: Tried | None = None
    place: Place | None = None
    axes: tuple[Axis, ...] = ()
    kept: Sequence[tuple[Shape, CallResult]] = ()
    points: Sequence[tuple[Known, bool]] = ()
    drawer: _Drawer | None = None

    def drawn(self) -> Iterator[Shape]:
        """Yield shapes of calls like those that were tried, which were not; none if nothing was tried."""
        if self.drawer is None:
            return iter(())
        self.drawer.held = ()
        return self.drawer(_LOOKED_AT)


NOTHING_TRIED = Experiments()


def experiment(
    lab: Lab, failing: Iterable[Place], others: Iterable[tuple[Shape, Came]] = (), seed: int = 0
) -> Experiments:
    """Find the condition under which sequences are wrong, and the simplest place where one is.

    Args:
        lab: the kernel.
        failing: wrong sequences, those of the smallest calls first. The first that is wrong with other numbers too is the base.
        others: what came of calls that were made before.
        seed: of what is drawn.
    """
    place: Place | None = None
    varied: tuple[Axis, ...] = ()
    drawer: _Drawer | None = None
    try:
        place = next((at for at in failing if lab.wrong(at.shape, at.at)), None)
        if place is None:
            return _shown(lab)
        place = simplest(lab, place)
        lab.base, axes = place.shape, _axes(lab)
        varied = _one_axis_at_a_time(lab, place, axes)
        for shape, came in others:
            lab.learn(shape, came)
        drawer = _Drawer(lab, place, axes, seed)
        for shape in drawer(40):
            lab.ask(shape)
        own = features(place.shape, place.at)
        for drawer.held in _CONTEXTS:
            if len(drawer.held) >= _NARROW and lab.mixed * _NARROW > lab.points.wrong.count(True):
                break  # with all else held, a fault that depends on the numbers looks like a condition of anything
            context = {name: own[name] for field in drawer.held for name in _HELD[field]}
            if (tried := _challenged(lab, drawer, context)) is not None:
                if lab.name == OUTPUT:
                    tried = tried.model_copy(update={"part": _part(lab, drawer, tried)})
                return _shown(lab, tried if lab.repeats() else None, place, varied, drawer)
    except SpentError:
        pass
    return _shown(lab, None, place, varied, drawer)


def contradicts(result: CallResult, tried: Tried) -> bool:
    """Return True if a sequence of a call is wrong, and a condition says that it is right.

    Of a call that no lab made it is not known what its data is like: conditions of that are not contradicted.
    """
    shape = shape_of(result.call)
    known = [features(shape, b) for b, wrong in enumerate(wrong_sequences(result)) if wrong]
    about_data = "data" in tried.context or any(prop.feature == "data" for prop in tried.rule)
    inside = (of for of in known if tried.context.items() <= of.items())
    return not about_data and any(not holds(tried.rule, of) for of in inside)


def _shown(
    lab: Lab,
    tried: Tried | None = None,
    place: Place | None = None,
    varied: tuple[Axis, ...] = (),
    drawer: _Drawer | None = None,
) -> Experiments:
    kept = [(shape, came) for shape, came in lab.kept if isinstance(came, CallResult)]
    return Experiments(tried, place, varied, kept, list(zip(lab.points.known, lab.points.wrong, strict=True)), drawer)


def _challenged(lab: Lab, drawer: _Drawer, context: Mapping[str, Value]) -> Tried | None:
    """Seek a rule within a context that survives fresh calls; None if none does."""
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
            if counts[True] < _LEAST_EACH_SIDE or (rivals[0] and counts[False] < _LEAST_EACH_SIDE):
                return None
            alike = [rule for rule in still[1:] if rule in rivals and cost(rule) <= cost(still[0]) + _TIE]
            ties = [rule for rule in alike if {prop.feature for prop in {*rule} ^ {*still[0]}} - _FOLLOW]
            return Tried(
                fault=lab.name, rule=within.plainest(rivals[0]), context=dict(context), wrong=counts[True], right=counts[False],
                calls=lab.asked, rivals=tuple(ties[:1]),
            )  # fmt: skip
    return None


def _telling(points: Points, drawn: Points, rule: Rule, met: NDArray[np.bool_]) -> Iterator[np.intp]:
    """Yield which drawn sequences are asked for: those on which rivals differ, and those nearest to a limit of the first.

    A call that lacks one property of a rule alone says more of it than one that lacks several; and so does one that meets the rule,
    but lacks what else all wrong ones had in common.
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
        for side in (met[0], others & ~met[0]):
            there = np.flatnonzero(side)
            yield from there[np.argsort(drawn.off(prop)[there], kind="stable")][:_NEAR]


def _between(lab: Lab, drawer: _Drawer, context: Known, rule: Rule) -> Iterator[Shape]:
    """Yield shapes with a sequence between what was right and what was wrong, at each limit of a rule: so limits are bisected."""
    inside = np.array([context.items() <= known.items() for known in lab.points.known])
    places = [place for place, there in zip(lab.places, inside, strict=True) if there]
    points = lab.points.within(context)
    for prop, wrong, right in list(points.gaps(rule)):
        others, (low, high), middle = (
            tuple(other for other in rule if other != prop),
            sorted((wrong, right)),
            (wrong + right) / 2,
        )
        there = np.flatnonzero(points.meeting(others))
        nearest = [places[int(i)] for i in there[np.argsort(points.off(prop)[there], kind="stable")]]
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


# Features of which one follows from another where sequences have one new token or are alone, and those of what is asked.
_FOLLOW = {
    "prefix", "length", "prefix-new", "key_end", "longest", "longest_prefix", "shortest", "least_new", "least_prefix", "new",
    "earlier-length", "total_keys", "row_end", "total_new", "row", "length-first", "prefix-first", "length-before", "prefix-before",
    "first_prefix", "asked", "window", "length-window", "softcap", "sinks", "temperature", "stored", "packed", "ratio",
    *(f"asks: {what}" for what in ASKS),
}  # fmt: skip


def _part(lab: Lab, drawer: _Drawer, tried: Tried) -> Rule:
    """Seek which queries, heads and dims of wrong sequences are wrong: what holds on fresh calls too. None if it is all of them."""
    cells, dims = Points(), Points()

    def there(shape: Shape) -> list[int]:
        known = [features(shape, b) for b in range(len(shape.lens))] if shape.dtype == drawer.dtype else []
        return [b for b, of in enumerate(known) if shape.lens[b][0] and meets(tried, of)]

    computed = [(shape, came) for shape, came in lab.kept if isinstance(came, CallResult)]
    kept = [(result, wrong) for shape, result in computed if (wrong := there(shape))]
    for result, wrong in kept[:: max(1, len(kept) // _TOLD)]:
        _add_cells(result, wrong, cells, dims)
    part: Rule = ()
    for points in (cells, dims):
        for _ in range(_CELL_ROUNDS):
            if not any(chosen := rules(points, 1)):
                break
            before = len(points.known)
            small = (shape for shape in drawer(_DRAWN) if _work(shape) <= _KEPT_WORK)
            for shape, wrong in islice(((shape, wrong) for shape in small if (wrong := there(shape))), _EACH_SIDE):
                if isinstance(came := lab.made(shape, 0), CallResult):
                    _add_cells(came, wrong, cells, dims)
            if points.confirm(chosen[0], before, _LEAST_EACH_SIDE):
                part += chosen[0]
                break
    return part


def _ends(wrong: torch.Tensor) -> list[int]:
    """List some places of a row of flags: those around its first changes, and at the borders of blocks."""
    changes = (wrong[1:] != wrong[:-1]).nonzero().flatten()[:4].tolist()
    near = {place + more for place in changes for more in (0, 1)}
    return sorted(
        n for n in near | {0, 1, 15, 16, 31, 32, 63, 64, 128, len(wrong) - 2, len(wrong) - 1} if 0 <= n < len(wrong)
    )


def _add_cells(result: CallResult, sequences: Iterable[int], cells: Points, dims: Points) -> None:
    """Add some queries and heads of sequences of a call, and some dims of what is wrong, unless it is between wrong and right."""
    call, ratio, exact = result.call, result.call.heads.group, least_error(result.call.q.dtype)
    off, right = relative_l1(result.by_row).nan_to_num(nan=np.inf), truth(call)
    wrong_from, width = max(_SEEN, _ROUNDINGS * exact), right.shape[-1]
    size = right.abs().mean(-1, keepdim=True)
    by_dim = ((result.out[: len(right)] - right).abs() / size).nan_to_num(nan=np.inf)
    shows = (right.abs() / size).nan_to_num() > wrong_from  # a dim that is nearly zero may be right by chance
    for b in sequences:
        start, new, q_heads = call.cu_seqlens_q.tolist()[b], call.lens_q[b], call.q.shape[1]
        for i in _ends((off[start : start + new] >= wrong_from).any(1)):
            for head in sorted({n for n in (0, 1, 2, 3, 4, 5, 7, 8, q_heads - 1) if n < q_heads}):
                error = float(off[start + i, head])
                if exact < error < wrong_from:
                    continue
                cells.add(
                    {
                        "query": i, "queries_after": new - 1 - i, "position": i + call.prefixes[b], "query_row": start + i,
                        "head": head, "heads_after": q_heads - 1 - head, "kv_head": head // ratio, "head_in_group": head % ratio,
                        "packed_row": i * ratio + head % ratio,
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
