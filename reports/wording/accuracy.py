"""Sentences about answers: the loss of accuracy, and whether every question was asked and answered as planned."""

from __future__ import annotations

from typing import Any

from assay.harness.evidence.run_file import RUN_AGAIN
from assay.harness.text import counted, points, three_digits
from assay.reports.wording.say import Cases, Found, Measured, Templates, says


def _percent(share: float, digits: int = 1) -> str:
    return f"{three_digits(100 * share)} %" if digits else f"{100 * share:.0f} %"


def _points(share: float) -> str:
    return points(100 * share)


@says
def _answers_unparsed(
    reference: str, candidate: str, questions: int, unparsed: tuple[float, float], most: float
) -> str:
    shares = " and ".join(
        f"{_percent(share)} of {side}'s" for side, share in zip((reference, candidate), unparsed, strict=True)
    )
    return (
        f"{shares} answers to {counted(questions, 'question')} are unparsed, but a verdict allows at most {_percent(most, 0)}. "
        "To resolve: raise the token limit, or use questions that the model answers in the required form."
    )


@says
def _no_headroom(
    reference: str, candidate: str, accuracy: float, least: float, chance: float, margins: float, margin: float
) -> str:
    guessing = "guessing" if chance < 1 else "always the same answer"
    return (
        f"{reference[0].upper()}{reference[1:]} scores {accuracy:.3f}, {_percent(least)} or more: not shown to beat {guessing} "
        f"({_percent(chance, 0)}) by {margins:g} margins of {_points(margin)}, so a broken "
        f"{candidate.removeprefix('the ')} could look no worse."
    )


def _measured(loss: float, low: float, high: float, level: float, lost: int, gained: int, questions: int) -> str:
    """Say a loss of accuracy in points, with its interval."""
    if three_digits(100 * loss) == "0":
        change = "No loss" if loss <= 0 else f"A loss of {100 * loss:.2g} points"
    else:
        change = f"A loss of {_points(loss)}" if loss > 0 else f"A gain of {_points(-loss)}"
    of = "" if loss > 0 else "loss of "
    return (
        f"{change} ({of}{three_digits(100 * low)} to {_points(high)} with {_percent(level, 0)} confidence; {lost:,} lost and "
        f"{gained:,} gained of {counted(questions, 'question')})"
    )


@says
def _accuracy_lost(margin: float, test: str, p: float, **measured: Any) -> str:
    return f"{_measured(**measured)}: above the margin of {_points(margin)} ({test} p = {p:.2g})."


@says
def _accuracy_kept(margin: float, test: str, p: float, p_mcnemar: float | None, **measured: Any) -> str:
    but = "" if p_mcnemar is None else f"; within it, the loss is significant (exact McNemar p = {p_mcnemar:.2g})"
    return f"{_measured(**measured)}: non-inferior, below the margin of {_points(margin)} ({test} p = {p:.2g}){but}."


@says
def _accuracy_undecided(
    margin: float, test: str, p: float, p_regression: float, p_mcnemar: float | None, **measured: Any
) -> str:
    known = (
        "" if p_mcnemar is None else f" A loss is shown (exact McNemar p = {p_mcnemar:.2g}), but not how large it is."
    )
    return (
        f"{_measured(**measured)}: shown neither to be below the margin of {_points(margin)} ({test} p = {p:.2g}) nor "
        f"above it (p = {p_regression:.2g}). To resolve: more questions.{known}"
    )


_BY_BETTING = "with its {level:percent} interval by betting, which holds at every look"
"""The interval of a loss of accuracy, as a template."""


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


SENTENCES: Templates = {
    "nothing-compared": "Nothing was compared: no question was answered by both roles.",
    "policy": "Policy: {lines:listed}.",
    "accuracy-not-requested": Found("the suite accuracy was not requested", "assay run, or add accuracy to --suites"),
    "all-answered": Found("{answered} of {asked}", "repeat the command, which resumes where it stopped"),
    "another-prompt-answered": Found(
        "{answered} of {asked}; answers to another prompt: {mismatched}, the first to {first}",
        "run again with a new --out: these answers do not belong to this run's questions",
    ),
    "candidate-unparsed": "{unparsed} of the candidate's {answers:counted answer} could not be parsed",
    "no-telling-condition": "No condition separates right from wrong answers.",
    "loss-of-accuracy": Measured(
        "loss of accuracy",
        "{metric.value:points}",
        f"Over the first {{questions:,}} questions: reference minus candidate, {_BY_BETTING}",
    ),
    "flip-floor": Measured(
        "reference's own flips",
        "{questions:if {flips} of {questions}|not measured}",
        "Questions that the reference, asked twice, got right only once",
    ),
    "questions": Measured(
        "questions until the verdict",
        "{metric.value:,.0f} of at most {most:,}",
        "The test looks after each question, in random order, and asking stops when it has decided",
    ),
    "questions-lost": "{count:counted question} lost; the first: {first:commas}",
    "questions-planned": Found(
        "at most {most:counted question} in the random order of seed {seed}, margin {margin:g}, alpha {alpha:g}"
        "{stopped:if ; stopped after {pairs:,}: {stopped}|}"
    ),
    "questions-not-planned": Cases(
        "differs",
        {
            "no record": Found("no record", RUN_AGAIN),
            "settings": Found("a record of another seed, margin or alpha than the run's", RUN_AGAIN),
            "questions": Found("a record of other questions, or of another order", RUN_AGAIN),
            "population": Found("a record of a smaller set of questions", RUN_AGAIN),
        },
    ),
}
