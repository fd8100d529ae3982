"""The words of answers: the loss of accuracy, and whether every question was asked and answered as planned."""

from __future__ import annotations

from typing import Any

from assay.harness.evidence.run_file import RUN_AGAIN
from assay.harness.judge.judgement import Metric
from assay.harness.text import listed
from assay.reports.wording.say import Found, Measured, says


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _points(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:.1f}"  # adding 0 turns -0.0 into 0.0


@says
def _nothing_compared() -> str:
    return "Nothing was compared: no question was answered by both roles."


@says
def _answers_unparsed(
    reference: str, candidate: str, questions: int, unparsed: tuple[float, float], most: float
) -> str:
    shares = " and ".join(
        f"{_percent(share)} of {side}'s" for side, share in zip((reference, candidate), unparsed, strict=True)
    )
    return (
        f"{shares} answers to {questions:,} questions are unparsed, where {_percent(most, 0)} is the most that allows a verdict. "
        "To resolve: raise the token limit, or use questions that the model answers in the required form."
    )


@says
def _no_headroom(
    reference: str, candidate: str, accuracy: float, least: float, chance: float, margins: float, margin: float
) -> str:
    guessing = "guessing" if chance < 1 else "always the same answer"
    return (
        f"{reference[0].upper()}{reference[1:]} scores {accuracy:.3f}, {_percent(least)} or more: not shown to beat {guessing} "
        f"({_percent(chance, 0)}) by {margins:g} margins of {_points(margin)} points, so a broken "
        f"{candidate.removeprefix('the ')} could look no worse."
    )


def _measured(loss: float, low: float, high: float, level: float, lost: int, gained: int, questions: int) -> str:
    """Say a loss of accuracy in points, with its interval."""
    if _points(loss) == "0.0":
        change = "No loss" if loss <= 0 else f"A loss of {100 * loss:.2g} points"
    else:
        change = f"A loss of {_points(loss)} points" if loss > 0 else f"A gain of {_points(-loss)} points"
    of = "" if loss > 0 else "loss of "
    return (
        f"{change} ({of}{_points(low)} to {_points(high)} points with {_percent(level, 0)} confidence; {lost:,} lost and "
        f"{gained:,} gained of {questions:,} questions)"
    )


@says
def _accuracy_lost(margin: float, test: str, p: float, **measured: Any) -> str:
    return f"{_measured(**measured)}: above the margin of {_points(margin)} points ({test} p = {p:.2g})."


@says
def _accuracy_kept(margin: float, test: str, p: float, p_mcnemar: float | None, **measured: Any) -> str:
    but = "" if p_mcnemar is None else f"; within it, the loss is significant (exact McNemar p = {p_mcnemar:.2g})"
    return f"{_measured(**measured)}: non-inferior, below the margin of {_points(margin)} points ({test} p = {p:.2g}){but}."


@says
def _accuracy_undecided(
    margin: float, test: str, p: float, p_regression: float, p_mcnemar: float | None, **measured: Any
) -> str:
    known = (
        "" if p_mcnemar is None else f" A loss is shown (exact McNemar p = {p_mcnemar:.2g}), but not how large it is."
    )
    return (
        f"{_measured(**measured)}: shown neither to be below the margin of {_points(margin)} points ({test} p = {p:.2g}) nor "
        f"above it (p = {p_regression:.2g}). To resolve: more questions.{known}"
    )


@says
def _policy(lines: list[str]) -> str:
    return f"Policy: {listed(lines)}."


@says
def _loss_of_accuracy(metric: Metric, questions: int, level: float) -> Measured:
    return Measured(
        "loss of accuracy",
        in_points(metric),
        f"Over the first {questions:,} questions: reference minus candidate, {by_betting(level)}",
    )


def in_points(metric: Metric) -> str:
    """Say a loss of accuracy in points."""
    return f"{metric.value:.1f} points"


def by_betting(level: float) -> str:
    """Name the interval of a loss of accuracy."""
    return f"with its {_percent(level, 0)} interval by betting, which holds at every look"


@says
def _flip_floor(metric: Metric, flips: int, questions: int) -> Measured:
    text = f"{flips} of {questions}" if questions else "not measured"
    return Measured("reference's own flips", text, "Questions that the reference, asked twice, got right only once")


@says
def _questions(metric: Metric, most: int) -> Measured:
    about = "The test looks after each question, in random order, and asking stops when it has decided"
    return Measured("questions until the verdict", f"{metric.value:,.0f} of at most {most:,}", about)


@says
def _accuracy_not_requested() -> Found:
    return Found("the suite accuracy was not requested", "assay run, or add accuracy to --suites")


@says
def _questions_planned(most: int, seed: int, margin: float, alpha: float, pairs: int, stopped: str) -> Found:
    stop = f"; stopped after {pairs:,}: {stopped}" if stopped else ""
    return Found(
        f"at most {most:,} questions in the random order of seed {seed}, margin {margin:g}, alpha {alpha:g}{stop}"
    )


_NOT_PLANNED = {
    "no record": "no record",
    "settings": "a record of another seed, margin or alpha than the run's",
    "questions": "a record of other questions, or of another order",
    "population": "a record of a smaller set of questions",
}


@says
def _questions_not_planned(differs: str) -> Found:
    return Found(_NOT_PLANNED[differs], RUN_AGAIN)


@says
def _all_answered(answered: int, asked: int) -> Found:
    return Found(f"{answered} of {asked}", "repeat the command, which resumes where it stopped")


@says
def _another_prompt_answered(answered: int, asked: int, mismatched: int, first: str) -> Found:
    return Found(
        f"{answered} of {asked}; answers to another prompt: {mismatched}, the first to {first}",
        "run again with a new --out: these answers do not belong to this run's questions",
    )


@says
def _questions_lost(count: int, first: list[str]) -> str:
    return f"{count} questions lost; the first: {', '.join(first)}"


@says
def _candidate_unparsed(unparsed: int, answers: int) -> str:
    return f"{unparsed} of the candidate's {answers} answers could not be parsed"


@says
def _no_telling_condition() -> str:
    return "No condition separates right from wrong answers."


_Rows = list[tuple[str, int, int, int]]


@says
def _telling_condition(split: str, p: float, cached_prefix: bool, intact: _Rows, broken: _Rows) -> str:
    told = (
        f"Correct answers by {split}: {_counts(intact)}, but {_counts(broken)}; p = {p:.2g} (Fisher's exact test, Holm's "
        "correction)."
    )
    aligned = (
        " The kernel is correct without a cached prefix: check how its causal mask is aligned when there are more keys than queries"
        " (query i must see keys j <= i + len_k - len_q)."
    )
    return told + aligned * cached_prefix


def _counts(rows: _Rows) -> str:
    return ", ".join(f"{right}/{of} at {bucket} (reference {reference}/{of})" for bucket, right, reference, of in rows)
