"""Sentences about the layer diff and the op-level matrix: a kernel's errors against what rounding explains."""

from __future__ import annotations

import math
from typing import Any

from assay.harness.evidence.run_file import REPEAT_RUN, RESUME
from assay.harness.judge.judgement import Metric
from assay.harness.judge.report import NOT_FINITE, ErrorGrid
from assay.harness.text import counted, one_line, percent, ranges, some, times
from assay.reports.wording.say import Cases, Found, Measured, Templates, says


def grid_title(grid: ErrorGrid) -> str:
    """Name the axes of a heat map, such as "layer × cached prefix"."""
    names = {"prefix": "cached prefix", "batch": "place in the batch"}
    return f"layer × {names.get(grid.columns, grid.columns)}"


def _layers(layers: list[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)}"


def _times_noise(worst: float) -> str:
    """Describe a multiple of a bound: "37 × what rounding explains", or "not finite"."""
    return f"{times(worst)} what rounding explains" if math.isfinite(worst) else NOT_FINITE


_BEYOND = {
    "worst-own-error": "the error is {}, {} what rounding explains ({})",
    "worst-query": "the error of a query is {}, {} what rounding explains ({})",
    "worst-gain": "the output is scaled by {}, {} what rounding explains ({})",
    "worst-difference": "the outputs differ by {} over all queries, {} what rounding explains ({})",
}


@says
def _beyond_noise(test: str, query: list[int] | None, observed: float, bound: float, excess: float) -> str:
    multiple = times(excess) if math.isfinite(excess) else "beyond"
    said = f"at worst {_BEYOND[test].format(percent(observed), multiple, percent(bound))}"
    if query is None:
        return said
    position, prefix, layer, head = query
    of = "all heads together" if head < 0 else f"head {head}"
    return f"{said}, at position {position} after {prefix} cached tokens, layer {layer}, {of}"


@says
def _own_error_above_policy(value: float | None, line: str) -> str:
    return f"The largest error is {_error(value)}, above {line}."


@says
def _own_errors_within(
    worst: float, query: float, gain: float, cells: int, sampled: int, queries: int, passes: int
) -> str:
    of = f"{sampled:,} of {queries:,}" if sampled < queries else f"all {queries:,}"
    return (
        f"The worst error is {_times_noise(worst)}, that of a single query {times(query)}, and the worst gain "
        f"{times(gain)}, in {counted(cells, 'cell')} ({of} queries, {passes:,} passes)."
    )


# Quantities that a suite measures as multiples of their bounds: title and explanation.
_WORST = {
    "own-error": ("worst error, cells of the layer diff", "Relative L1 against fp64 on the same inputs, by cell"),
    "query": (
        "worst error, single queries",
        "Relative L1 against fp64, by query and head, of sampled queries and of those farthest from what was served",
    ),
    "gain": (
        "worst gain, heads of the layer diff",
        "Slope of the output on the truth, minus 1, by head, layer and phase",
    ),
    "difference": (
        "worst difference in the shadow",
        "Relative L1 against the outputs that were served, by cell, over all queries",
    ),
    "recorded-call": (
        "worst error, recorded calls",
        "Relative L1 against fp64 on the same inputs, by cell and head, over {calls}",
    ),
    "of-matrix": ("worst error, op-level calls", "Relative L1 against fp64, over {calls} of {shapes}"),
}


@says
def _worst(metric: Metric, finite: bool, **over: Any) -> Measured:
    title, explain = _WORST[metric.part]
    text = "not measured" if metric.value is None else f"{times(metric.value)} its bound"
    if "calls" in over:
        over["calls"] = counted(over["calls"], "recorded call" if metric.part == "recorded-call" else "call")
    return Measured(title, text if finite else NOT_FINITE, explain.format(**over))


@says
def _largest_own_error(metric: Metric) -> Measured:
    explain = "Relative L1 against fp64 of the worst cell of any layer, over all shadowed calls"
    return Measured("largest error", _error(metric.value), explain)


def _error(value: float | None) -> str:
    return NOT_FINITE if value is None else f"{value:.3g}"


_KNOWN = {
    "window": "the reference's window is off by one key there",
    "given": "one of the two reads new K and V before they are stored in fewer bits there, and the other one after that",
}


@says
def _difference_known(how: str, phase: str, layers: list[int]) -> str:
    return (
        f"difference in the shadow, {phase}, {_layers(layers)}: {_KNOWN[how]}, so the difference is not an error "
        "of the candidate, which is compared only with the truth"
    )


@says
def _layers_not_seen(phase: str, layers: list[int], of: list[int]) -> str:
    return f"{phase}: no call of {some('layer', layers, of)} was seen"


@says
def _calls_not_comparable(layers: list[int], layer: int, said: str) -> Found:
    calls = f"calls of {_layers(layers)} could not be compared; layer {layer}: {one_line(said)}"
    return Found(calls, "run so that the kernel contract can express every call")


