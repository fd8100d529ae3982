"""Both servers' answers to the requests of the envelope: which of them differ by more than noise.

Each request stands for lengths of its own, so a single one that differs by more than noise rules out a pass; a share that is
shown to be above the policy's greedy margin is a regression.
"""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.compare.answers import Pair
from assay.harness.compare.greedy_texts import TextDivergence, compare_text, floor_between, is_finite
from assay.harness.judge.suite_decisions import decide_share
from assay.harness.policy import Policy
from assay.harness.text import few
from assay.harness.verdict import Verdict

_MOST_NAMED = 4


def compare_envelope(
    pairs: Sequence[Pair], floor: float, limit: float
) -> tuple[list[tuple[Pair, TextDivergence]], list[Pair]]:
    """Compare the answers to the requests of the envelope, within the limits of greedy texts.

    Args:
        pairs: answers of both roles, with the log-probabilities of their tokens.
        floor: the reference's own run-to-run floor, in nats.
        limit: largest change of log-odds or of a log-probability, in nats, that noise explains.

    Returns:
        Pairs whose texts differ, and by how much; and those that differ by more than the limit: in their texts, or in the
        log-probabilities of equal tokens.
    """
    compared = [(pair, compare_text(pair.reference.tokens, pair.candidate.tokens, floor, limit)) for pair in pairs]
    divergences = [(pair, divergence) for pair, divergence in compared if divergence is not None]
    apart = {pair.item.id for pair, divergence in divergences if divergence.kind == "apart"}
    return divergences, [pair for pair in pairs if pair.item.id in apart or _change(pair) > limit]


def with_envelope(
    verdict: Verdict, why: str, pairs: Sequence[Pair], beyond: Sequence[Pair], policy: Policy, *, trusted: bool
) -> tuple[Verdict, str]:
    """Combine the verdict on greedy texts with that on the envelope's, and return the sentence that explains it.

    Args:
        verdict: on the greedy texts.
        why: the sentence that says why.
        pairs: answers over the envelope.
        beyond: those that differ by more than noise.
        policy: of the run.
        trusted: whether the reference's own answers are steady and finite, so that a difference is the candidate's.
    """
    if not beyond:
        return verdict, why
    named = few([pair.item.id for pair in beyond], _MOST_NAMED)
    said = f"{len(beyond)} of {len(pairs)} answers over the envelope differ by more than noise: {named}."
    share = decide_share(len(beyond), len(pairs), policy.greedy_margin, policy.alpha)
    finite = all(is_finite(pair.reference.tokens) for pair in pairs)
    if share.verdict == "regression" and trusted and finite:
        return "regression", f"{said} {why}"
    return ("regression", f"{why} {said}") if verdict == "regression" else ("inconclusive", f"{said} {why}")


def _change(pair: Pair) -> float:
    """Compute the largest change of a log-probability or of log-odds, in nats, over the tokens with the same history."""
    return floor_between(pair.reference.tokens, pair.candidate.tokens)
