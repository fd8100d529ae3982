"""Sentences about a bench: its ratios, why each has its verdict, and what was checked of the timed servers."""

from __future__ import annotations

from typing import Any

from assay.harness.judge.judgement import Metric
from assay.harness.judge.latency_result import TimeMetric
from assay.harness.statement import Statement
from assay.harness.verdict import Check
from assay.reports.wording.say import Found, Measured, Templates, say, says
from assay.reports.wording.verdict import title_of_suite, unmet_sentence

TIMES: dict[TimeMetric, str] = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "e2e": "end-to-end latency",
    "throughput": "seconds per token",
}
"""The metrics as text."""


def ratio_text(ratio: float | None, low: float | None, high: float | None) -> str:
    """Format a ratio, such as "1.034 (0.998 to 1.071)"; with too few ratios the interval is open."""
    if ratio is None:
        return "not measured"
    return f"{ratio:.3f} (too few ratios)" if low is None or high is None else f"{ratio:.3f} ({low:.3f} to {high:.3f})"


@says
def _time_ratio(
    reason: str, ratio: float, low: float, high: float, level: float, ratios: int, floor: float, floor_low: float,
    floor_high: float, floor_ratios: int, least: int, bound: float, p: float, mean: float | None = None,
) -> str:  # fmt: skip
    if reason == "too few":
        few = f"{ratios}, and {floor_ratios} of the reference against itself"
        return f"Too few ratios: {few}; {least} of each are needed."
    against = f"{bound:g}, but the reference against itself measures {ratio_text(floor, floor_low, floor_high)}: too noisy to call"
    more = f"; to resolve: more rounds ({ratios} ratios were measured)"
    slow = f", but {mean or 0:.3f} on average, above it (permutation of blocks, p = {p:.2g}): a few requests are slow"
    placed = {
        "below": f"below the bound of {bound:g}{'' if mean is None else f'; {mean:.3f} on average'}",
        "mean above": f"below the bound of {bound:g}{slow}",
        "mean not clear": f"below the bound of {bound:g}{slow}, or chance{more}",
        "above": f"above the bound of {bound:g}",
        "too noisy": f"above the bound of {against}. To resolve: a quieter machine or more rounds",
        "not significant": f"above the bound of {bound:g}, but not significant among all ratios (p = {p:.2g}){more}",
        "not clear": f"not clear of the bound of {bound:g}{more}",
    }[reason]
    return f"{ratio:.3f} ({low:.3f} to {high:.3f} with {100 * level:.0f} % confidence): {placed}."


@says
def _of_time(time: TimeMetric, load: str, why: Statement) -> str:
    return f"{TIMES[time].capitalize()}{f', {load}' if load else ''}: {say(why)}"


@says
def _no_gain(faster: bool, wrong: list[tuple[str, str]]) -> str:
    suites = ", ".join(title_of_suite(*suite) for suite in wrong)
    return f"{'No speed-up: wrong' if faster else 'Wrong'} answers ({suites}){'' if faster else ': the times prove nothing'}."


@says
def _overruled(**check: Any) -> str:
    return unmet_sentence(Check(**check))


@says
def _slower(time: TimeMetric, why: Statement) -> str:
    return f"{TIMES[time]}: slower, {say(why)}"


@says
def _median_times(candidate: float, reference: float) -> str:
    return f"{1e3 * candidate:.3g} ms against {1e3 * reference:.3g} ms in the median"


@says
def _reference_against_itself(ratio: float | None, low: float | None, high: float | None) -> str:
    return f"the reference against itself: {ratio_text(ratio, low, high)}"


@says
def _worst_time_ratio(metric: Metric, time: TimeMetric, load: str, ratios: int, note: Statement | None) -> Measured:
    noted = f"{say(note)} " if note else ""
    about = f"{noted}Candidate over reference: {TIMES[time]}, {load}; the worst of {ratios} ratios"
    return Measured("worst ratio of times", _times(metric), about)


@says
def _reference_over_itself(metric: Metric) -> Measured:
    about = f"The floor of that ratio: {ratio_text(metric.value, metric.low, metric.high)}"
    return Measured("reference over itself", _times(metric), about)


def _times(metric: Metric) -> str:
    return "not measured" if metric.value is None else f"{metric.value:.3f} times"


@says
def _interpreted(kernels: list[str]) -> Found:
    said = f"{', '.join(kernels)}: interpreted, so the time measured is the interpreter's"
    return Found(said, "time it on a GPU, where Triton compiles it")


@says
def _chunks(prompt: int, sizes: list[tuple[str, str]]) -> Found:
    chunks = ", ".join(f"{size} ({role})" for role, size in sizes)
    settles = "leave the length of chunks to assay: no --engine-arg or --candidate-arg for it"
    return Found(f"{prompt} tokens; chunks of {chunks}", settles)


@says
def _prompt_tokens_cached(**shares: float | None) -> Found:
    reported = ", ".join(
        f"{role} {'not reported' if share is None else f'{100 * share:.0f} %'}" for role, share in shares.items()
    )
    settles = "keep the prefix cache on, and use servers that report cached tokens"
    return Found(f"{reported} of the prompt tokens were cached", settles)


SENTENCES: Templates = {
    "no-ratio": "No ratio was measured.",
    "timed": Found("{rounds} rounds of {loads} loads in {seconds:.0f} s"),
    "not-timed": Found("{said}", "repeat the command, which times both again"),
}
