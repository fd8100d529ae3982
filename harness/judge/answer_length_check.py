"""Lengths of both roles' answers, and why they ended -> the metric, the checks and the finding about them, of runs and benches."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.evidence.records import Answer
from assay.harness.judge.answer_ends import LIMIT, AnswerEnd, compare_ends
from assay.harness.judge.answer_lengths import SURE, AnswerLengths, compare_lengths
from assay.harness.judge.answers import Pair
from assay.harness.judge.report import Metric
from assay.harness.policy import Policy
from assay.harness.verdict import Check, Finding, Requirement

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


def ratio_metric(lengths: AnswerLengths, policy: Policy) -> Metric:
    """Express the ratio with its interval and its bound."""
    return Metric(
        id=LENGTH_RATIO,
        title="length of answers, candidate over reference",
        value=lengths.ratio,
        text="not measured" if lengths.ratio is None else f"{lengths.ratio:.3f}",
        low=lengths.low,
        high=lengths.high,
        bound=1 + lengths.bound,
        bound_is="most",
        policy=policy.line("length_bound"),
        explain=f"{lengths.text[0].upper()}{lengths.text[1:]}; as far below 1 is out of bounds too",
    )


def check_lengths(lengths: AnswerLengths, sides: tuple[str, str] = _SIDES) -> Check:
    """Check that no difference is seen. What too few answers leave open, and what a token limit hides, is not checked."""
    requirement = Requirement(
        "answer-lengths", f"{sides[1]}'s answers are as long as {sides[0]}'s, where no length is forced"
    )
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
    """Check that no role's answers end more often for a reason, such as an abort or another stop token; the limit is not counted.

    Args:
        pairs: reference's and candidate's end of the answer to each prompt.
        sides: names of both.
    """
    ours, theirs = sides
    requirement = Requirement(
        "finish-reasons", f"{theirs}'s answers end as {ours}'s do", f"{theirs}'s answers do not end as {ours}'s do"
    )
    counts = compare_ends(pairs)
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
    """Make the finding of answers of another length.

    Args:
        lengths: of both roles.
        reproduce: the command.
        consequence: of it, a sentence.
        serious: whether it is a regression.
    """
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
