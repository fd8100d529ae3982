"""Lengths of both roles' answers to the same prompts, in tokens: their ratio, and how many answers ran to the token limit.

The ratio is of sums, candidate over reference. A bound B of it is tested by the mean of ``candidate - B * reference`` over the
prompts, which is 0 if the ratio is B (Fieller, JRSS B 16, 175-185 (1954)), with the bootstrap-t interval of skewed values
(`assay.harness.stats.bootstrap`). An answer that ran to the token limit counts with the limit: the ratio then understates a
difference, so the numbers of these answers are compared separately (exact McNemar test).

Servers may count tokens differently, for example including the one that ends an answer. If the counts of most equal texts differ,
lengths are compared in characters: equal texts are equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from assay.harness.evidence.records import Answer
from assay.harness.schema import Part
from assay.harness.statement import Statement, state
from assay.harness.stats.bootstrap import Floats, bootstrap_t
from assay.harness.stats.share import mcnemar
from assay.harness.verdict import Check, Finding, Requirement

# Largest change of length that passes by default. NVIDIA's gate of model releases applies it to completion tokens too.
_LENGTH_BOUND = 0.05
# Error rate of calling a change of length a regression. It is added to the run's, since lengths are tested in addition to the
# suites, without a correction for their number.
_SURE = 1e-3


LIMIT = "length"
"""The reason of an answer that ran to the token limit."""
_STOP = "stop"
# Tokens by which counts of equal texts may differ: one that begins and one that ends them. More are tokens that no text shows.
_UNSEEN = 2.0
# Reasons for which a model ends an answer by itself, or a limit does. Others, such as "abort" and "content_filter", are events.
_BY_ITSELF = (_STOP, LIMIT, "model_length", "tool_calls", "function_call")


class AnswerEnd(NamedTuple):
    """Where and why an answer ended.

    Attributes:
        reason: "stop", "length", "abort", "content_filter", ..., or empty if unknown.
        tokens: length of the answer.
        at: the token or the string at which it stopped, or empty if the server does not report it.
        text: the answer, or empty if unknown.
    """

    reason: str
    tokens: int = 0
    at: str = ""
    text: str = ""

    @classmethod
    def of(cls, answer: Answer) -> AnswerEnd:
        """Return the end of an answer of a run."""
        return cls(answer.finish_reason, answer.completion_tokens, answer.stopped_at, answer.text)


# The reference's and the candidate's end of the answer to each prompt.
_EndPairs = Sequence[tuple[AnswerEnd, AnswerEnd]]


# Error rate of the statement that lengths differ at all, or that answers of one role run to the limit more often.
_SEEN = 0.05


class AnswerLengths(Part):
    """Lengths of both roles' answers to the same prompts, in tokens, or in characters if the servers count tokens differently."""

    prompts: int = Field(description="prompts that both answered")
    reference: float = Field(description="mean length")
    candidate: float
    longer: int = Field(description="prompts that the candidate answered at greater length")
    shorter: int
    reference_cut: int = Field(description="answers that ran to the token limit")
    candidate_cut: int
    ratio: float | None = Field(None, description="mean length, candidate over reference, or null if undefined")
    low: float | None = Field(None, description="lower bound of the ratio, or null with too few answers")
    high: float | None = Field(None, description="upper bound of the ratio, of the same level")
    p_beyond: float = Field(1.0, description='p value of "the ratio is within the bound", two-sided')
    p_cut: float = Field(1.0, description='exact McNemar p value of "as many ran to the token limit"')
    recounted: float | None = Field(
        None,
        description="tokens that the candidate's server counts more for an equal text, on average; lengths are then in "
        "characters, as they are at 0, if no tokens are recorded. null: equal texts have equal counts, or none is equal",
    )
    bound: float = Field(_LENGTH_BOUND, description="largest change of the ratio from 1 that passes")

    @property
    def uninformative(self) -> Literal["", "no prompt", "no tokens", "all cut"]:
        """Why lengths are not compared: no prompt was answered by both, the reference's answers are empty, or all were cut."""
        if not self.prompts:
            return "no prompt"
        if self.ratio is None:
            return "no tokens"
        return "all cut" if min(self.reference_cut, self.candidate_cut) == self.prompts else ""

    @property
    def same(self) -> bool:
        """True if the ratio is shown to be within the bound, and no more answers of one role are shown to run to the limit.

        Tokens that no text shows may be of any number.
        """
        if self.low is None or self.high is None or self.unseen:
            return False
        return 1 - self.bound <= self.low and self.high <= 1 + self.bound and not self.more_cut

    @property
    def more_cut(self) -> bool:
        """True if answers of one role are shown to run to the limit more often, however slightly: their lengths are unknown."""
        return self.p_cut < _SEEN

    @property
    def unseen(self) -> bool:
        """True if counts of equal texts differ by more tokens than begin and end them."""
        return abs(self.recounted or 0.0) > _UNSEEN

    @property
    def measured_beyond(self) -> bool:
        """True if the measured ratio is beyond the bound, shown or not."""
        return self.ratio is not None and abs(self.ratio - 1) > self.bound

    @property
    def differ(self) -> bool:
        """True if the lengths are shown to differ, and were measured to differ by more than the bound."""
        if self.ratio is None or self.low is None or self.high is None:
            return False
        apart = self.measured_beyond and not self.low <= 1 <= self.high
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


