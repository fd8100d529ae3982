"""Lengths of both roles' answers to the same prompts, in tokens: their ratio, and how many answers ran to the token limit.

The ratio is of sums, candidate over reference. A bound B of it is tested by the mean of ``candidate - B * reference`` over the
prompts, which is 0 where the ratio is B (Fieller, JRSS B 16, 175-185 (1954)), with the bootstrap-t interval of skewed values
(`assay.harness.stats.bootstrap`). An answer that ran to the token limit counts with the limit: the ratio then understates a
difference, so the numbers of these answers are compared by themselves (exact McNemar test).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from assay.harness.schema import Part
from assay.harness.stats.bootstrap import Floats, bootstrap_t
from assay.harness.stats.share import mcnemar

LENGTH_BOUND = 0.05
"""Largest change of length that passes by default. NVIDIA's gate of model releases applies it to completion tokens too."""
SURE = 1e-3
"""Error rate of calling a change of length a regression. It is added to that of a run, since lengths are tested beside the suites
and are not corrected for their number."""


Length = tuple[int, bool]
"""The length of an answer in tokens, and whether it ran to the token limit."""


_SEEN = 0.05
"""Error rate of the statement that lengths differ at all, or that answers of one role run to the limit more often."""


class AnswerLengths(Part):
    """Lengths of both roles' answers to the same prompts, in tokens."""

    prompts: int = Field(description="prompts that both answered")
    reference: float = Field(description="mean length")
    candidate: float
    longer: int = Field(description="prompts that the candidate answered at greater length")
    shorter: int
    reference_cut: int = Field(description="answers that ran to the token limit")
    candidate_cut: int
    ratio: float | None = Field(None, description="mean length, candidate over reference; null where it is undefined")
    low: float | None = Field(None, description="lower bound of the ratio; null where too few answers give one")
    high: float | None = Field(None, description="upper bound of the ratio, of the same level")
    p_beyond: float = Field(1.0, description='p value of "the ratio is within the bound", two-sided')
    p_cut: float = Field(1.0, description='exact McNemar p value of "as many ran to the token limit"')
    bound: float = Field(LENGTH_BOUND, description="largest change of the ratio from 1 that passes")

    @property
    def informative(self) -> bool:
        """True if any pair of answers ended before the limit, in either role: where none did, every length is the limit."""
        return not self.uninformative

    @property
    def uninformative(self) -> str:
        """The reason why no lengths are compared, in words; empty if they are."""
        if not self.prompts:
            return "no prompt was answered by both"
        if self.ratio is None:
            return f"the reference's {self.prompts:,} answers have no tokens"
        all_cut = min(self.reference_cut, self.candidate_cut) == self.prompts
        return f"all {self.prompts:,} answers of both ran to the limit" if all_cut else ""

    @property
    def same(self) -> bool:
        """True if the ratio is shown to be within the bound, and no more answers of one role are shown to run to the limit.

        For that, a difference of the numbers that ran to it need not be beyond the bound: their lengths are not known.
        """
        if self.low is None or self.high is None:
            return False
        return 1 - self.bound <= self.low and self.high <= 1 + self.bound and self.p_cut >= SURE

    @property
    def differ(self) -> bool:
        """True if the lengths are shown to differ, and were measured to differ by more than the bound."""
        if self.ratio is None or self.low is None or self.high is None:
            return False
        apart = abs(self.ratio - 1) > self.bound and not self.low <= 1 <= self.high
        return (apart and self._enough(_SEEN)) or self._more_cut(_SEEN)

    @property
    def beyond(self) -> bool:
        """True if the lengths are shown to differ by more than the bound, at the level `SURE`."""
        return (self.p_beyond < SURE and self._enough(SURE)) or self._more_cut(SURE)

    def _enough(self, alpha: float) -> bool:
        """Return True if as many lengths changed as a sign test needs at least: a bootstrap of two changes shows nothing."""
        return 2 * 0.5 ** (self.longer + self.shorter) < alpha

    def _more_cut(self, alpha: float) -> bool:
        apart = abs(self.candidate_cut - self.reference_cut) > self.bound * self.prompts
        return apart and self.p_cut < alpha

    @property
    def text(self) -> str:
        """The numbers in words: "31.0 tokens on average against 24.0: a ratio of 1.292 (1.210 to 1.381) over 200 prompts"."""
        ends = (self.low, self.high)
        interval = f" ({self.low:.3f} to {self.high:.3f})" if None not in ends else ""
        ratio = "" if self.ratio is None else f": a ratio of {self.ratio:.3f}{interval}"
        return (
            f"{self.candidate:.1f} tokens on average against {self.reference:.1f}{ratio} over {self.prompts:,} prompts "
            f"({self.longer:,} longer, {self.shorter:,} shorter; ran to the limit: {self.candidate_cut:,} against "
            f"{self.reference_cut:,})"
        )


def compare_lengths(
    pairs: Sequence[tuple[Length, Length]],
    alpha: float,
    bound: float = LENGTH_BOUND,
    units: Sequence[str] = (),
) -> AnswerLengths:
    """Compare both roles' lengths, prompt by prompt.

    Args:
        pairs: reference's and candidate's answer to each prompt.
        alpha: error rate of each end of the interval.
        bound: largest change of the ratio from 1 that passes.
        units: what each prompt was drawn with, empty for one drawn alone; prompts of one unit depend on each other, and count once.
    """
    given = [units[n] or f"\0{n}" if units else f"\0{n}" for n in range(len(pairs))]
    sums = dict.fromkeys(given, (0, 0))
    for unit, ((left, _), (right, _)) in zip(given, pairs, strict=True):
        sums[unit] = (sums[unit][0] + left, sums[unit][1] + right)
    reference, candidate = np.array([*sums.values()], np.float64).reshape(-1, 2).T
    cuts = Counter((left, right) for (_, left), (_, right) in pairs)
    n = max(1, len(pairs))
    measured = AnswerLengths(
        prompts=len(pairs),
        reference=reference.sum() / n,
        candidate=candidate.sum() / n,
        longer=sum(right > left for (left, _), (right, _) in pairs),
        shorter=sum(right < left for (left, _), (right, _) in pairs),
        reference_cut=cuts[True, True] + cuts[True, False],
        candidate_cut=cuts[True, True] + cuts[False, True],
        p_cut=mcnemar(cuts[True, False], cuts[False, True]),
        bound=bound,
    )
    return measured.model_copy(update=_ratio(reference, candidate, alpha, bound)) if reference.sum() else measured


def _ratio(reference: Floats, candidate: Floats, alpha: float, bound: float) -> dict[str, float]:
    """Compute the ratio with its interval, and the p value of "within the bound"."""
    ratio = float(candidate.sum() / reference.sum())
    if len(reference) == 1:
        return {"ratio": ratio}
    if (candidate == reference).all():
        return {"ratio": 1.0, "low": 1.0, "high": 1.0}
    apart = bootstrap_t((candidate - ratio * reference) / reference.mean(), alpha)
    longer = bootstrap_t(candidate - (1 + bound) * reference, alpha).p_not_above(0)
    shorter = bootstrap_t(candidate - (1 - bound) * reference, alpha).p_not_below(0)
    return {
        "ratio": ratio,
        "low": float(ratio + apart.low),
        "high": float(ratio + apart.high),
        "p_beyond": min(1.0, 2 * min(longer, shorter)),
    }
