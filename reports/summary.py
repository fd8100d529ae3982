"""Wording that all renderers share: a verdict as text, and a suite in one line."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from assay.harness.judge.latency_result import LatencyResult, worst_ratio
from assay.harness.judge.report import (
    NOT_FINITE,
    LayersResult,
    LogitsRow,
    Metric,
    OwnError,
    Report,
    SuiteResult,
    excess,
)
from assay.harness.text import counted, one_line, percent, some, times
from assay.harness.verdict import Check, CheckStatus, Finding, Verdict
from assay.reports.wording import verdict
from assay.reports.wording.latency import TIMES, ratio_text
from assay.reports.wording.say import measured_of, say

NOTHING = "–"


MEANINGS: dict[Verdict, str] = {
    "pass": "", "regression": "", "inconclusive": "This is not a pass.", "error": "This says nothing about accuracy.",
}  # fmt: skip
"""What a headline leaves unsaid about such a verdict."""
_UNMET_ORDER: tuple[CheckStatus, ...] = ("failed", "missing", "not checked")


def suite_title(suite: SuiteResult) -> str:
    """The title of a suite, which says whether its questions are synthetic."""
    title = verdict.suite_title(suite)
    return one_line(f"{title} (synthetic)" if suite.synthetic else title)


def deciding(suite: SuiteResult) -> tuple[str, str, str]:
    """Return the suite's deciding metric with its interval, its bound, and the line of policy that sets it, or why it has none."""
    metric = shown_metric(suite)
    if metric is None:
        return one_line(say(*suite.why), 80), NOTHING, ""
    text = one_line(measured_of(metric).text, 60)
    ends = "" if metric.low is None and metric.high is None else f" ({interval(metric)})"
    return text + ends, bound(metric), one_line(metric.policy, 120)


def shown_metric(suite: SuiteResult) -> Metric | None:
    """Return the deciding metric; if a finding decided, the first with a bound, or else the first; or None without metrics."""
    bounded = (metric for metric in suite.metrics if metric.bound is not None)
    return suite.deciding_metric or next(bounded, None) or next(iter(suite.metrics), None)


def when(created: str) -> str:
    """Format a time to the minute, as in "2026-11-22 20:43 UTC"; other text than ISO 8601 only becomes one line."""
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        return one_line(created, 40)
    return f"{moment:%Y-%m-%d %H:%M}{' UTC' if moment.utcoffset() == timedelta() else ''}"


def share(part: int, whole: int) -> str:
    """Format `part` / `whole` with three decimals, or a dash if `whole` is zero: a share of nothing is not zero."""
    return f"{part / whole:.3f}" if whole else NOTHING


