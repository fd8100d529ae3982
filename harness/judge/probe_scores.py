"""Distance between two passes over the probes, the same tokens scored twice, and the bound up to which rounding explains it.

The divergence at a position is `assay.harness.judge.logits.merged_kl`, over the base's most probable tokens and the sequence's
own one. A token that the other pass does not list is no more probable there than the least one that it lists; that value is used if
it is below the base's, so that the divergence is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Literal

import numpy as np

from assay.harness.evidence.probes import ProbePass, ProbeReply, Scores
from assay.harness.judge.logits import merged_kl
from assay.harness.judge.noise_limits import EXACT_KL

Measure = Literal["prefill", "decode"]
MEASURES: tuple[Measure, Measure] = ("prefill", "decode")
BASE_AGAIN = ("base again", "base longer", "base third")
"""Why the base is asked again: in half precision for all of these reasons, otherwise for the first alone."""
# Log-probability in both passes of a token that only pads a row: it adds nothing to a divergence.
_NOTHING = -1000.0
FALSE_ALARMS = 0.01
"""Rate at which an honest pass is said to differ."""
# The distances of a pass that share it: the mean, the worst position, and the largest mean and median of a probe, of prefill
# and of decode.
_DISTANCES = 8
# Index of the tail of these distances: a distance c times as large is at least c squared times as rare (a finite variance).
_TAIL = 2
# Limit for the mean of a probe, of few positions, as a multiple of the mean over a thousand positions, if nothing is measured.
_PROBE_OVER_MEAN = 10.0
# Mean divergence, in nats, below which nothing is a difference, by dtype: log-probabilities come with seven decimals,
# whose square is 1e-14; sums in another order moved no mean by more than 1e-12 in float32.
_LEAST: Mapping[str, float] = {"float32": 1e-9}
# Largest mean divergence, in nats, that the floor may excuse, by dtype.
_MOST: Mapping[str, float] = {"float32": 1e-6}
# The same in half precision: twice the difference between prefill and decode of a latent attention in bfloat16 (4.6e-4 on an
# H100), which use two formulas. A Llama of four layers showed 1.3e-4 there, one of the shape of 1B 2.1e-4.
_MOST_HALF = 1e-3
# Mean divergence, in nats, that another kernel may cost beyond the floor, by dtype; in others `EXACT_KL`.
_KERNEL_COST: Mapping[str, float] = {"float32": 1e-6}
_LEAST_HALF = 1e-6
# If nothing is measured, the worst of a thousand positions may have this multiple of the mean.
_WORST_OVER_MEAN = 100.0


@dataclass(frozen=True)
class ProbePlace:
    """A position at which two variants were compared.

    Attributes:
        probe: id of the probe.
        index: index of the predicted token in the sequence, from 0.
        kl: divergence from the base, in nats, or infinite if a log-probability is not finite.
    """

    probe: str
    index: int
    kl: float


def places(base: Sequence[ProbeReply], other: Sequence[ProbeReply], measure: Measure) -> list[ProbePlace]:
    """Compare two passes position by position, in the order of the probes.

    Answers are compared as long as they are the same: after a different token the histories differ.
    """
    by_probe = {reply.probe: reply for reply in other}
    return [
        place
        for reply in base
        if reply.probe in by_probe
        for place in _places(reply.probe, getattr(reply, measure), getattr(by_probe[reply.probe], measure), measure)
    ]


def _places(probe: str, base: Scores, other: Scores, measure: Measure) -> Iterable[ProbePlace]:
    begin, end = max(base.first, other.first), min(base.first + len(base.tokens), other.first + len(other.tokens))
    indices = range(begin, max(begin, end))
    parting = next((i for i in indices if base.tokens[i - base.first] != other.tokens[i - other.first]), end - 1)
    indices = range(begin, max(begin, parting + 1))
    if not indices:
        return []
    written = measure == "decode"
    rows = [_row(base, index - base.first, other, index - other.first, written) for index in indices]
    width = max(map(len, rows))
    p, q = zip(
        *([*zip(*(row + [(_NOTHING, _NOTHING)] * (width - len(row))), strict=True)] for row in rows), strict=True
    )
    kl = merged_kl(p, q)
    return [
        ProbePlace(probe, index, float(value))
        for index, value in zip(indices, np.where(np.isfinite(kl), kl, math.inf), strict=True)
    ]


def _row(base: Scores, mine: int, other: Scores, theirs: int, written: bool) -> list[tuple[float, float]]:
    """Return log-probabilities of both variants at a position: of the base's most probable tokens and of the sequence's own."""
    listed = dict(zip(other.ids[theirs], other.logprobs[theirs], strict=True))
    least = min(listed.values(), default=math.nan)
    row = {
        id_: (logprob, listed.get(id_, min(least, logprob)))
        for id_, logprob in zip(base.ids[mine], base.logprobs[mine], strict=True)
    }
    own = base.tokens[mine]
    if not row:
        return [(math.nan, math.nan)]
    if not written and own == other.tokens[theirs]:
        row[own] = base.own[mine], other.own[theirs]
    return list(row.values())


@dataclass(frozen=True)
class Distance:
    """The distance of a variant from its base, in one measure.

    Attributes:
        positions: number of compared positions.
        mean: divergence over all positions, in nats.
        worst: the largest divergence of a position.
        at: its place, or None if nothing was compared.
        probes: divergence over the positions of each probe, in nats, by its id: their mean, and their median (the lower one). A few
            flipping experts move the mean; an error at most positions moves both.
    """

    positions: int
    mean: float
    worst: float
    at: ProbePlace | None
    probes: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, compared: Sequence[ProbePlace]) -> Distance:
        """Sum up positions."""
        if not compared:
            return cls(0, 0.0, 0.0, None)
        worst = max(compared, key=lambda place: place.kl)
        by_probe: dict[str, list[float]] = {}
        for place in compared:
            by_probe.setdefault(place.probe, []).append(place.kl)
        probes = {probe: (math.fsum(each) / len(each), median_low(each)) for probe, each in by_probe.items()}
        return cls(len(compared), math.fsum(place.kl for place in compared) / len(compared), worst.kl, worst, probes)


@dataclass(frozen=True)
class Bound:
    """The largest distance that does not count as a difference, in nats.

    Attributes:
        mean: over all positions.
        worst: of one position.
        probes: of the mean and the median over the positions of a probe, by its id.
        floor: the base's distance from itself, if larger: a pass within it shows nothing.
    """

    mean: float
    worst: float
    probes: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    floor: Bound | None = None

    def beyond(self, distance: Distance) -> set[str]:
        """Return the probes whose own mean or median is out of bounds."""
        unbounded = (math.inf, math.inf)
        return {
            probe
            for probe, (mean, median) in distance.probes.items()
            if not (mean <= self.probes.get(probe, unbounded)[0] and median <= self.probes.get(probe, unbounded)[1])
        }

    def holds(self, distance: Distance) -> bool:
        """Return True if a distance is within it."""
        return distance.mean <= self.mean and distance.worst <= self.worst and not self.beyond(distance)

    def excess(self, distance: Distance) -> float:
        """Return how many times the bound a distance is, at most: above 1 beyond it."""
        of = [(distance.mean, self.mean), (distance.worst, self.worst)]
        for probe, own in distance.probes.items():
            of += zip(own, self.probes.get(probe, ()), strict=False)
        return max((value / most if most else math.inf for value, most in of if value), default=0.0)

    def widened(self, cost: float) -> Bound:
        """Return the bound with a cost in nats, of the mean, and its multiples for a probe and a position."""
        more = _PROBE_OVER_MEAN * cost
        probes = {id_: (own + more, median + more) for id_, (own, median) in self.probes.items()}
        floor = self.floor and self.floor.widened(cost)
        return Bound(self.mean + cost, self.worst + _WORST_OVER_MEAN * cost, probes, floor)


def rounds_by_shape(dtype: str) -> bool:
    """Return True if batch size visibly changes rounding, because kernels then sum in another order."""
    return dtype != "float32"


def distances_of(base: ProbePass, other: ProbePass) -> dict[Measure, Distance]:
    """Measure how far a pass over the same tokens is from the base, by measure."""
    return {measure: Distance.of(places(base.replies, other.replies, measure)) for measure in MEASURES}


def floor_of(base: ProbePass, again: Sequence[ProbePass]) -> dict[Measure, Distance]:
    """Measure the base's distance from itself: for each measure, of the pass that is farthest away."""
    apart = [distances_of(base, record) for record in again]
    return {measure: max((each[measure] for each in apart), key=lambda distance: distance.mean) for measure in MEASURES}


