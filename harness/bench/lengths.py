"""How long answers are if they may end when they like: timing forces their length, so that no ratio is one of lengths."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from assay.harness.engines.base import ChatRequest, Engine, Reply
from assay.harness.evidence.records import Item
from assay.harness.evidence.timings import AnswerLength

PROMPTS = 16
TOLD = 0.05
"""A difference of mean lengths below this share is not worth a finding, however significant."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of both roles' answers to the same prompts, in tokens.

    Attributes:
        n: prompts that both answered.
        reference: mean length.
        candidate: mean length.
        longer: prompts that the candidate answered at greater length.
        shorter: prompts that it answered more briefly.
        reference_cut: answers that ran to the token limit.
        candidate_cut: the same, of the candidate.
        p: Wilcoxon signed-rank p value of "no difference", two-sided; 1 where no length differs.
        differ: whether the difference is significant and above `TOLD`.
    """

    n: int
    reference: float
    candidate: float
    longer: int
    shorter: int
    reference_cut: int
    candidate_cut: int
    p: float
    differ: bool

    @property
    def told(self) -> bool:
        """Whether any pair of answers ended before the limit, in either role: where none did, every length is the limit's."""
        return min(self.reference_cut, self.candidate_cut) < self.n


def ask_lengths(engine: Engine, items: Sequence[Item], limit: int, concurrency: int) -> list[AnswerLength]:
    """Ask a server prompts, let it end when it likes, and return how long its answers are.

    Args:
        engine: started.
        items: prompts.
        limit: most tokens of an answer.
        concurrency: most requests in flight.

    Raises:
        EngineError: the server failed.
    """
    replies: dict[int, Reply] = {}
    engine.flush_cache()
    engine.ask([ChatRequest(item.prompt, limit) for item in items], concurrency, replies.__setitem__)
    return [
        AnswerLength(
            role=engine.role, item=item.id, tokens=replies[i].completion_tokens, finish_reason=replies[i].finish_reason
        )
        for i, item in enumerate(items)
    ]


def compare_lengths(lengths: Sequence[AnswerLength], alpha: float) -> Lengths:
    """Compare both roles' lengths, prompt by prompt."""
    from scipy.stats import wilcoxon  # takes half a second to import

    by_role = {role: {one.item: one for one in lengths if one.role == role} for role in ("reference", "candidate")}
    reference, candidate = by_role["reference"], by_role["candidate"]
    pairs = [(reference[item], candidate[item]) for item in reference if item in candidate]
    differences = [theirs.tokens - ours.tokens for ours, theirs in pairs]
    p = float(wilcoxon(differences).pvalue) if any(differences) else 1.0
    ours = statistics.fmean(one.tokens for one, _ in pairs) if pairs else 0.0
    theirs = statistics.fmean(one.tokens for _, one in pairs) if pairs else 0.0
    return Lengths(
        n=len(pairs),
        reference=ours,
        candidate=theirs,
        longer=sum(d > 0 for d in differences),
        shorter=sum(d < 0 for d in differences),
        reference_cut=sum(one.finish_reason == "length" for one, _ in pairs),
        candidate_cut=sum(one.finish_reason == "length" for _, one in pairs),
        p=p,
        differ=p < alpha and abs(theirs - ours) > TOLD * ours,
    )
