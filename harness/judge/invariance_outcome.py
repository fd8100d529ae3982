"""The result of one arm: it is equal to its base, it differs, or it shows nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from assay.harness.engines.sglang.features import Feature
from assay.harness.evidence.invariance import ArmRecord, ProbeReply, Scores
from assay.harness.evidence.records import Answer
from assay.harness.judge.greedy_texts import compare_text, first_divergence
from assay.harness.judge.invariance_arms import BASE, Arm, base_of, name_of, speculation_of
from assay.harness.judge.noise_limits import EXACT_KL, EXACT_SWING
from assay.harness.judge.probe_scores import MEASURES, Bound, Distance, Measure, ProbePlace, accept_length, places
from assay.harness.sides import flag_values
from assay.harness.statement import Statement, state

BASE_AGAIN = ("base again", "base longer", "base third")
"""Why the base is asked again: in half precision for all of these reasons, otherwise for the first alone."""
State = Literal["same", "differs", "not shown", "not run"]

# Rate at which an honest arm is said to differ, and the distances of an arm that share it: the mean, the worst position, and the
# largest mean and median of a probe, of prefill and of decode.
_FALSE_ALARMS, _DISTANCES = 0.01, 8
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
# Change of log-odds, in nats, below which another greedy text is a tie, by dtype; in others `EXACT_SWING`.
_SWING: Mapping[str, float] = {"float32": 1e-3}
# If nothing is measured, the worst of a thousand positions may have this multiple of the mean.
_WORST_OVER_MEAN = 100.0
# Share of the declared tokens per pass that speculation must reach: the last pass of an answer has fewer.
_ACCEPTED = 0.75
# Drafts are lost above this multiple of the passes that the same speculation takes alone, for the same tokens.
_MORE_PASSES = 1.05
# Differences in passes are not due to chance above this multiple of the root of the sum of their squares, over all probes. A
# draft at a tie is accepted or not, with the same chances in either arm: sums of such differences are beyond this once
# in 3,000 (Hoeffding, JASA 58, 13-30 (1963), theorem 2: exp(-16 / 2)).
_BEYOND_TIES = 4.0


@dataclass(frozen=True)
class ArmOutcome:
    """The result of an arm.

    Attributes:
        arm: the features that were on.
        state: "same", "differs", "not shown" (a feature was not shown to be on, or nothing was compared) or "not run".
        distances: from its base, by measure.
        first: the first position, in reading order, that differs, or None.
        why: reasons for a state other than "same" or "differs"; or differences other than distances.
    """

    arm: Arm
    state: State
    distances: Mapping[Measure, Distance]
    first: ProbePlace | None = None
    why: tuple[Statement, ...] = ()


def rounds_by_shape(dtype: str) -> bool:
    """Return True if batch size visibly changes rounding, because kernels then sum in another order."""
    return dtype != "float32"


def floor_of(base: ArmRecord, again: Sequence[ArmRecord]) -> dict[Measure, Distance]:
    """Measure the base's distance from itself: for each measure, of the pass over the same tokens that is farthest away."""
    return {
        measure: max(
            (Distance.of(places(base.replies, record.replies, measure)) for record in again),
            key=lambda distance: distance.mean,
        )
        for measure in MEASURES
    }


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
    return float(((askings + 1) * _FALSE_ALARMS / _DISTANCES) ** (-1 / _TAIL))


def bounds(base: ArmRecord, again: Sequence[ArmRecord], dtype: str) -> dict[Measure, Bound]:
    """Compute the distance that rounding explains: a multiple of the base's distance from itself, limited by its dtype.

    Each probe has its own bound, from its own repeats: in a bound over all probes, a single wrong one would not show. If
    `rounds_by_shape`, an arm is said to differ only beyond the base's distance from itself in any probe, whatever its dtype.

    If `rounds_by_shape`, prefill and decode share the larger floor: scoring an answer in prefill and token by token uses kernels
    as different as computing a prompt at once and in parts.

    Args:
        again: the base again, in other batches and, if `rounds_by_shape`, in longer prompts.
    """
    apart = {
        measure: [Distance.of(places(base.replies, record.replies, measure)) for record in again]
        for measure in MEASURES
    }
    if rounds_by_shape(dtype):
        shared = [each for measure in MEASURES for each in apart[measure]]
        return dict.fromkeys(MEASURES, bound_of(shared, len(again), dtype))
    return {measure: bound_of(apart[measure], len(again), dtype) for measure in MEASURES}