def hold(distances: Mapping[Measure, Distance], limits: Mapping[Measure, Bound]) -> bool:
    """Return True if the distances of both measures are within their bounds."""
    return all(limits[measure].holds(distance) for measure, distance in distances.items())


def factor(askings: int) -> float:
    """Compute how many times the largest of some askings' distances from the base an honest arm's is, at the stated rate.

    An honest arm is one more asking, so its distance is the largest of all with a chance of 1 / (askings + 1), whatever the
    distribution (order statistics of exchangeable values). It is more than c times the largest of the others with a chance of at
    most c ** -tail times that, if tails fall at least as fast (Potter's bound: Bingham, Goldie and Teugels, Regular Variation,
    theorem 1.5.6). Bonferroni's correction is for the number of distances; over all probes, the largest counts.

    Simulated with seeds not used for tuning (``benchmarks/logit_verdicts.py --invariance``: 21 probes, three askings, experts
    of a MoE that flip at 0.5 to 2 % of positions, by 0.01 to 0.3 nats each): an honest arm differs in 0 to 1 %; if a probe is wrong
    by 160 times the base's mean, 99.5 to 100 % do (by 40 times: 76 to 100 %), and none passes. Flips exceed a probe's bound more
    often: of honest arms of a MoE, 0 to 24 % are the same, and the others show nothing.
    """
    return float(((askings + 1) * FALSE_ALARMS / _DISTANCES) ** (-1 / _TAIL))