def compare_lengths(
    pairs: _EndPairs, alpha: float, bound: float = _LENGTH_BOUND, units: Sequence[str] = (), *, counted: bool = True
) -> AnswerLengths:
    """Compare both roles' lengths, prompt by prompt.

    Args:
        bound: largest change of the ratio from 1 that passes.
        units: the unit of each prompt, or empty for one drawn alone; prompts of one unit are dependent, and count once.
        counted: whether the lengths are counts of tokens instead of characters.
    """
    recounted = _recounted(pairs) if counted else 0.0
    lengths = [
        (len(ours.text), len(theirs.text)) if recounted else (ours.tokens, theirs.tokens) for ours, theirs in pairs
    ]
    reference, candidate = np.array(_by_unit(lengths, units), np.float64).reshape(-1, 2).T
    cuts = [(ours.reason == LIMIT, theirs.reason == LIMIT) for ours, theirs in pairs]
    n = max(1, len(pairs))
    measured = AnswerLengths(
        prompts=len(pairs),
        reference=reference.sum() / n,
        candidate=candidate.sum() / n,
        longer=sum(theirs > ours for ours, theirs in lengths),
        shorter=sum(theirs < ours for ours, theirs in lengths),
        reference_cut=sum(ours for ours, _ in cuts),
        candidate_cut=sum(theirs for _, theirs in cuts),
        p_cut=_p_alike(cuts, units),
        recounted=recounted,
        bound=bound,
    )
    return measured.model_copy(update=_ratio(reference, candidate, alpha, bound)) if reference.sum() else measured


def _by_unit(pairs: Sequence[tuple[int, int]], units: Sequence[str]) -> list[tuple[int, int]]:
    """Add up numbers of both roles by unit."""
    sums: dict[str | int, tuple[int, int]] = {}
    for number, (ours, theirs) in enumerate(pairs):
        unit = (units[number] if units else "") or number
        left, right = sums.get(unit, (0, 0))
        sums[unit] = left + ours, right + theirs
    return list(sums.values())


def _p_alike(pairs: Sequence[tuple[int, int]], units: Sequence[str]) -> float:
    """Compute the exact p value of "neither role has more", by a sign test of units: McNemar's, of prompts drawn alone."""
    sums = _by_unit(pairs, units)
    return mcnemar(sum(ours > theirs for ours, theirs in sums), sum(theirs > ours for ours, theirs in sums))


def _recounted(pairs: _EndPairs) -> float | None:
    """Return how many tokens more the candidate's server counts for equal texts, or None unless it does so for most of them."""
    apart = [theirs.tokens - ours.tokens for ours, theirs in pairs if ours.text and ours.text == theirs.text]
    return (sum(apart) / len(apart) or None) if 2 * sum(map(bool, apart)) > len(apart) else None


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


_SIDES = ("the reference", "the candidate")


def state_lengths(id: str, lengths: AnswerLengths, **values: object) -> Statement:
    """Make a statement that has the numbers of the lengths."""
    return state(id, **lengths.model_dump(exclude={"p_beyond", "p_cut"}), **values)


