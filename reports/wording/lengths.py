"""Sentences about answer lengths, and about why answers ended."""

from __future__ import annotations

from typing import Any

from assay.harness.judge.judgement import Metric
from assay.harness.text import counted
from assay.reports.wording.say import Cases, Found, Measured, Templates, says


@says
def _lengths(
    candidate: float, reference: float, prompts: int, longer: int, shorter: int, candidate_cut: int, reference_cut: int,
    ratio: float | None, low: float | None, high: float | None, bound: float, recounted: float | None = None,
) -> str:  # fmt: skip
    interval = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
    of = "" if ratio is None else f": a ratio of {ratio:.3f}{interval}"
    unit = "tokens" if recounted is None else "characters"
    counts = (
        ""
        if not recounted
        else f"; for equal texts the servers count {recounted:+.1f} tokens, candidate less reference"
    )
    return (
        f"{candidate:.1f} {unit} on average against {reference:.1f}{of} over {counted(prompts, 'prompt')} ({longer:,} longer, "
        f"{shorter:,} shorter; ran to the limit: {candidate_cut:,} against {reference_cut:,}{counts})"
    )


_UNINFORMATIVE = {
    "no prompt": "no prompt was answered by both",
    "no tokens": "the reference's {:,} answers have no tokens",
    "all cut": "all {:,} answers of both ran to the limit",
}


def _nothing_compared(why: str, prompts: int) -> str:
    """Say why no lengths are compared."""
    return _UNINFORMATIVE[why].format(prompts)


@says
def _lengths_prove_nothing(why: str, prompts: int) -> Found:
    return Found(
        f"{_nothing_compared(why, prompts)}, so their lengths prove nothing",
        "use a model that ends its answers, or a higher token limit",
    )


@says
def _lengths_differ(**numbers: Any) -> Found:
    return Found(_lengths(**numbers), "compare the answers themselves; see assay run")


@says
def _lengths_undecided(more_cut: bool, unseen: bool = False, **numbers: Any) -> Found:
    if unseen:
        return Found(
            f"{_lengths(**numbers)}: some tokens are in no text", "the tokens themselves: skip_special_tokens off"
        )
    if more_cut:
        return Found(f"{_lengths(**numbers)}: one ran to the limit more often", "a higher token limit")
    return Found(f"{_lengths(**numbers)}: not shown to be within {numbers['bound']:.0%}", "more questions")


@says
def _lengths_within(**numbers: Any) -> Found:
    return Found(f"{_lengths(**numbers)}: within {numbers['bound']:.0%}")


@says
def _lengths_beyond(whose: str, error_rate: float, **numbers: Any) -> str:
    sure = f"above {numbers['bound']:.0%} at an error rate of {error_rate:g}, which is not corrected for other suites"
    return f"{whose}'s answers are {_other(**numbers)}: {_lengths(**numbers)}; {sure}."


def _other(candidate: float, reference: float, candidate_cut: int, reference_cut: int, **_: Any) -> str:
    """Return "longer" or "shorter"; if the means are equal, by the answers that ran to the limit."""
    return "longer" if (candidate, candidate_cut) > (reference, reference_cut) else "shorter"


@says
def _other_lengths(**numbers: Any) -> str:
    return f"The candidate's answers are {_other(**numbers)}: every answer costs as much more or less."


@says
def _answer_length_ratio(metric: Metric, **numbers: Any) -> Measured:
    said = _lengths(**numbers)
    return Measured(
        "length of answers, candidate over reference",
        "not measured" if metric.value is None else f"{metric.value:.3f}",
        f"{said[0].upper()}{said[1:]}; as far below 1 is out of bounds too",
    )


@says
def _ends(ends: list[tuple[str, int, int, float | None]], alone: list[str]) -> Found:
    counts = (
        f"{reason}: {ours:,} against {theirs:,}"
        + (f" (p = {p:.1g})" if p is not None else ", on one side only" if reason in alone else "")
        for reason, ours, theirs, p in ends
    )
    return Found("; ".join(counts) or "all ran to the limit", "see the answers that end this way, and the server's log")


_RIGHT_RESULT = "compare B with a correct result"
SENTENCES: Templates = {
    "ends-not-recorded": Found("why they ended is not recorded", "results that record finish reasons"),
    "lengths-no-measure": Cases(
        "why",
        {
            "failed": Found("A's own verdict is a failure, so its answers do not count", _RIGHT_RESULT),
            "gain": Found("B scores better than A, so A's wrong answers do not count", _RIGHT_RESULT),
        },
    ),
}
