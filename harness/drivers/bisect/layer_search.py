"""The search for the layers that must run the reference for a task to be right again. It uses no server and no clock.

A probe receives the set of layers that run the candidate; all others run the reference. The search looks for a set R of layers
such that the task is right with the candidate everywhere but in R, and wrong again as soon as any one layer of R is switched
back to the candidate.

The task must be right with no layer substituted (else it is too noisy to decide anything), and wrong with all of them. A set of
layers that are right together grows from the front: bisection finds the first layer that turns it wrong, and the search continues
after it in steps that start at the last distance and double (galloping; Bentley & Yao, Information Processing Letters 5, 82-87,
1976), so that finding k of n layers costs about k log2(n / k) probes. If errors cancel, some layer of R turns out not to be
needed; R is then reduced by ddmin, which assumes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from assay.harness.drivers.bisect import LEAD, Outcome, majority
from assay.harness.schema import Record
from assay.harness.statement import Statement, state
from assay.harness.stats.ddmin import ddmin

# Receives the layers that run the candidate; returns whether the task is right. A single answer may be wrong.
_ProbeFunction = Callable[[frozenset[int]], bool]

_MAX_EXPLAINED_LAYERS = 4


@dataclass(frozen=True)
class RestoredLayer:
    """A layer that must run the reference; `alone` is None if the candidate was not probed in this layer only."""

    layer: int
    alone: bool | None


class SearchResult(Record):
    """The result of a search: "nothing" if the task is right even with the candidate in all layers."""

    outcome: Literal["found", "nothing", "inconclusive"]
    why: Statement
    restored: tuple[RestoredLayer, ...] = Field((), description="layers that must run the reference, in order")
    monotone: bool = Field(
        True, description="whether all answers agree that more layers of the candidate are never better"
    )


class _Undecided(Exception):
    """Neither outcome of a set of layers leads; `why` states it."""

    def __init__(self, why: Statement) -> None:
        super().__init__(why.id)
        self.why = why


class _AnswerCache:
    """Answers by set. A set is probed only once, except for the repeats that an unsteady server requires."""

    def __init__(self, probe: _ProbeFunction, steady: bool) -> None:
        self._probe, self._steady = probe, steady
        self.known: dict[frozenset[int], bool] = {}

    def right(self, candidate: Collection[int]) -> bool:
        """Return True if the task is right with the candidate in these layers. Raises `_Undecided` if no answer leads."""
        key = frozenset(candidate)
        if key not in self.known:
            seen: list[Outcome] = []
            while (outcome := majority(seen, 1 if self._steady else LEAD)) is None:
                seen.append("good" if self._probe(key) else "bad")
            if outcome == "skip":
                counts = {"right": seen.count("good"), "wrong": seen.count("bad")}
                raise _Undecided(state("no-outcome-leads", layers=sorted(key), **counts))
            self.known[key] = outcome == "good"
        return self.known[key]

    @property
    def monotone(self) -> bool:
        """True if no wrong set is a subset of a right one."""
        right = [key for key, answer in self.known.items() if answer]
        return not any(key < other for key, answer in self.known.items() if not answer for other in right)


def find_layers(layers: Sequence[int], probe: _ProbeFunction, steady: bool) -> SearchResult:
    """Find layers that must run the reference for the task to be right.

    Each of them is needed: if it alone is switched back to the candidate, the task is wrong. Another set may also work if layers
    are wrong only in combination.

    Args:
        layers: all layers, in the order of the model.
        probe: receives the layers that run the candidate.
        steady: whether the same set gave the same texts when asked twice, so that one answer is enough.
    """
    answers = _AnswerCache(probe, steady)
    try:
        if not answers.right(()):
            return SearchResult(outcome="inconclusive", why=state("prompts-too-noisy"))
        if answers.right(layers):
            return SearchResult(outcome="nothing", why=state("right-in-all-layers", layers=len(layers)))
        restored = _grow(layers, answers)
        kept = frozenset(layers).difference(restored)
        # Every wrong set so far contains a restored layer, so a restored layer that is not needed reveals non-monotone answers.
        if any(answers.right(kept | {layer}) for layer in restored):
            restored = ddmin(restored, lambda some: answers.right(frozenset(layers).difference(some)))
        # Probing each of many layers alone would double the probes.
        alone = [frozenset({layer}) for layer in restored]
        asked = [single for single in alone if len(restored) <= _MAX_EXPLAINED_LAYERS or single in answers.known]
        explained = tuple(
            RestoredLayer(layer, not answers.right(single) if single in asked else None)
            for layer, single in zip(restored, alone, strict=True)
        )
    except _Undecided as undecided:
        return SearchResult(outcome="inconclusive", why=undecided.why, monotone=answers.monotone)
    why = state("right-with-layers-restored", layers=restored)
    return SearchResult(outcome="found", why=why, restored=explained, monotone=answers.monotone)


def _grow(layers: Sequence[int], answers: _AnswerCache) -> list[int]:
    """Grow a right set from the front as far as possible; return the layers that do not fit."""
    kept: set[int] = set()
    restored: list[int] = []
    at, gap, end = 0, 0, len(layers)
    while at < end:
        # With `low` layers from `at` the kept set is right; with `high` it is wrong (or `high` is past the end).
        low, high = at, end + 1

        def right(to: int, kept: set[int] = kept, at: int = at) -> bool:
            return answers.right(kept.union(layers[at:to]))

        # After 0, 1, 2, 4, 8, ... finds, try all remaining layers at once: with one guilty layer this costs one extra probe,
        # with many it costs log n.
        if len(restored) & (len(restored) - 1) == 0:
            low, high = (end, high) if right(end) else (low, end)
        step = max(1, gap)
        while restored and low + step < high:
            if right(low + step):
                low, step = low + step, 2 * step
            else:
                high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if right(middle) else (low, middle)
        kept.update(layers[at:low])
        restored += layers[low:high][:1]
        at, gap = high, low - at
    return restored
