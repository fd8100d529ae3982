"""Distance between two arms: the same tokens, scored with other features on.

The divergence at a position is `assay.harness.judge.logits.merged_kl`, over the base's most probable tokens and the sequence's
own one. A token that the other arm does not list is no more probable there than the least one that it lists; that is taken where it
is less than the base's, so that the divergence is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from assay.harness.evidence.invariance import ArmRecord, ProbeReply, Scores
from assay.harness.judge.logits import merged_kl

Measure = Literal["prefill", "decode"]
MEASURES: tuple[Measure, Measure] = ("prefill", "decode")
_NOTHING = -1000.0
"""Log-probability in both arms of a token that only fills up a row: it adds nothing to a divergence."""


@dataclass(frozen=True)
class ProbePlace:
    """A position at which two arms were compared.

    Attributes:
        probe: id of the probe.
        index: of the predicted token in the sequence, from 0.
        kl: divergence from the base, in nats; infinite where a log-probability is not finite.
    """

    probe: str
    index: int
    kl: float


def places(base: Sequence[ProbeReply], other: Sequence[ProbeReply], measure: Measure) -> list[ProbePlace]:
    """Compare two passes position by position, in the order of the probes.

    Answers are compared as long as they are the same: what follows another token has another history.
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
    """Return both arms' log-probabilities of the base's most probable tokens and of the sequence's own, at a position of each.

    What was written is the base's most probable token already. Where an arm that prefers another one was forced, the server returns
    the log-probability of that one as its own.
    """
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
    """The distance of an arm from its base, in one measure.

    Attributes:
        positions: compared.
        mean: divergence over all positions, in nats.
        worst: the largest of a position.
        at: where that is; None where nothing was compared.
    """

    positions: int
    mean: float
    worst: float
    at: ProbePlace | None

    @classmethod
    def of(cls, compared: Sequence[ProbePlace]) -> Distance:
        """Sum up positions."""
        if not compared:
            return cls(0, 0.0, 0.0, None)
        worst = max(compared, key=lambda place: place.kl)
        return cls(len(compared), math.fsum(place.kl for place in compared) / len(compared), worst.kl, worst)


@dataclass(frozen=True)
class Bound:
    """The largest distance that is no difference, in nats: of the mean, and of one position."""

    mean: float
    worst: float

    def holds(self, distance: Distance) -> bool:
        """Return True if a distance is within it."""
        return distance.mean <= self.mean and distance.worst <= self.worst


def accept_length(arm: ArmRecord) -> float | None:
    """Return the tokens that a pass which verified drafts gave on average; None without speculation."""
    passes = sum(reply.verifications for reply in arm.replies)
    written = sum(len(reply.decode.tokens) for reply in arm.replies if reply.verifications)
    return written / passes if passes else None
