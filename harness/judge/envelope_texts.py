"""Both servers' answers to the requests of the envelope: which of them differ by more than noise.

Each request stands for lengths of its own, so a single one that differs by more than noise rules out a pass; a share that is
shown to be above the policy's greedy margin is a regression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from assay.harness.compare.answers import Pair
from assay.harness.compare.greedy_texts import TextDivergence, compare_text, floor_between, is_finite
from assay.harness.judge.report import Metric
from assay.harness.judge.suite_decisions import decide_share
from assay.harness.policy import Policy
from assay.harness.stats.share import p_not_above
from assay.harness.text import few
from assay.harness.verdict import Verdict

METRIC = "envelope-texts-apart"
_MOST_NAMED = 4


@dataclass(frozen=True)
class EnvelopeTexts:
    """The answers to the requests of the envelope, against the limits of greedy texts.

    Attributes:
        pairs: answers of both roles, with the log-probabilities of their tokens.
        floor: the reference's own run-to-run floor, in nats.
        limit: largest change of log-odds or of a log-probability, in nats, that noise explains.
        policy: of the run.
    """

    pairs: Sequence[Pair]
    floor: float
    limit: float
    policy: Policy

    @cached_property
    def divergences(self) -> list[tuple[Pair, TextDivergence]]:
        """Pairs whose texts differ, and by how much."""
        compared = [
            (pair, compare_text(pair.reference.tokens, pair.candidate.tokens, self.floor, self.limit))
            for pair in self.pairs
        ]
        return [(pair, divergence) for pair, divergence in compared if divergence is not None]

    @cached_property
    def beyond(self) -> list[Pair]:
        """The answers that differ by more than the limit: in their texts, or in the log-probabilities of equal tokens."""
        apart = {pair.item.id for pair, divergence in self.divergences if divergence.kind == "apart"}
        return [pair for pair in self.pairs if pair.item.id in apart or _change(pair) > self.limit]

    @property
    def p(self) -> float:
        """p value of "the true share of such answers is at most the policy's greedy margin"; 1 without an answer."""
        return p_not_above(len(self.beyond), len(self.pairs), self.policy.greedy_margin) if self.pairs else 1.0

    def combined(self, verdict: Verdict, why: str, *, trusted: bool) -> tuple[Verdict, str]:
        """Combine the verdict on greedy texts with that on these, and return the sentence that explains it.

        Args:
            verdict: on the greedy texts.
            why: the sentence that says why.
            trusted: whether the reference's own answers are steady and finite, so that a difference is the candidate's.
        """
        if not self.beyond:
            return verdict, why
        asked = len(self.pairs)
        named = few([pair.item.id for pair in self.beyond], _MOST_NAMED)
        said = f"{len(self.beyond)} of {asked} answers over the envelope differ by more than noise: {named}."
        share = decide_share(len(self.beyond), asked, self.policy.greedy_margin, self.policy.alpha)
        finite = all(is_finite(pair.reference.tokens) for pair in self.pairs)
        if share.verdict == "regression" and trusted and finite:
            return "regression", f"{said} {why}"
        return ("regression", f"{why} {said}") if verdict == "regression" else ("inconclusive", f"{said} {why}")

    @property
    def metrics(self) -> list[Metric]:
        """Their number; none without an answer."""
        if not self.pairs:
            return []
        return [
            Metric(
                id=METRIC,
                title="answers over the envelope that differ by more than noise",
                value=float(len(self.beyond)),
                text=f"{len(self.beyond)} of {len(self.pairs)}",
                bound=0.0,
                bound_is="most",
                explain="Of the candidate's own server, to the requests that take the shadow through the envelope; equal tokens are"
                " compared by their log-probabilities",
            )
        ]


def _change(pair: Pair) -> float:
    """Compute the largest change of a log-probability or of log-odds, in nats, over the tokens with the same history."""
    return floor_between(pair.reference.tokens, pair.candidate.tokens)