def bounds(base: ProbePass, again: Sequence[ProbePass], dtype: str) -> dict[Measure, Bound]:
    """Compute the distance that rounding explains: a multiple of the base's distance from itself, limited by its dtype.

    Each probe has its own bound, from its own repeats: in a bound over all probes, a single wrong one would not show. If
    `rounds_by_shape`, an arm is said to differ only beyond the base's distance from itself in any probe, whatever its dtype.

    If `rounds_by_shape`, prefill and decode share the larger floor: scoring an answer in prefill and token by token uses kernels
    as different as computing a prompt at once and in parts.

    Args:
        again: the base again, in other batches and, if `rounds_by_shape`, in longer prompts.
    """
    apart = [distances_of(base, record) for record in again]
    if rounds_by_shape(dtype):
        return dict.fromkeys(MEASURES, bound_of([each for both in apart for each in both.values()], len(again), dtype))
    return {measure: bound_of([both[measure] for both in apart], len(again), dtype) for measure in MEASURES}


def bound_of(apart: Sequence[Distance], askings: int, dtype: str) -> Bound:
    """Compute the bound of a distance from the base's distances from itself, in several askings."""
    least, most, times = _LEAST.get(dtype, _LEAST_HALF), _MOST.get(dtype, _MOST_HALF), factor(askings)
    mean = max(times * max(each.mean for each in apart), least)
    worst = max(times * max(each.worst for each in apart), _WORST_OVER_MEAN * least)

    def largest(value: int) -> dict[str, float]:
        """Return the largest mean (0) or median (1) of each probe in any asking."""
        ids = {id_ for each in apart for id_ in each.probes}
        return {id_: max(each.probes[id_][value] for each in apart if id_ in each.probes) for id_ in ids}

    def limits(typical: Callable[[Collection[float]], float]) -> dict[str, tuple[float, float]]:
        """Compute the limits of each probe from its own askings, or from the typical probe's if those are larger."""
        of = [
            {id_: max(times * max(own, typical(each.values())), _WORST_OVER_MEAN * least) for id_, own in each.items()}
            for each in (largest(0), largest(1))
        ]
        return {id_: (mean, of[1][id_]) for id_, mean in of[0].items()}

    # The askings show no rounding in a probe that they compute in the same way by chance, and none in prefill where kernels
    # compute each row alone: half of the probes showed at least the median. A probe may show next time what any one showed now.
    own, any_probe = limits(median), limits(max)
    high = _WORST_OVER_MEAN * most
    return Bound(
        min(mean, most),
        min(worst, high),
        {id_: (min(each, high), min(median, high)) for id_, (each, median) in own.items()},
        Bound(mean, worst, any_probe) if rounds_by_shape(dtype) and own else None,
    )


def kernel_cost(dtype: str) -> float:
    """Return the mean divergence, in nats, that another honest kernel may cost beyond the floor."""
    return _KERNEL_COST.get(dtype, EXACT_KL)


def changed_probes(
    base: Sequence[ProbeReply], other: Sequence[ProbeReply], limits: Mapping[Measure, Bound]
) -> list[str]:
    """Return the probes with a position or a mean out of bounds, in their order."""
    beyond: set[str] = set()
    for measure in MEASURES:
        compared = places(base, other, measure)
        beyond |= {place.probe for place in compared if place.kl > limits[measure].worst}
        beyond |= limits[measure].beyond(Distance.of(compared))
    return [reply.probe for reply in base if reply.probe in beyond]


def first_beyond(compared: Sequence[ProbePlace], bound: Bound) -> ProbePlace | None:
    """Return the first position that is out of bounds by itself, or the worst position of a probe, or of all, whose mean is."""
    first = next((place for place in compared if place.kl > bound.worst), None)
    beyond = bound.beyond(Distance.of(compared))
    return first or max(
        (place for place in compared if not beyond or place.probe in beyond), key=lambda place: place.kl, default=None
    )
