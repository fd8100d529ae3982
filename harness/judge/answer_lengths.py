"""Lengths of both roles' answers to the same prompts, in tokens: their ratio, and how many answers ran to the token limit.

The ratio is of sums, candidate over reference. A bound B of it is tested by the mean of ``candidate - B * reference`` over the
prompts, which is 0 where the ratio is B (Fieller, JRSS B 16, 175-185 (1954)), with the bootstrap-t interval of skewed values
(`assay.harness.stats.bootstrap`). An answer that ran to the token limit counts with the limit: the ratio then understates a
difference, so the numbers of these answers are compared by themselves (exact McNemar test).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from pydantic import Field

from assay.harness.evidence.records import Answer
from assay.harness.judge.requirements import REQUIRED
from assay.harness.schema import Part
from assay.harness.stats.bootstrap import Floats, bootstrap_t
from assay.harness.stats.share import mcnemar
from assay.harness.verdict import Check, Finding

# Largest change of length that passes by default. NVIDIA's gate of model releases applies it to completion tokens too.
_LENGTH_BOUND = 0.05
# Error rate of calling a change of length a regression. It is added to that of a run, since lengths are tested beside the suites
# and are not corrected for their number.
_SURE = 1e-3


LIMIT = "length"
"""The reason of an answer that ran to the token limit."""
_STOP = "stop"


class AnswerEnd(NamedTuple):
    """Where and why an answer ended.

    Attributes:
        reason: "stop", "length", "abort", "content_filter", ...; empty where it is not known.
        tokens: its length.
        at: the token or the string at which it stopped; empty where the server does not tell.
    """

    reason: str
    tokens: int = 0
    at: str = ""

    @classmethod
    def of(cls, answer: Answer) -> AnswerEnd:
        """Return the end of an answer of a run."""
        return cls(answer.finish_reason, answer.completion_tokens, answer.stopped_at)


# The reference's and the candidate's end of the answer to each prompt.
_EndPairs = Sequence[tuple[AnswerEnd, AnswerEnd]]


# Error rate of the statement that lengths differ at all, or that answers of one role run to the limit more often.
_SEEN = 0.05


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
    bound: float = Field(_LENGTH_BOUND, description="largest change of the ratio from 1 that passes")

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
        return 1 - self.bound <= self.low and self.high <= 1 + self.bound and self.p_cut >= _SURE

    @property
    def differ(self) -> bool:
        """True if the lengths are shown to differ, and were measured to differ by more than the bound."""
        if self.ratio is None or self.low is None or self.high is None:
            return False
        apart = abs(self.ratio - 1) > self.bound and not self.low <= 1 <= self.high
        return (apart and self._enough(_SEEN)) or self._more_cut(_SEEN)

    @property
    def beyond(self) -> bool:
        """True if the lengths are shown to differ by more than the bound, at the level `_SURE`."""
        return (self.p_beyond < _SURE and self._enough(_SURE)) or self._more_cut(_SURE)

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
    pairs: _EndPairs, alpha: float, bound: float = _LENGTH_BOUND, units: Sequence[str] = ()
) -> AnswerLengths:
    """Compare both roles' lengths, prompt by prompt.

    Args:
        bound: largest change of the ratio from 1 that passes.
        units: what each prompt was drawn with, empty for one drawn alone; prompts of one unit depend on each other, and count once.
    """
    sums: dict[str | int, tuple[int, int]] = {}
    for number, (ours, theirs) in enumerate(pairs):
        unit = (units[number] if units else "") or number
        left, right = sums.get(unit, (0, 0))
        sums[unit] = left + ours.tokens, right + theirs.tokens
    reference, candidate = np.array([*sums.values()], np.float64).reshape(-1, 2).T
    cuts = Counter((ours.reason == LIMIT, theirs.reason == LIMIT) for ours, theirs in pairs)
    n = max(1, len(pairs))
    measured = AnswerLengths(
        prompts=len(pairs),
        reference=reference.sum() / n,
        candidate=candidate.sum() / n,
        longer=sum(theirs.tokens > ours.tokens for ours, theirs in pairs),
        shorter=sum(theirs.tokens < ours.tokens for ours, theirs in pairs),
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


LENGTH_RATIO = "answer-length-ratio"
"""Id of the metric."""
_SIDES = ("the reference", "the candidate")


def check_lengths(lengths: AnswerLengths, sides: tuple[str, str] = _SIDES) -> Check:
    """Check that no difference is seen. What too few answers leave open, and what a token limit hides, is not checked."""
    requirement = replace(REQUIRED["answer-lengths"], sides=sides)
    if nothing := lengths.uninformative:
        observed = f"{nothing}, so their lengths prove nothing"
        return requirement.check("not checked", observed, "use a model that ends its answers, or a higher token limit")
    if lengths.differ or lengths.beyond:
        return requirement.check("missing", lengths.text, "compare the answers themselves; see assay run")
    if not lengths.same:
        cut = lengths.p_cut < _SURE
        why = "one ran to the limit more often" if cut else f"not shown to be within {lengths.bound:.0%}"
        return requirement.check(
            "not checked", f"{lengths.text}: {why}", "a higher token limit" if cut else "more questions"
        )
    return requirement.check("ok", f"{lengths.text}: within {lengths.bound:.0%}")


def check_ends(pairs: _EndPairs, sides: tuple[str, str] = _SIDES) -> Check:
    """Check that no role's answers end more often for a reason, such as an abort or another stop token, but for the limit.

    What an answer stopped at counts where both servers always tell. Prompts with an unknown reason are left out.
    """
    requirement = replace(REQUIRED["finish-reasons"], sides=sides)
    known = [pair for pair in pairs if all(end.reason for end in pair)]
    if not known:
        return requirement.check("not checked", "why they ended is not recorded", "results that record finish reasons")
    told = all(end.at for pair in known for end in pair if end.reason == _STOP)
    named = [
        tuple(f"{_STOP} at {end.at}" if told and end.reason == _STOP else end.reason for end in pair) for pair in known
    ]
    counts = []
    for reason in sorted({reason for pair in named for reason in pair} - {LIMIT}):
        # An answer that ran to the limit might have stopped in any way, but would not have been aborted.
        compared = [pair for pair in named if not (reason.startswith(_STOP) and LIMIT in pair)]
        ours, theirs = (sum(pair[side] == reason for pair in compared) for side in (0, 1))
        both = compared.count((reason, reason))
        if ours or theirs:
            counts.append((mcnemar(ours - both, theirs - both), reason, ours, theirs))
    # Bonferroni's correction for the number of reasons. Those that differ come first, then the most frequent.
    corrected = [(min(1.0, len(counts) * p), reason, ours, theirs) for p, reason, ours, theirs in counts]
    corrected.sort(key=lambda count: (count[0] >= _SURE, -(count[2] + count[3])))
    text = "; ".join(
        f"{reason}: {ours:,} against {theirs:,}{f' (p = {p:.1g})' if p < _SURE else ''}"
        for p, reason, ours, theirs in corrected
    )
    if any(p < _SURE for p, *_ in corrected):
        return requirement.check("failed", text, "see the answers that end so, and the server's log")
    return requirement.check("ok", text or "all ran to the limit")


def beyond_words(lengths: AnswerLengths, whose: str = "The candidate") -> str:
    """Describe a difference beyond the bound, in a sentence that names the test."""
    sure = f"above {lengths.bound:.0%} at an error rate of {_SURE:g}, which is not corrected for other suites"
    return f"{whose}'s answers are {_other(lengths)}: {lengths.text}; {sure}."


def lengths_finding(lengths: AnswerLengths, reproduce: str, consequence: str, *, serious: bool) -> Finding:
    """Make the finding of answers of another length."""
    return Finding(
        id="answer-lengths",
        title="answers differ in length",
        severity="serious" if serious else "warning",
        where="answer lengths when not forced",
        diagnosis=f"The candidate's answers are {_other(lengths)}: {consequence}",
        evidence=(lengths.text,),
        reproduce=reproduce,
    )


def _other(lengths: AnswerLengths) -> str:
    """Return "longer" or "shorter"; of equal means, by the answers that ran to the limit."""
    theirs, ours = (lengths.candidate, lengths.candidate_cut), (lengths.reference, lengths.reference_cut)
    return "longer" if theirs > ours else "shorter"