def number(value: float | None) -> str:
    """Format three significant digits, integers from a thousand up, or a dash for None."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if 1_000 <= abs(value) < 1e9 else f"{value:.3g}"


def interval(metric: Metric) -> str:
    """Format an interval, such as "-0.894 to -0.807", or a dash if the metric has none."""
    if metric.low is None and metric.high is None:
        return NOTHING
    return f"{number(metric.low)} to {number(metric.high)}"


def bound(metric: Metric) -> str:
    """Format a bound, such as "≤ 0.05", or a dash if the metric has none."""
    return NOTHING if metric.bound is None else f"≤ {number(metric.bound)}"


def bound_and_policy(metric: Metric) -> str:
    """Format a bound with its policy, such as "≤ 0.05, set by margin = 0.05 (default)"."""
    return bound(metric) + (f", set by {one_line(metric.policy, 120)}" if metric.policy else "")


# One cell of a layer x head heat map: layer, head, which calls, error and bound.
_WorstCell = tuple[str, str, str, OwnError, float | None]


def worst_cells(layers: LayersResult, most: int) -> list[_WorstCell]:
    """Return the `most` cells by layer and head that are furthest beyond their bounds, or closest to them."""
    return heapq.nlargest(most, _cells(layers), key=lambda cell: excess(*cell[3:]))


def _cells(layers: LayersResult) -> Iterator[_WorstCell]:
    for grid in layers.grids:
        if grid.columns == "head":
            yield from ((layer, head, grid.where, error, bound) for layer, head, error, bound in grid.observed())


def error_percent(error: OwnError) -> str:
    """Format a relative L1 in percent, as findings state it; "not finite" or "not observed"."""
    if error is None:
        return "not observed"
    return NOT_FINITE if error == NOT_FINITE else percent(float(error))


def _multiple(error: OwnError, bound: float | None) -> str:
    """Format a multiple of a bound, such as "26x its bound 4.7 %"."""
    if bound is None:
        return "no bound applies"
    if error is None or error == NOT_FINITE:
        return f"bound {percent(bound)}"
    return f"{times(error / bound)} its bound {percent(bound)}"


def next_steps(report: Report) -> list[tuple[str, str]]:
    """List the next steps after a run with their commands, most important first: reproduce the cause, repeat the run."""
    again = [("Repeat this run", report.reproduce)] if report.reproduce else []
    if report.verdict != "regression" or report.failure is not None:  # a failure's remedy is below its headline
        return again
    cause = main_finding(report)
    reproduce = [("Reproduce the cause, without a server", cause.reproduce)] if cause and cause.does else []
    return [*reproduce, *([("Repair the kernel, and repeat this run", report.reproduce)] if again else [])]


def main_finding(report: Report) -> Finding | None:
    """Return the finding that a report shows first: the first serious one, or else the first, or None without findings."""
    serious = (finding for finding in report.findings if finding.severity == "serious")
    return next(serious, None) or next(iter(report.findings), None)


def layer_diff_lines(layers: LayersResult) -> list[str]:
    """Summarise the layer diff in a few sentences: the worst cell, the logits, calls not observed, and failures."""
    lines = [_truth_line(layers)] if layers.against_truth else []
    what = f"Worst difference from {layers.reference}" if layers.against_truth else "Worst error"
    for layer, head, where, error, bound in worst_cells(layers, 1):
        lines.append(
            f"{what}: layer {layer}, head {head}, {where}: {error_percent(error)}, {_multiple(error, bound)}. {_sources(layers)}"
        )
    if not lines:
        lines.append("No attention call was observed.")
    if layers.not_observed:
        lines.append(f"Not observed: {'; '.join(map(say, layers.not_observed))}.")
    if layers.candidate_errors:
        more = f", and {len(layers.candidate_errors) - 1} more" if len(layers.candidate_errors) > 1 else ""
        lines.append(f"Not computed by {layers.candidate}: {say(layers.candidate_errors[0])}{more}.")
    return lines


def _truth_line(layers: LayersResult) -> str:
    """Describe the layer and phase nearest to their bounds, or farthest beyond them, and the largest gain."""
    worst = max(layers.against_truth, key=lambda row: excess(row.own, row.bound))
    gain = max(layers.against_truth, key=lambda row: excess(row.gain, row.gain_bound))
    cells = sum(row.cells for row in layers.against_truth)
    return (
        f"Against the truth, in {counted(cells, 'cell')}: worst error in layer {worst.layer}, {worst.phase}: "
        f"{error_percent(worst.own)}, {_multiple(worst.own, worst.bound)}; largest gain over all heads in layer {gain.layer}, "
        f"{gain.phase}: {error_percent(gain.gain)}, {_multiple(gain.gain, gain.gain_bound)}."
    )


def compared_tokens(rows: Sequence[LogitsRow]) -> tuple[str, ...]:
    """Say which part of each distribution is compared: one sentence, or one per condition if they differ."""
    said = {row.condition: _mass(row) for row in rows}
    if len(set(said.values())) == 1:
        return (said.popitem()[1],)
    return tuple(f"{condition}: {text}" for condition, text in said.items())


def _mass(row: LogitsRow) -> str:
    share = "" if row.mass is None else f", which hold {100 * row.mass:.4g} % of its probability"
    return f"The reference's {row.top_k:,} most probable tokens are compared one by one{share}; all others count as one token."


def latency_lines(latency: LatencyResult) -> list[str]:
    """Summarise latency in a few sentences: the worst ratio and its floor, and how many ratios are within the bound."""
    lines = [say(latency.note)] if latency.note else []
    if (worst := worst_ratio(latency)) is not None:
        lines.append(
            f"Worst ratio, candidate / reference: {TIMES[worst.metric]}, {worst.where}: "
            f"{ratio_text(worst.ratio, worst.low, worst.high)}, bound {latency.bound:g}, set by {latency.policy}; "
            f"reference / reference {ratio_text(worst.floor, worst.floor_low, worst.floor_high)}."
        )
    counted = [
        f"{sum(row.verdict == verdict for row in latency.rows)} {words}"
        for verdict, words in (("pass", "below the bound"), ("regression", "above it"), ("inconclusive", "undecided"))
    ]
    lines.append(f"Of {len(latency.rows)} ratios: {', '.join(counted)}.")
    return lines


def _sources(layers: LayersResult) -> str:
    if layers.sources:
        return f"Out of bounds: {some('layer', layers.sources, [row.layer for row in layers.depth])}."
    judged = sum(row.bound is not None for row in layers.depth)
    if not judged:
        return "No bound applies to any layer."
    return f"None of {counted(judged, 'layer')} is out of bounds."


def unmet(report: Report) -> list[Check]:
    """Checks that are not ok; those that forbid a pass come first."""
    return [check for status in _UNMET_ORDER for check in report.checks if check.status == status]


def accuracy_of(suite: SuiteResult, role: str) -> str:
    """Format a role's share of right answers, or a dash without answers."""
    return next((share(tally.right, tally.total) for tally in suite.tallies if tally.role == role), NOTHING)


def differences(suite: SuiteResult) -> str:
    """Count the differing texts or answers, by kind, or return a dash if neither was compared."""
    if suite.divergences:
        kinds = [divergence.kind for divergence in suite.divergences]
        counted = [f"{kinds.count(kind)} {kind}" for kind in ("apart", "close", "tie") if kind in kinds]
        return ", ".join(counted)
    if suite.flips or suite.tallies:
        lost = sum(flip.direction == "lost" for flip in suite.flips)
        return f"{lost} lost, {len(suite.flips) - lost} gained"
    return NOTHING