@says
def _phases_compared(phases: list[tuple[str, int, list[int], list[int]]]) -> Found:
    return Found(
        "; ".join(_compared(*phase) for phase in phases) or "no phase is claimed",
        "run so that each of these is shadowed; the report lists why calls were not observed",
    )


def _compared(phase: str, layers: int | None, lacking: list[int], heads: list[int]) -> str:
    if lacking:
        return f"{phase}: not layer {ranges(lacking)}, head {ranges(heads)}"
    return f"{phase}: not observed" if layers is None else f"{phase}: {counted(layers, 'layer')}"


@says
def _op_calls_wrong(failing: int, calls: int, worst: float | None, title: str, said: str) -> str:
    at_worst = "" if worst is None else f", at worst {_times_noise(worst)}"
    named = one_line(f'"{title}"' if title else said, 300).rstrip(".")
    return f"{failing} of {counted(calls, 'call')} {_are(failing)} out of bounds{at_worst}: {named}."


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


@says
def _op_calls_not_tested(missing: list[str]) -> str:
    said = "; ".join(one_line(requirement, 300) for requirement in missing)
    return f"Not tested: {said or 'no call was computed'}."


SENTENCES: Templates = {
    "tests-flag": "{flagged:,} of {tests:,} tests flag it",
    "reference-off": "The reference is off by {times:times} its own bound.",
    "error-below-noise": "the error is {own:percent}, but {noise} costs at least {least:percent} on these "
    "calls: the kernel probably did not run, or does not quantise as declared",
    "inherited-not-traced": "error from earlier layers: {said}",
    "shadow-in-reference": "the candidate's own error beyond the {calls:counted recorded call} that its environment computed: the "
    "shadow ran in the reference's",
    "call-untested": "truth, layer {layer}: a call could not be compared with it: {said:line}",
    "phase-not-computed": "{phase}: {candidate} does not compute it",
    "phase-not-seen": "{phase}: calls were not seen; those inside a replayed CUDA graph cannot be observed",
    "condition-not-seen": "{phase}, {condition}: no such call was seen",
    "calls-not-recorded": "replay pack, layer {layer}: its calls could not be recorded: {said:line}",
    "calls-failed": "layer {layer}, {phase}, {calls:counted call}: {said:line}",
    "calls-not-computed": Found(
        "the candidate did not compute {calls:counted call}: {said}",
        "fix the candidate so that it computes every call",
    ),
    "no-question-answered": Found("none of the questions was answered", RESUME),
    "matrix-absent": Found("the result is missing", REPEAT_RUN),
    "matrix-of-another": Found("the result is that of {kernel}, not of {candidate}", REPEAT_RUN),
    "matrix-computed": Found("{calls:counted call} computed"),
    "found-at": "{where:line}: {claim}.",
    "reference-not-right": "the reference is wrong, so it proves nothing about the candidate: {where:line}: {claim}.",
    "recorded-calls-wrong": "{said:line 400}",
    "prefix-compared": Found(
        "{some:if some|no} compared calls had {prefix} cached tokens",
        "{cache:if ask questions that share a header|keep the prefix cache on}",
    ),
    "questions-cached": Found(
        "{met} of {questions:counted question} had at least {tokens} cached tokens; {share:percent} of them are needed",
        "{cache:if |keep the prefix cache on, and }ask questions that share a header",
    ),
    "matrix-not-run": Found(
        "{said:line 300}", "see what assay check {candidate} reports, and repeat the run with a new --out"
    ),
    "cached-tokens-not-reported": Found(
        "the server did not report how many tokens were cached",
        "use a server that reports cached tokens (SGLang: --enable-cache-report; vLLM: --enable-prompt-tokens-details)",
    ),
    "recorded-call-out-of-bounds": "The error of a recorded call is {worst:noise}.",
    "op-calls-unexplained": "{failing:counted call} {failing:are} out of bounds, at worst {worst:noise}; no finding explains it.",
    "op-calls-within": "The worst error is {worst:noise}, in {calls:counted call} of {shapes}"
    "{refused:if ; {refused} more were refused|}.",
    "evidence-lacking": Cases(
        "what",
        {
            "truth": "No output was compared with the truth.",
            "calls": "The candidate did not compute a call: {said:line 300}.",
            "cached prefix": "No compared call had {said} cached tokens.",
            "examination": "No recorded call was examined, so neither determinism nor overwritten inputs were tested.",
            "examination of these calls": "The examination of recorded calls does not belong to this run: {said:line 300}.",
            "examined calls": "Neither determinism nor overwritten inputs were tested: {said:line 300}.",
        },
    ),
    "layers-not-compared": Cases(
        "why",
        {
            "not requested": Found("the suite layers was not requested", "add layers to --suites"),
            "no server": Found("no server could be instrumented", "let assay start the reference, without a URL"),
            "no call": Found("no call was compared", RESUME),
        },
    ),
}
