"""Lengths of both roles' answers to the same prompts when they are not forced. Timing forces the length, so no ratio shows them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import Field

from assay.harness.evidence.timings import AnswerLength
from assay.harness.schema import Part
from assay.harness.sides import ROLES

_MIN_DIFFERENCE = 0.05
"""A difference of mean lengths below this share is not worth a finding, however significant."""


class AnswerLengths(Part):
    """Lengths of both roles' answers to the same prompts, in tokens."""

    prompts: int = Field(description="prompts that both answered")
    reference: float = Field(description="mean length")
    candidate: float
    longer: int = Field(description="prompts that the candidate answered at greater length")
    shorter: int
    reference_cut: int = Field(description="answers that ran to the token limit")
    candidate_cut: int
    p: float = Field(
        description='Wilcoxon signed-rank p value of "no difference", two-sided; 1 where no length differs'
    )
    differ: bool = Field(description=f"whether the difference is significant and above {100 * _MIN_DIFFERENCE:.0f} %")

    @property
    def informative(self) -> bool:
        """True if any pair of answers ended before the limit, in either role: where none did, every length is the limit."""
        return min(self.reference_cut, self.candidate_cut) < self.prompts


def compare_lengths(lengths: Sequence[AnswerLength], alpha: float) -> AnswerLengths:
    """Compare both roles' lengths, prompt by prompt."""
    from scipy.stats import wilcoxon  # takes a second to import

    reference, candidate = ({length.item: length for length in lengths if length.role == role} for role in ROLES)
    both = [item for item in reference if item in candidate]
    differences = [candidate[item].tokens - reference[item].tokens for item in both]
    p = float(wilcoxon(differences).pvalue) if any(differences) else 1.0
    ours, theirs = (_mean_tokens([own[item] for item in both]) for own in (reference, candidate))
    return AnswerLengths(
        prompts=len(both),
        reference=ours,
        candidate=theirs,
        longer=sum(d > 0 for d in differences),
        shorter=sum(d < 0 for d in differences),
        reference_cut=sum(reference[item].finish_reason == "length" for item in both),
        candidate_cut=sum(candidate[item].finish_reason == "length" for item in both),
        p=p,
        differ=p < alpha and abs(theirs - ours) > _MIN_DIFFERENCE * ours,
    )


def _mean_tokens(lengths: Sequence[AnswerLength]) -> float:
    return statistics.fmean(length.tokens for length in lengths) if lengths else 0.0