def bound_of(apart: Sequence[Distance], askings: int, dtype: str) -> Bound:
    """Compute the bound of a distance from the base's distances from itself, in several askings."""
    least, most, times = _LEAST.get(dtype, _LEAST_HALF), _MOST.get(dtype, _MOST_HALF), factor(askings)
    mean = max(times * max(each.mean for each in apart), least)
    worst = max(times * max(each.worst for each in apart), _WORST_OVER_MEAN * least)

    def largest(ids: Collection[str], value: int) -> float:
        of = (each.probes[id_][value] for each in apart for id_ in ids if id_ in each.probes)
        return max(times * max(of), _WORST_OVER_MEAN * least)

    ids = {id_ for each in apart for id_ in each.probes}
    own = {id_: (largest([id_], 0), largest([id_], 1)) for id_ in ids}
    # A probe may show next time what another probe showed now.
    any_probe = dict.fromkeys(own, (largest(ids, 0), largest(ids, 1))) if own else {}
    high = _WORST_OVER_MEAN * most
    return Bound(
        min(mean, most),
        min(worst, high),
        {id_: (min(each, high), min(median, high)) for id_, (each, median) in own.items()},
        Bound(mean, worst, any_probe) if rounds_by_shape(dtype) and own else None,
    )


def widened(
    limits: Mapping[Measure, Bound], arm: Iterable[str], known: Mapping[str, Feature], dtype: str
) -> dict[Measure, Bound]:
    """Widen bounds by the declared cost of an arm's features.

    Another kernel rounds like an honest one. Deterministic kernels do not depend on the batch, so nothing may differ from their
    separate base if the other features are deterministic too.
    """
    costs = {known[id_].cost for id_ in arm}
    if "a base of its own" in costs and all(
        known[id_].bitwise or known[id_].cost == "a base of its own" for id_ in arm
    ):
        return (
            dict.fromkeys(limits, Bound(0.0, 0.0))
            if any(known[id_].bitwise for id_ in arm)
            else _kernels(limits, dtype)
        )
    return _kernels(limits, dtype) if "another kernel" in costs else dict(limits)


def _kernels(limits: Mapping[Measure, Bound], dtype: str) -> dict[Measure, Bound]:
    """Widen bounds by the different rounding of another honest kernel."""
    cost = _KERNEL_COST.get(dtype, EXACT_KL)
    return {
        measure: bound.widened(cost, _WORST_OVER_MEAN * cost, _PROBE_OVER_MEAN * cost)
        for measure, bound in limits.items()
    }


def _swing_limit(dtype: str, arm: Iterable[str], known: Mapping[str, Feature]) -> float:
    """Return the largest change of the log-odds of two tokens, in nats, that makes another greedy text a tie."""
    if any(known[id_].cost == "another kernel" for id_ in arm):
        return EXACT_SWING
    return _SWING.get(dtype, EXACT_SWING)


def outcome(
    base: ArmRecord,
    record: ArmRecord,
    limits: Mapping[Measure, Bound],
    swing: float = EXACT_SWING,
    drafts: float = 0.0,
    drafted: ArmRecord | None = None,
) -> ArmOutcome:
    """Judge an arm.

    Args:
        drafts: declared tokens of a pass that verifies drafts, or 0.
    """
    arm = frozenset(record.features)
    if not record.complete:
        return ArmOutcome(arm, "not run", {}, why=(state("shows-nothing", why="failed", said=record.problem),))
    compared = {measure: places(base.replies, record.replies, measure) for measure in MEASURES}
    distances = {measure: Distance.of(positions) for measure, positions in compared.items()}
    floors = {measure: limits[measure].floor or limits[measure] for measure in MEASURES}
    wrong = [measure for measure in MEASURES if not floors[measure].holds(distances[measure])]
    if wrong:
        return ArmOutcome(arm, "differs", distances, _first(compared[wrong[0]], floors[wrong[0]]), _notes(record))
    if (
        apart := _texts_apart(base, record, swing)
        or _ends_elsewhere(base, record)
        or _writes_another(base, record, swing)
        or _drafts_lost(record, drafts, drafted)
    ):
        return ArmOutcome(arm, "differs", distances, None, (apart,))
    if why := _notes(record) or _not_compared(base, record):
        return ArmOutcome(arm, "not shown", distances, why=why)
    unclear = [measure for measure in MEASURES if not limits[measure].holds(distances[measure])]
    if unclear:
        at = _first(compared[unclear[0]], limits[unclear[0]])
        return ArmOutcome(
            arm, "not shown", distances, why=(state("shows-nothing", why="noise", probe=at.probe if at else ""),)
        )
    return ArmOutcome(arm, "same", distances)


