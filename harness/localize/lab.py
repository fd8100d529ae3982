"""A kernel under experiment: it is asked for calls of given shapes, and its answers are recorded."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.shapes import Shape
from assay.harness.localize.faults import OUTPUT, Came, Fault, WrongOutputs, came_of
from assay.harness.localize.features import Known, features
from assay.harness.localize.guard import Guard
from assay.harness.localize.kernel_runs import CallResult
from assay.harness.localize.rules import Points

# Results are kept, to test conditions on them, up to this product of queries, keys, q heads and head dim.
KEPT_WORK = 2**22
# Calls to repeat at the end: this many of the first ones, and as many spread over all.
_AGAIN = 8
# The first wrong calls are all repeated with other numbers; after these, one in so many is.
_ALWAYS_AGAIN, _NOW_AND_THEN = 30, 5
# Seed of the numbers that calls have in common.
_POOL = 4711


def work_of(shape: Shape) -> int:
    """Return the product of a call's queries, keys, q heads and head dim."""
    return sum(n * (n + p) for n, p in shape.lens) * shape.heads[0] * shape.head_dim


def drawn_call(shape: Shape, device: str, seed: int = 0) -> AttentionCall:
    """Make the call of a shape that a lab asks for. Raises like `Shape.make`."""
    return shape.make(zlib.crc32(repr((shape, seed)).encode()), device, _POOL)


class SpentError(Exception):
    """The budget of calls or time is used up."""


@dataclass
class Lab:
    """A kernel under experiment.

    Attributes:
        guard: the kernel.
        dims: the (head_dim, head_dim_v) to ask for: with others, a kernel may write beyond its output.
        dtypes: the dtypes to ask for.
        device: the device of the calls.
        spent: returns the used share of the time.
        most: the most calls to make.
        fault: decides whether a sequence is wrong.
        name: the name of the fault.
        points: the sequences that were run, by their features.
        places: the same sequences, by shape and index.
        asked: the number of calls so far.
        share: the share of time and calls that may be used for now.
        mixed: the features of sequences that were wrong with some numbers and right with others.
        base: the failing shape that experiments start from.
        known: the answers by shape.
        wrong_ones: the shapes with a wrong sequence.
        kept: the outcomes of small calls.
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
    mixed: list[Known] = field(default_factory=list)
    base: Shape | None = None
    known: dict[Shape, tuple[bool | None, ...]] = field(default_factory=dict)
    wrong_ones: list[Shape] = field(default_factory=list)
    kept: list[tuple[Shape, Came]] = field(default_factory=list)

    def ask(self, shape: Shape) -> tuple[bool | None, ...]:
        """Return, for each sequence, whether it is wrong, or None if that depends on the numbers or no query was computed.

        Calls with a wrong sequence are repeated with other numbers: all of them as long as that makes a difference.

        Raises:
            SpentError: the budget, or the share that may be used for now, is spent.
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
        """Return True if this sequence is wrong with all numbers that were tried."""
        return self.ask(shape)[at] is True

    def repeats(self) -> bool:
        """Return True if a sample of at least one call gives the same answers again.

        If a kernel keeps state, no condition on a call describes it.
        """
        kept = [(shape, came) for shape, came in self.kept if self.base is None or shape.data == self.base.data]
        chosen = [*kept[:_AGAIN], *kept[:: max(1, len(kept) // _AGAIN)]]
        same = [self.told(shape, came) == self.told(shape, self.made(shape, 0)) for shape, came in chosen]
        return bool(same) and all(same)

    def told(self, shape: Shape, came: Came | None) -> tuple[bool | None, ...]:
        """Return, for each sequence, whether the outcome of the call shows it wrong, or None if that cannot be decided."""
        answer = None if came is None else self.fault(came)
        return answer if isinstance(answer, tuple) else (answer,) * len(shape.lens)

    def learn(self, shape: Shape, came: Came) -> None:
        """Take an earlier call into account."""
        self._add(shape, self.told(shape, came))

    def counts(self, shape: Shape, wrong: bool | None) -> bool:
        """Return True if an answer counts: on data unlike the base's, a small error may not show."""
        shows = self.base is None or self.base.data != "normal" or shape.data == "normal"
        return wrong is True or (wrong is False and shows)

    def made(self, shape: Shape, seed: int) -> Came | None:
        """Return the outcome of a call of a shape, or None if such calls are not asked for or the numbers overflow the dtype."""
        if any(new + prefix < 0 for new, prefix in shape.lens):  # cross attention may have fewer keys than queries
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
        if first is not None and work_of(shape) <= KEPT_WORK:
            if isinstance(first, CallResult) and isinstance(self.fault, WrongOutputs):
                first = first.updated(clearly=self.fault.clearly(shape.dtype))
            self.kept.append((shape, first))
        # A fault that has not depended on the numbers so far is rechecked now and then.
        doubted = self.mixed or len(self.wrong_ones) < _ALWAYS_AGAIN or not len(self.wrong_ones) % _NOW_AND_THEN
        other = self.told(shape, self.made(shape, 1)) if any(drawn) and doubted else drawn
        pairs = list(zip(drawn, other, shape.lens, strict=True))
        self.mixed += [features(shape, at) for at, (a, b, _) in enumerate(pairs) if {a, b} == {True, False}]
        return tuple(a if b in (a, None) and new else None for a, b, (new, _) in pairs)


@dataclass(frozen=True)
class Place:
    """A wrong sequence of a call."""

    shape: Shape
    at: int

    @property
    def own(self) -> tuple[int, int]:
        """Its new tokens and its prefix."""
        return self.shape.lens[self.at]

    def with_own(self, new: int, prefix: int) -> Place:
        """Return the place with other lengths of this sequence."""
        lens = tuple((new, prefix) if b == self.at else pair for b, pair in enumerate(self.shape.lens))
        return Place(replace(self.shape, lens=lens), self.at)
