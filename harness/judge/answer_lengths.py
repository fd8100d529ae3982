"""Lengths of both roles' answers to the same prompts, in tokens: their ratio, and how many answers ran to the token limit.

The ratio is of sums, candidate over reference. A bound B of it is tested by the mean of ``candidate - B * reference`` over the
prompts, which is 0 where the ratio is B (Fieller, JRSS B 16, 175-185 (1954)), with the bootstrap-t interval of skewed values
(`assay.harness.stats.bootstrap`). An answer that ran to the token limit counts with the limit: the ratio then understates a
difference, so the numbers of these answers are compared by themselves (exact McNemar test).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from pydantic import Field

from assay.harness.evidence.records import Answer
from assay.harness.judge.answers import Pair
from assay.harness.judge.requirements import REQUIRED
from assay.harness.policy import Policy
from assay.harness.schema import Part
from assay.harness.stats.bootstrap import Floats, bootstrap_t
from assay.harness.stats.share import mcnemar
from assay.harness.verdict import Check, Finding

LENGTH_BOUND = 0.05
"""Largest change of length that passes by default. NVIDIA's gate of model releases applies it to completion tokens too."""
SURE = 1e-3
"""Error rate of calling a change of length a regression. It is added to that of a run, since lengths are tested beside the suites
and are not corrected for their number."""


_Length = tuple[int, bool]
"""The length of an answer in tokens, and whether it ran to the token limit."""


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
    pairs: Sequence[tuple[_Length, _Length]],
    alpha: float,
    bound: float = LENGTH_BOUND,
    units: Sequence[str] = (),
) -> AnswerLengths:
    """Compare both roles' lengths, prompt by prompt.

    Args:
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


LIMIT = "length"
"""The reason of an answer that ran to the token limit, of which `assay.harness.judge.answer_lengths` decides."""
_STOP = "stop"


class AnswerEnd(NamedTuple):
    """Why an answer ended.

    Attributes:
        reason: "stop", "length", "abort", "content_filter", ...; empty where it is not known.
        at: the token or the string at which it stopped; empty where the server does not tell.
    """

    reason: str
    at: str = ""


@dataclass(frozen=True)
class _ReasonCount:
    """How many answers ended for a reason.

    Attributes:
        reason: in words, such as "stop at 2".
        reference: answers.
        candidate: answers.
        p: exact McNemar p value of "as many ended so", times the number of reasons (Bonferroni).
    """

    reason: str
    reference: int
    candidate: int
    p: float

    @property
    def differs(self) -> bool:
        """True if one role's answers are shown to end so more often, at the level `SURE`."""
        return self.p < SURE

    @property
    def text(self) -> str:
        """The counts in words, the reference first: "abort: 0 against 45 (p = 6e-14)"."""
        said = f" (p = {self.p:.1g})" if self.differs else ""
        return f"{self.reason}: {self.reference:,} against {self.candidate:,}{said}"


def _compare_ends(pairs: Sequence[tuple[AnswerEnd, AnswerEnd]]) -> list[_ReasonCount]:
    """Count the answers that ended for each reason but the limit, most frequent first.

    What an answer stopped at counts where both servers always tell. An answer that ran to the limit might have stopped in any way:
    prompts with such an answer are left out where ways to stop are counted, and not where others are, as "abort".

    Args:
        pairs: reference's and candidate's end of the answer to each prompt; those with an unknown reason are left out.
    """
    known = [pair for pair in pairs if all(end.reason for end in pair)]
    told = all(end.at for pair in known for end in pair if end.reason == _STOP)
    named = [(_named(ours, told), _named(theirs, told)) for ours, theirs in known]
    reasons = sorted({reason for pair in named for reason in pair} - {LIMIT})
    counts = [
        _count(reason, [pair for pair in named if not (reason.startswith(_STOP) and LIMIT in pair)])
        for reason in reasons
    ]
    used = [count for count in counts if count.reference or count.candidate]
    corrected = [_ReasonCount(c.reason, c.reference, c.candidate, min(1.0, len(used) * c.p)) for c in used]
    return sorted(corrected, key=lambda count: -(count.reference + count.candidate))


