"""The result of one pass over the probes: it is equal to its base, it differs, or it shows nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from assay.harness.evidence.probes import ProbePass, ProbeReply, Scores, TracedPlace
from assay.harness.evidence.records import Answer
from assay.harness.judge.greedy_texts import compare_text, first_divergence
from assay.harness.judge.noise_limits import EXACT_SWING
from assay.harness.judge.probe_scores import (
    MEASURES,
    Bound,
    Distance,
    Measure,
    ProbePlace,
    distances_of,
    first_beyond,
    places,
)
from assay.harness.statement import Statement, state

State = Literal["same", "differs", "not shown", "not run"]

# Share of the declared tokens per pass that speculation must reach: the last pass of an answer has fewer.
_ACCEPTED = 0.75
# Drafts are lost above this multiple of the passes that the same speculation takes alone, for the same tokens.
_MORE_PASSES = 1.05
# Differences in passes are not due to chance above this multiple of the root of the sum of their squares, over all probes. A
# draft at a tie is accepted or not, with the same chances in either arm: sums of such differences are beyond this once
# in 3,000 (Hoeffding, JASA 58, 13-30 (1963), theorem 2: exp(-16 / 2)).
_BEYOND_TIES = 4.0


@dataclass(frozen=True)
class PassOutcome:
    """The result of a pass.

    Attributes:
        arm: the features that were on.
        state: "same", "differs", "not shown" (a feature was not shown to be on, or nothing was compared) or "not run".
        distances: from its base, by measure.
        first: the first position, in reading order, that differs, or None.
        why: reasons for a state other than "same" or "differs"; or differences other than distances.
        place: the position that is farthest away in the measure of `first`, or None: it differs again even in another batch.
    """

    arm: frozenset[str]
    state: State
    distances: Mapping[Measure, Distance]
    first: ProbePlace | None = None
    why: tuple[Statement, ...] = ()
    place: TracedPlace | None = None


def accept_length(arm: ProbePass) -> float | None:
    """Return the mean number of tokens of a pass that verified drafts, or None without speculation."""
    passes = sum(reply.verifications for reply in arm.replies)
    written = sum(len(reply.decode.tokens) for reply in arm.replies if reply.verifications)
    return written / passes if passes else None


def outcome(
    base: ProbePass,
    record: ProbePass,
    limits: Mapping[Measure, Bound],
    swing: float = EXACT_SWING,
    drafts: float = 0.0,
    drafted: ProbePass | None = None,
) -> PassOutcome:
    """Judge a pass.

    Args:
        drafts: declared tokens of a pass that verifies drafts, or 0.
    """
    arm = frozenset(record.features)
    if not record.complete:
        return PassOutcome(arm, "not run", {}, why=(state("shows-nothing", why="failed", said=record.problem),))
    distances = distances_of(base, record)
    foreign = _foreign_blocks(base, record)
    floors = {measure: limits[measure].floor or limits[measure] for measure in MEASURES}
    wrong = [measure for measure in MEASURES if not floors[measure].holds(distances[measure])]
    if wrong:
        first = first_beyond(places(base.replies, record.replies, wrong[0]), floors[wrong[0]])
        why = (*filter(None, [foreign]), *_notes(record))
        return PassOutcome(arm, "differs", distances, first, why, _traced(distances[wrong[0]]))
    if (
        apart := foreign
        or _texts_apart(base, record, swing)
        or _ends_elsewhere(base, record)
        or _writes_another(base, record, swing)
        or _drafts_lost(record, drafts, drafted)
    ):
        return PassOutcome(arm, "differs", distances, None, (apart,))
    if why := _notes(record) or _not_compared(base, record):
        return PassOutcome(arm, "not shown", distances, why=why)
    unclear = [measure for measure in MEASURES if not limits[measure].holds(distances[measure])]
    if unclear:
        at = first_beyond(places(base.replies, record.replies, unclear[0]), limits[unclear[0]])
        why = (state("shows-nothing", why="noise", probe=at.probe if at else ""),)
        return PassOutcome(arm, "not shown", distances, why=why)
    return PassOutcome(arm, "same", distances)


def _traced(distance: Distance) -> TracedPlace | None:
    return TracedPlace(probe=distance.at.probe, index=distance.at.index) if distance.at else None


def _notes(record: ProbePass) -> tuple[Statement, ...]:
    """State which features were not shown to be on, and why."""
    unseen = {id_: "" for id_ in record.features if id_ not in record.seen} | record.unseen
    return tuple(state("shows-nothing", why="feature", feature=id_, said=said) for id_, said in unseen.items())


def _not_compared(base: ProbePass, record: ProbePass) -> tuple[Statement, ...]:
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


def _foreign_blocks(base: ProbePass, record: ProbePass) -> Statement | None:
    """State which prompt got tokens from the prefix cache that no earlier prompt had in the same places, unless the base's did."""
    own = {reply.probe: reply.foreign_tokens for reply in base.replies}
    got = [reply for reply in record.replies if reply.foreign_tokens > own.get(reply.probe, 0)]
    if not got:
        return None
    first = got[0]
    shared = first.cached_tokens - first.foreign_tokens
    return state(
        "arm-differs", by="cache", answers=len(got), probe=first.probe, cached=first.cached_tokens, shared=shared
    )


def _texts_apart(base: ProbePass, record: ProbePass, swing: float) -> Statement | None:
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


def _ends_elsewhere(base: ProbePass, record: ProbePass) -> Statement | None:
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


def _writes_another(base: ProbePass, record: ProbePass, swing: float) -> Statement | None:
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


def _drafts_lost(record: ProbePass, drafts: float, drafted: ProbePass | None) -> Statement | None:
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
    return state("arm-differs", by="drafts", passes=took + more, alone=took, arm=" + ".join(sorted(drafted.features)))