def _notes(record: ArmRecord) -> tuple[Statement, ...]:
    """State which features were not shown to be on, and why."""
    unseen = {id_: "" for id_ in record.features if id_ not in record.seen} | record.unseen
    return tuple(state("shows-nothing", why="feature", feature=id_, said=said) for id_, said in unseen.items())


def _not_compared(base: ArmRecord, record: ArmRecord) -> tuple[Statement, ...]:
    """State which comparisons did not reach their end. With verified drafts, a comparison ends at a tie."""
    own = {reply.probe: reply for reply in record.replies}
    if {text.item for text in base.texts} != {text.item for text in record.texts}:
        return (state("shows-nothing", why="texts", written=len(record.texts), texts=len(base.texts)),)
    if own.keys() != {reply.probe for reply in base.replies}:
        return (state("shows-nothing", why="probes", answered=len(own), probes=len(base.replies)),)
    for reply in base.replies:
        other = own[reply.probe]
        if not all(scores.tokens for each in (reply, other) for scores in (each.prefill, each.decode)):
            return (state("shows-nothing", why="scores", probe=reply.probe),)
        if reply.prefill.end != other.prefill.end or reply.prompt_tokens != other.prompt_tokens:
            return (state("shows-nothing", why="prompt", probe=reply.probe),)
        if _parting(reply, other) is not None and not _unforced(reply, other):
            return (state("shows-nothing", why="answer", probe=reply.probe),)
    return ()


def _unforced(first: ProbeReply, second: ProbeReply) -> bool:
    return bool(first.verifications or second.verifications)


def _parting(base: ProbeReply, other: ProbeReply) -> int | None:
    """Return the first token of an answer that differs from the base's, or None."""
    pairs = zip(base.decode.tokens, other.decode.tokens, strict=False)
    return next((at for at, (token, written) in enumerate(pairs) if token != written), None)


def _first(compared: Sequence[ProbePlace], bound: Bound) -> ProbePlace | None:
    """Return the first position that is out of bounds by itself, or the worst position of a probe, or of all, whose mean is."""
    first = next((place for place in compared if place.kl > bound.worst), None)
    beyond = bound.beyond(Distance.of(compared))
    return first or max(
        (place for place in compared if not beyond or place.probe in beyond), key=lambda place: place.kl, default=None
    )


def _texts_apart(base: ArmRecord, record: ArmRecord, swing: float) -> Statement | None:
    """State which greedy text diverges from the base's without a tie, or ends differently after the same tokens, if any."""
    own = {text.item: text for text in record.texts}
    apart = [
        (text, divergence)
        for text in base.texts
        if text.item in own
        if (divergence := compare_text(text.tokens, own[text.item].tokens, 0.0, swing)) is not None
        and divergence.kind == "apart"
    ]
    if apart:
        text, divergence = apart[0]
        at = divergence.position + 1
        return state("arm-differs", by="texts", parted=len(apart), texts=len(base.texts), first=text.item, token=at)
    same = [
        text for text in base.texts if text.item in own and first_divergence(text.tokens, own[text.item].tokens) is None
    ]
    ends = [(_end_of(text), _end_of(own[text.item]), text.item) for text in same]
    otherwise = [end for end in ends if end[0] != end[1]]
    if not otherwise:
        return None
    before, now, first = otherwise[0]
    return state("arm-differs", by="ends of texts", texts=len(otherwise), first=first, before=before, now=now)


def _end_of(text: Answer) -> tuple[str, int]:
    return text.finish_reason, text.completion_tokens


def _ends_elsewhere(base: ArmRecord, record: ArmRecord) -> Statement | None:
    """State which answer of a requested length has another length or another reason to end, if any."""
    own = {reply.probe: reply for reply in record.replies}
    both = [(reply, own[reply.probe]) for reply in base.replies if reply.probe in own]
    lengths = [(reply.probe, len(reply.decode.tokens), len(other.decode.tokens)) for reply, other in both]
    finishes = [(reply.probe, reply.finish, other.finish) for reply, other in both]
    for by, ends in (("lengths", lengths), ("ends", finishes)):
        if other := [end for end in ends if end[1] != end[2]]:
            probe, before, now = other[0]
            return state("arm-differs", by=by, answers=len(other), probe=probe, before=before, now=now)
    return None