def check_lengths(lengths: AnswerLengths, sides: tuple[str, str] = _SIDES) -> Check:
    """Check that no difference is seen. What too few answers leave open is not checked.

    A ratio that was measured beyond the bound is never met, whether or not it is shown to differ from 1, and neither are lengths if
    more answers of one role ran to the limit (exact McNemar test, at 0.05). Rates of sets without a pass, simulated
    (``benchmarks/accuracy_errors.py --lengths``), for 50, 200 and 1,000 prompts of log-normal lengths (sigma .6):

        equal lengths that all differ by a sigma of .3      35 %     5 %     0
        by one of .5                                        57 %    26 %     1 %
        half of them by .3                                  19 %     1 %     0
        half of them by .5                                  39 %    11 %     0
        5 % of either role run to a limit of 4 means        68 %    41 %     6 %
        1 % of the candidate to a limit of 36 means         40 %    86 %   100 %
        1 % of the candidate to a limit of 4 means          34 %    17 %    94 % (2.5 % without that test)
        5 % of the candidate to a limit of 4 means          87 %    99 %   100 %

    Of the sets with runaways to 36 means, all that contain one are unmet; the others have none. Honest lengths that scatter pay the
    price: at a sigma of .5, the ratio of 200 prompts has a standard error of 4 %, and only more prompts lower it. The geometric
    mean of the prompts' ratios does not help: it is off by half a variance if one role scatters.

    Args:
        sides: names of both.
    """
    requirement = Requirement("answer-lengths", sides=sides)
    if why := lengths.uninformative:
        return requirement.check("not checked", state("lengths-prove-nothing", why=why, prompts=lengths.prompts))
    if lengths.differ or lengths.beyond:
        return requirement.check("missing", state_lengths("lengths-differ", lengths))
    if not lengths.same:
        undecided = state_lengths("lengths-undecided", lengths, more_cut=lengths.more_cut, unseen=lengths.unseen)
        open_ = lengths.unseen or lengths.measured_beyond or lengths.more_cut
        return requirement.check("missing" if open_ else "not checked", undecided)
    return requirement.check("ok", state_lengths("lengths-within", lengths))


def check_ends(pairs: _EndPairs, sides: tuple[str, str] = _SIDES, *, units: Sequence[str] = ()) -> Check:
    """Check that no role's answers end more often for a reason, such as another stop token, but for the limit.

    An end that only one role's answers have and that is not the model's own, such as an abort or a filter, fails at its first
    occurrence. The stop token counts if both servers always report it. Prompts without a reason are omitted; units count once.
    """
    requirement = Requirement("finish-reasons", sides=sides)
    units = [unit for unit, pair in zip(units, pairs, strict=bool(units)) if all(end.reason for end in pair)]
    known = [pair for pair in pairs if all(end.reason for end in pair)]
    if not known:
        return requirement.check("not checked", state("ends-not-recorded"))
    told = all(end.at for pair in known for end in pair if end.reason == _STOP)
    named = [
        tuple(f"{_STOP} at {end.at}" if told and end.reason == _STOP else end.reason for end in pair) for pair in known
    ]
    counts, alone = [], []
    for reason in sorted({reason for pair in named for reason in pair} - {LIMIT}):
        # An answer that ran to the limit might have stopped in any way, but would not have been aborted.
        ended = [
            (0, 0) if reason.startswith(_STOP) and LIMIT in pair else (int(pair[0] == reason), int(pair[1] == reason))
            for pair in named
        ]
        ours, theirs = (sum(pair[side] for pair in ended) for side in (0, 1))
        if ours or theirs:
            counts.append((_p_alike(ended, units), reason, ours, theirs))
        if any(a != b for a, b in ended) and not reason.startswith(_BY_ITSELF):
            alone.append(reason)
    # Bonferroni's correction for the number of reasons. Those that differ come first, then the most frequent.
    corrected = [(min(1.0, len(counts) * p), reason, ours, theirs) for p, reason, ours, theirs in counts]
    corrected.sort(key=lambda count: (count[0] >= _SURE and count[1] not in alone, -(count[2] + count[3])))
    failed = bool(alone) or any(p < _SURE for p, *_ in corrected)
    ends = [(reason, ours, theirs, p if p < _SURE else None) for p, reason, ours, theirs in corrected]
    return requirement.check("failed" if failed else "ok", state("ends", ends=ends, alone=alone))


def state_beyond(lengths: AnswerLengths, whose: str = "The candidate") -> Statement:
    """State a difference beyond the bound, and the error rate of saying so."""
    return state_lengths("lengths-beyond", lengths, whose=whose, error_rate=_SURE)


def lengths_finding(lengths: AnswerLengths, reproduce: str) -> Finding:
    """Make the finding that answers differ in length, so that each costs as much more or less."""
    return Finding(
        id="answer-lengths",
        title="answers differ in length",
        severity="serious",
        where="answer lengths when not forced",
        claim=state_lengths("other-lengths", lengths),
        shown_by=(state_lengths("lengths", lengths),),
        reproduce=reproduce,
    )
