"""Which layers must run the reference for a task to be right again: the search. No server, no clock; it asks a probe.

A probe is asked with the set of layers that run the candidate, all others running the reference. Sought is a set R of layers such
that the task is right with the candidate everywhere but in R, and wrong again as soon as any one layer of R is put back.

- *Re-checks*: the task must be right with no layer substituted (else it is too noisy to tell anything), and wrong with all (else
  there is nothing to find).
- *Monotone answers* (one more layer of the candidate never makes a wrong task right): a set of layers that are right together
  grows from the front; the first layer that turns it wrong is found by bisection and must run the reference; and so on behind
  it. Later layers are looked for in steps that begin at the last distance and double (galloping, Bentley & Yao, An almost optimal
  algorithm for unbounded searching, Information Processing Letters 5, 82-87 (1976)), so that k of n layers cost about
  k log2(n / k) probes, and n of n about n.
- *Answers that are not monotone* (errors that cancel) show by a wrong set within a right one, which is so if a layer of R proves
  not to be needed. Then R is reduced by ddmin (Zeller & Hildebrandt, Simplifying and isolating failure-inducing input, IEEE
  Transactions on Software Engineering 28, 183-200 (2002)), which assumes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

from scipy.stats import binom

Probe = Callable[[frozenset[int]], bool]
"""Takes the layers that run the candidate; says whether the task is right. May err, see `lead_needed`."""
SearchOutcome = Literal["found", "nothing", "inconclusive"]

MOST_EXPLAINED = 4
"""With more layers to restore than these, none is asked alone, and no partners are looked for: that would double the probes."""
MOST_PARTNERS = 3
"""Layers that it may take besides one to be wrong; a sum of small errors over more layers is said to be one."""


@dataclass(frozen=True)
class LayersTried:
    """A set that was probed, and what the probe said, each time that it was asked.

    Attributes:
        candidate: layers that ran the candidate.
        right: times that the task was right.
        wrong: times that it was not.
    """

    candidate: frozenset[int]
    right: int
    wrong: int


@dataclass(frozen=True)
class Restored:
    """A layer that must run the reference.

    Attributes:
        layer: its number.
        alone: whether the task is wrong with the candidate in this layer only; None where that was not asked.
        partners: if not alone: other layers, with which together it is wrong; empty where more than `MOST_PARTNERS` are needed.
    """

    layer: int
    alone: bool | None
    partners: tuple[int, ...] = ()


@dataclass(frozen=True)
class Search:
    """What a search came to.

    Attributes:
        verdict: "found" (there are layers that must run the reference), "nothing" (it does not fail even with all layers), or
            "inconclusive".
        why: one sentence.
        restored: layers that must run the reference, in order; empty unless found.
        monotone: whether no answer contradicted that more layers of the candidate are never better.
        asked: every set that was probed, in order; none twice.
    """

    verdict: SearchOutcome
    why: str
    restored: tuple[Restored, ...]
    monotone: bool
    asked: tuple[LayersTried, ...]

    @property
    def probes(self) -> int:
        """Times that the probe was asked, repeats counted."""
        return sum(one.right + one.wrong for one in self.asked)


def lead_needed(noise: float, error: float) -> int:
    """By how many answers one outcome must lead to be taken: Wald's sequential test of two simple hypotheses.

    Let each answer be false with probability at most e < 1/2, independently. One answer changes the log likelihood ratio of "right"
    against "wrong" by log((1 - e) / e), up or down. So the ratio depends on the lead alone, and the lead is a random walk: it meets
    -m before m, against the truth, with probability 1 / (1 + ((1 - e) / e)^m) (the gambler's ruin). That is at most `error` for
    m >= log((1 - error) / error) / log((1 - e) / e). The expected number of answers is at most m / (1 - 2 e).

    Source: Wald, Sequential tests of statistical hypotheses, Annals of Mathematical Statistics 16, 117-186 (1945).

    Args:
        noise: e; where it is 0 one answer is enough.
        error: probability with which the outcome that is taken may be false.

    Raises:
        ValueError: `noise` is not in [0, 0.5), or `error` not in (0, 0.5).
    """
    if not 0 <= noise < 0.5 or not 0 < error < 0.5:
        raise ValueError(f"noise {noise} and error {error}; expected 0 <= noise < 0.5 and 0 < error < 0.5")
    if noise == 0:
        return 1
    return max(1, math.ceil(math.log((1 - error) / error) / math.log((1 - noise) / noise)))


@cache
def most_answers(noise: float, error: float) -> int:
    """The number of answers by which the lead is there with probability ``1 - error``, if `noise` is what it is said to be.

    The walk has not ended after N answers only if fewer than (N + m) / 2 of them are true: a binomial tail. More answers without
    the lead show, at level `error`, that the noise is greater, or that the set is on the edge between right and wrong.
    """
    lead = lead_needed(noise, error)
    answers = lead
    while noise and binom.sf((answers - lead) // 2, answers, noise) > error:
        answers += 1
    return answers


class _Undecided(Exception):
    pass


class _Answers:
    """Answers by set: no set is probed twice, but for the repeats that the noise asks for."""

    def __init__(self, probe: Probe, noise: float, alpha: float) -> None:
        self._probe, self._noise, self._alpha = probe, noise, alpha
        self._known: dict[frozenset[int], bool] = {}
        self.asked: list[LayersTried] = []

    def right(self, candidate: Collection[int]) -> bool:
        """Whether the task is right with the candidate in these layers. Raises _Undecided if it cannot be told."""
        key = frozenset(candidate)
        if key not in self._known:
            self._known[key] = self._ask(key)
        return self._known[key]

    def knows(self, candidate: Collection[int]) -> bool:
        """Whether this set was probed."""
        return frozenset(candidate) in self._known

    def _ask(self, key: frozenset[int]) -> bool:
        number = len(self.asked) + 1
        # Shares of alpha that add up to alpha over any number of sets: 1/2 + 1/6 + 1/12 + ... = 1.
        error = self._alpha / (number * (number + 1))
        lead, most = lead_needed(self._noise, error), most_answers(self._noise, error)
        right = wrong = 0
        while abs(right - wrong) < lead and right + wrong < most:
            if self._probe(key):
                right += 1
            else:
                wrong += 1
        self.asked.append(LayersTried(key, right, wrong))
        if abs(right - wrong) < lead:
            raise _Undecided(
                f"With the candidate in layers {spans(key)} the task was right {right} times and wrong {wrong} times: more "
                f"noise than the {self._noise:.0%} that the floor explains, or just on the edge."
            )
        return right > wrong

    @property
    def monotone(self) -> bool:
        """Whether no wrong set lies within a right one."""
        right = [key for key, answer in self._known.items() if answer]
        return not any(key < other for key, answer in self._known.items() if not answer for other in right)


def find_layers(layers: Sequence[int], probe: Probe, noise: float = 0.0, alpha: float = 0.05) -> Search:
    """Find layers that must run the reference for the task to be right.

    Args:
        layers: all layers, in the order of the model.
        probe: is asked with the layers that run the candidate.
        noise: probability with which one answer of the probe may be false; 0 where the floor was measured to be identical.
        alpha: probability with which any set's outcome may be false, over the whole search.

    Returns:
        The layers, each needed: put back alone, it makes the task wrong again. Another set of layers may do as well where layers
        are only wrong together.

    Raises:
        ValueError: no layer, a layer twice, or `noise` or `alpha` out of range.
    """
    if not layers or len(set(layers)) < len(layers):
        raise ValueError(f"the layers {list(layers)}; expected at least one, and none twice")
    lead_needed(noise, alpha)
    answers = _Answers(probe, noise, alpha)
    try:
        if not answers.right(()):
            why = "With no layer substituted the task fails too: the workload is too noisy to tell anything."
            return Search("inconclusive", why, (), True, tuple(answers.asked))
        if answers.right(layers):
            why = f"The task does not fail even with the candidate in all {len(layers)} layers."
            return Search("nothing", why, (), True, tuple(answers.asked))
        restored = _restore(layers, answers)
        monotone = answers.monotone
        found = _explain(layers, restored, answers)
    except _Undecided as undecided:
        return Search("inconclusive", str(undecided), (), answers.monotone, tuple(answers.asked))
    why = f"With the reference in {_count(restored)} the task is right, with the candidate in all the others"
    why += f"; with the candidate in any one of {spans(restored)} besides, it is wrong." if len(restored) > 1 else "."
    return Search("found", why, found, monotone and answers.monotone, tuple(answers.asked))


def _restore(layers: Sequence[int], answers: _Answers) -> list[int]:
    restored = _grow(layers, answers)
    kept = set(layers) - set(restored)
    # Every wrong set so far holds a restored layer, so one that is not needed is how answers that are not monotone show.
    if any(answers.right(kept | {layer}) for layer in restored):
        return ddmin(restored, lambda some: answers.right(set(layers) - set(some)))
    return restored


def _grow(layers: Sequence[int], answers: _Answers) -> list[int]:
    """The layers left over when a set that is right takes up all that it can, from the front."""
    kept: set[int] = set()
    restored: list[int] = []
    at, gap, end = 0, 0, len(layers)
    while at < end:
        # `low` layers from `at` are right with what is kept; `high` are wrong, or one more than there are.
        low, high = at, end + 1

        def right(to: int, kept: set[int] = kept, at: int = at) -> bool:
            return answers.right(kept.union(layers[at:to]))

        # The whole rest is tried after 0, 1, 2, 4, 8, ... finds: one layer costs one probe more, many cost log n more.
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


def _explain(layers: Sequence[int], restored: Sequence[int], answers: _Answers) -> tuple[Restored, ...]:
    """Which of the restored layers are wrong alone, and together with which others those are that are not."""
    kept = [layer for layer in layers if layer not in restored]
    explained = []
    for layer in restored:
        few = len(restored) <= MOST_EXPLAINED
        alone = not answers.right({layer}) if few or answers.knows({layer}) else None
        partners = _partners(layer, kept, answers) if few and not alone else ()
        explained.append(Restored(layer, alone, partners))
    return tuple(explained)


def _partners(layer: int, kept: Sequence[int], answers: _Answers) -> tuple[int, ...]:
    """Few of the kept layers with which together a layer is wrong, though not alone; empty if it takes too many."""
    found: list[int] = []
    while answers.right({layer, *found}):
        if len(found) == MOST_PARTNERS:
            return ()
        low, high = 0, len(kept)  # with so many from the front it is right, and wrong
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if answers.right({layer, *found, *kept[:middle]}) else (low, middle)
        found.append(kept[high - 1])
        kept = kept[: high - 1]
    return tuple(sorted(found))


def ddmin(items: Sequence[int], holds: Callable[[Sequence[int]], bool]) -> list[int]:
    """Reduce `items` to some for which `holds` is still true, and false if any one of them is left out.

    Args:
        items: for which `holds` is true, as it is not for none of them.
        holds: a property of some of them; need not be monotone.

    Source: Zeller & Hildebrandt (2002), figure 3.
    """
    some, parts = list(items), 2
    while len(some) > 1:
        edges = [len(some) * part // parts for part in range(parts + 1)]
        chunks = [some[start:stop] for start, stop in pairwise(edges)]
        smaller = next((chunk for chunk in chunks if holds(chunk)), None)
        if smaller is not None:
            some, parts = smaller, 2
            continue
        rests = ([item for item in some if item not in chunk] for chunk in chunks)
        smaller = next((rest for rest in rests if holds(rest)), None)
        if smaller is not None:
            some, parts = smaller, max(parts - 1, 2)
        elif parts == len(some):
            break
        else:
            parts = min(2 * parts, len(some))
    return some


def spans(layers: Collection[int]) -> str:
    """Layers in short, such as "0-7, 12"; "none" for none."""
    ordered = sorted(layers)
    starts = [layer for layer in ordered if layer - 1 not in set(ordered)]
    stops = [layer for layer in ordered if layer + 1 not in set(ordered)]
    parts = [f"{start}" if start == stop else f"{start}-{stop}" for start, stop in zip(starts, stops, strict=True)]
    return ", ".join(parts) or "none"


def _count(layers: Sequence[int]) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"the {len(layers)} layers {spans(layers)}"