def _writes_another(base: ArmRecord, record: ArmRecord, swing: float) -> Statement | None:
    """State which answer has another token than the base's without a tie between the two, if any."""
    own = {reply.probe: reply for reply in record.replies}
    apart = [
        (reply.probe, at)
        for reply in base.replies
        if reply.probe in own
        and (at := _parting(reply, own[reply.probe])) is not None
        and not _preference(reply.decode, own[reply.probe].decode, at)
        + _preference(own[reply.probe].decode, reply.decode, at)
        <= swing
    ]
    if not apart:
        return None
    return state("arm-differs", by="tokens", answers=len(apart), probe=apart[0][0], token=apart[0][1] + 1)


def _preference(own: Scores, other: Scores, at: int) -> float:
    """Return how much more probable a pass finds its own token than the other's, in nats; infinite if it is not listed."""
    listed = dict(zip(own.ids[at], own.logprobs[at], strict=True))
    return abs(listed.get(own.tokens[at], math.inf) - listed.get(other.tokens[at], -math.inf))


def _drafts_lost(record: ArmRecord, drafts: float, drafted: ArmRecord | None) -> Statement | None:
    """State that fewer drafts were accepted than declared, or than in the variant they are compared with, if so."""
    accepted = accept_length(record)
    if accepted is None:
        return None
    if accepted < _ACCEPTED * drafts:
        return state("arm-differs", by="drafts declared", accepted=accepted, declared=drafts)
    if drafted is None or not drafted.complete:
        return None
    alone = {reply.probe: reply for reply in drafted.replies if reply.verifications}
    passes = [
        (reply.verifications, own.verifications)
        for reply in record.replies
        if (own := alone.get(reply.probe)) and reply.decode.tokens == own.decode.tokens
    ]
    more, took = sum(arm - own for arm, own in passes), sum(own for _, own in passes)
    spread = math.sqrt(sum((arm - own) ** 2 for arm, own in passes))
    if more <= (_MORE_PASSES - 1) * took or more < _BEYOND_TIES * spread:
        return None
    return state("arm-differs", by="drafts", passes=took + more, alone=took, arm=name_of(drafted.features))


@dataclass(frozen=True)
class ArmJudge:
    """Judges the arms of an invocation.

    Attributes:
        records: the first record of each arm, and of the base.
        limits: bounds of the distances, without the cost of a feature.
    """

    records: Mapping[Arm, ArmRecord]
    limits: Mapping[Measure, Bound]
    known: Mapping[str, Feature]
    dtype: str
    flags: tuple[str, ...] = ()

    def base_of(self, arm: Arm) -> ArmRecord | None:
        """Return the record that a variant is compared with, or None if it did not finish."""
        base = self.records.get(base_of(arm, self.known))
        return base if base is not None and base.complete else None

    def limits_of(self, arm: Arm) -> dict[Measure, Bound]:
        """Return the bounds, widened by the declared cost of an arm's features."""
        return widened(self.limits, arm, self.known, self.dtype)

    def drafted_by(self, arm: Arm) -> ArmRecord | None:
        """Return the arm whose drafts an arm's are compared with: its speculation alone, or a base that speculates; or None.

        Drafts of n-grams depend on earlier requests, and are not compared.
        """
        alone = speculation_of(arm, self.known)
        if alone == BASE and flag_values(self.flags).get("--speculative-algorithm", "NGRAM").upper() == "NGRAM":
            return None
        return self.records.get(alone) if alone != arm else None

    def outcome(self, record: ArmRecord) -> ArmOutcome:
        """Judge an arm's record."""
        arm = frozenset(record.features)
        if (base := self.base_of(arm)) is None:
            why = state("shows-nothing", why="base", base=name_of(base_of(arm, self.known)))
            return ArmOutcome(arm, "not run", {}, why=(why,))
        swing = _swing_limit(self.dtype, arm, self.known)
        drafts = max((self.known[id_].drafts for id_ in arm), default=0.0)
        return outcome(base, record, self.limits_of(arm), swing, drafts, self.drafted_by(arm))


def smallest(failing: Collection[Arm]) -> list[Arm]:
    """Return the variants that differ while none of their parts does, smallest first."""
    return sorted(
        (arm for arm in failing if not any(other < arm for other in failing)), key=lambda arm: (len(arm), sorted(arm))
    )
