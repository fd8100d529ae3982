"""A kernel that is asked for calls of given shapes, and what is known of it by now."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.shapes import Shape
from assay.harness.localize.faults import OUTPUT, Came, Fault, WrongOutputs, came_of
from assay.harness.localize.features import features
from assay.harness.localize.guard import Guard
from assay.harness.localize.kernel_runs import CallResult
from assay.harness.localize.rules import Points

# Products of queries, keys, q heads and head dim of a call whose result is kept, to try on it what is said.
KEPT_WORK = 2**22
# Calls that are made again at the end: so many of the first ones, and as many of all.
_AGAIN = 8
# Wrong calls that are all made again with other numbers; after these, one in so many is.
_ALWAYS_AGAIN, _NOW_AND_THEN = 30, 5
# Seed of the numbers that calls have in common.
_POOL = 4711


def work_of(shape: Shape) -> int:
    """Multiply the queries of a call by its keys, q heads and head dim."""
    return sum(n * (n + p) for n, p in shape.lens) * shape.heads[0] * shape.head_dim


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
        if first is not None and work_of(shape) <= KEPT_WORK:
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
