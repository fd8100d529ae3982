"""Distance between two variants: the same tokens, scored with different features on.

The divergence at a position is `assay.harness.judge.logits.merged_kl`, over the base's most probable tokens and the sequence's
own one. A token that the other arm does not list is no more probable there than the least one that it lists; that value is used if
it is below the base's, so that the divergence is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Literal

import numpy as np

from assay.harness.evidence.invariance import ArmRecord, ProbeReply, Scores
from assay.harness.judge.logits import merged_kl

Measure = Literal["prefill", "decode"]
MEASURES: tuple[Measure, Measure] = ("prefill", "decode")
# Log-probability in both variants of a token that only pads a row: it adds nothing to a divergence.
_NOTHING = -1000.0


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
    """The largest distance that does not count as a difference, in nats: of the mean, of one position, and of each probe's mean and
    median.

    Attributes:
        mean: over all positions.
        worst: of one position.
        probes: of the mean and the median over the positions of a probe, by its id.
        floor: the base's distance from itself, if larger: a variant within it shows nothing.
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

    def widened(self, mean: float, worst: float, probe: float) -> Bound:
        """Return the bound with so much more of each distance."""
        floor = self.floor and self.floor.widened(mean, worst, probe)
        probes = {id_: (own + probe, median + probe) for id_, (own, median) in self.probes.items()}
        return Bound(self.mean + mean, self.worst + worst, probes, floor)


def accept_length(arm: ArmRecord) -> float | None:
    """Return the mean number of tokens of a pass that verified drafts, or None without speculation."""
    passes = sum(reply.verifications for reply in arm.replies)
    written = sum(len(reply.decode.tokens) for reply in arm.replies if reply.verifications)
    return written / passes if passes else None


def changed_probes(base: Sequence[ProbeReply], arm: Sequence[ProbeReply], limits: Mapping[Measure, Bound]) -> list[str]:
    """Return the probes with a position or a mean out of bounds, in their order."""
    compared = {measure: places(base, arm, measure) for measure in MEASURES}
    beyond = {place.probe for measure in MEASURES for place in compared[measure] if place.kl > limits[measure].worst}
    beyond |= {probe for measure in MEASURES for probe in limits[measure].beyond(Distance.of(compared[measure]))}
    return [reply.probe for reply in base if reply.probe in beyond]