def _named(end: AnswerEnd, told: bool) -> str:
    return f"{_STOP} at {end.at}" if told and end.reason == _STOP else end.reason


def _count(reason: str, pairs: Sequence[tuple[str, str]]) -> _ReasonCount:
    lost = sum(ours == reason != theirs for ours, theirs in pairs)
    gained = sum(theirs == reason != ours for ours, theirs in pairs)
    both = sum(ours == theirs == reason for ours, theirs in pairs)
    return _ReasonCount(reason, both + lost, both + gained, mcnemar(lost, gained))


LENGTH_RATIO = "answer-length-ratio"
"""Id of the metric."""
_SIDES = ("the reference", "the candidate")


def lengths_of(pairs: Sequence[Pair], policy: Policy) -> AnswerLengths:
    """Compare the lengths of answers to questions; those that share a passage count once."""
    lengths = [
        (
            (pair.reference.completion_tokens, pair.reference.finish_reason == LIMIT),
            (pair.candidate.completion_tokens, pair.candidate.finish_reason == LIMIT),
        )
        for pair in pairs
    ]
    return compare_lengths(lengths, policy.alpha, policy.length_bound, [pair.item.unit for pair in pairs])


def check_lengths(lengths: AnswerLengths, sides: tuple[str, str] = _SIDES) -> Check:
    """Check that no difference is seen. What too few answers leave open, and what a token limit hides, is not checked."""
    requirement = REQUIRED["answer-lengths"].between(*sides)
    if not lengths.informative:
        observed = f"{lengths.uninformative}, so their lengths prove nothing"
        return requirement.check("not checked", observed, "use a model that ends its answers, or a higher token limit")
    if lengths.differ or lengths.beyond:
        return requirement.check("missing", lengths.text, "compare the answers themselves; see assay run")
    if not lengths.same:
        cut = lengths.p_cut < SURE
        why = "one ran to the limit more often" if cut else f"not shown to be within {lengths.bound:.0%}"
        return requirement.check(
            "not checked", f"{lengths.text}: {why}", "a higher token limit" if cut else "more questions"
        )
    return requirement.check("ok", f"{lengths.text}: within {lengths.bound:.0%}")


def check_ends(pairs: Sequence[tuple[AnswerEnd, AnswerEnd]], sides: tuple[str, str] = _SIDES) -> Check:
    """Check that no role's answers end more often for a reason, such as an abort or another stop token, but for the limit."""
    requirement = REQUIRED["finish-reasons"].between(*sides)
    counts = _compare_ends(pairs)
    if not any(all(end.reason for end in pair) for pair in pairs):
        return requirement.check("not checked", "why they ended is not recorded", "results that record finish reasons")
    text = "; ".join(count.text for count in [*(c for c in counts if c.differs), *(c for c in counts if not c.differs)])
    if any(count.differs for count in counts):
        return requirement.check("failed", text, "see the answers that end so, and the server's log")
    return requirement.check("ok", text or "all ran to the limit")


def end_of(answer: Answer) -> AnswerEnd:
    """Return why an answer ended."""
    return AnswerEnd(answer.finish_reason, answer.stopped_at)


def beyond_words(lengths: AnswerLengths, whose: str = "The candidate") -> str:
    """Describe a difference beyond the bound, in a sentence that names the test."""
    sure = f"above {lengths.bound:.0%} at an error rate of {SURE:g}, which is not corrected for other suites"
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
    if lengths.candidate == lengths.reference:
        return "longer" if lengths.candidate_cut > lengths.reference_cut else "shorter"
    return "longer" if lengths.candidate > lengths.reference else "shorter"
