"""What every renderer says the same way: the words and signs of a verdict, and a suite in one line."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from assay.harness.judge.latency_result import LatencyResult, LatencyRow
from assay.harness.judge.report import (
    NOT_FINITE,
    Check,
    CheckStatus,
    LayersResult,
    LogitsRow,
    Metric,
    OwnError,
    Report,
    SuiteResult,
    Tally,
    Verdict,
    excess,
    out_of_bounds,
)
from assay.harness.text import one_line

NOTHING = "–"


class Mark(NamedTuple):
    """A verdict as people see it."""

    sign: str
    word: str
    meaning: str


VERDICTS: dict[Verdict, Mark] = {
    "pass": Mark("✓", "Pass", "What was asked is shown to hold, within the stated margins."),
    "regression": Mark("✕", "Regression", "The candidate is worse than the reference."),
    "inconclusive": Mark("?", "Inconclusive", "Not shown either way. This is not a pass."),
    "error": Mark("!", "Error", "The run did not get as far as a verdict. This says nothing about accuracy."),
}
CHECK_SIGNS: dict[CheckStatus, str] = {"ok": "✓", "failed": "✕", "missing": "?", "not checked": "–"}
_BAD: dict[Verdict, int] = {"pass": 0, "inconclusive": 1, "error": 2, "regression": 3}
_UNMET_ORDER: tuple[CheckStatus, ...] = ("failed", "missing", "not checked")


@dataclass(frozen=True)
class SuiteLine:
    """A suite as one row of a table: every field is one line and ready to print."""

    suite: str
    verdict: Verdict
    reference: str
    candidate: str
    differences: str
    measured: str
    bound: str
    policy: str


def suite_line(suite: SuiteResult) -> SuiteLine:
    """The row of `suite`. Its first metric with a bound is the deciding one, by convention of the gate."""
    metric = deciding_metric(suite)
    return SuiteLine(
        suite=one_line(_title(suite)),
        verdict=suite.verdict,
        reference=_role_accuracy(suite, "reference"),
        candidate=_role_accuracy(suite, "candidate"),
        differences=_differences(suite),
        measured=_measured(metric) if metric else NOTHING,
        bound=bound(metric) if metric else NOTHING,
        policy=one_line(metric.policy, 120) if metric else "",
    )


def deciding_metric(suite: SuiteResult) -> Metric | None:
    """The suite's first metric that was held against a bound, None if there is none."""
    return next((metric for metric in suite.metrics if metric.bound is not None), None)


def accuracy(tally: Tally) -> str:
    """Share of right answers to three places, or a dash where there were no answers."""
    return share(tally.right, tally.total)


def share(part: int, whole: int) -> str:
    """`part` of `whole` to three places, or a dash where there is no whole: a share of nothing is not zero."""
    return f"{part / whole:.3f}" if whole else NOTHING


def number(value: float | None) -> str:
    """Three significant digits, thousands whole, or a dash."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if 1_000 <= abs(value) < 1e9 else f"{value:.3g}"


def interval(metric: Metric) -> str:
    """Such as "-0.894 to -0.807", or a dash where the metric has no interval."""
    if metric.low is None and metric.high is None:
        return NOTHING
    return f"{number(metric.low)} to {number(metric.high)}"


def bound(metric: Metric) -> str:
    """Such as "≥ -0.05", or a dash where the metric has no bound."""
    sign = {"least": "≥ ", "most": "≤ ", None: ""}[metric.bound_is]
    return sign + number(metric.bound)


def bound_and_policy(metric: Metric) -> str:
    """Such as "≥ -0.05, by margin = 0.05 (default)"."""
    return bound(metric) + (f", by {one_line(metric.policy, 120)}" if metric.policy else "")


@dataclass(frozen=True)
class WorstCell:
    """One cell of a layer x head heat map."""

    layer: str
    head: str
    where: str
    error: OwnError
    bound: float | None

    @property
    def out_of_bounds(self) -> bool:
        """Whether noise does not explain it."""
        return out_of_bounds(self.error, self.bound)


def worst_cells(layers: LayersResult, most: int) -> list[WorstCell]:
    """The `most` cells by layer and head that are furthest beyond their bounds, or closest to them."""
    return heapq.nlargest(most, _cells(layers), key=lambda cell: excess(cell.error, cell.bound))


def _cells(layers: LayersResult) -> Iterator[WorstCell]:
    for grid in layers.grids:
        if grid.columns == "head":
            for layer, bound, row in zip(grid.row_labels, grid.bounds, grid.values, strict=True):
                for head, error in zip(grid.column_labels, row, strict=True):
                    if error is not None:
                        yield WorstCell(layer, head, grid.where, error, bound)


class LayerRow(NamedTuple):
    """A layer's own error under each condition of phase and cached prefix that was observed.

    Attributes:
        cells: condition, error, and whether it is out of bounds.
        excess: of the worst of them, see `assay.harness.judge.report.excess`.
    """

    layer: str
    cells: tuple[tuple[str, OwnError, bool], ...]
    excess: float


def layer_rows(layers: LayersResult) -> list[LayerRow]:
    """Own errors by layer and cached prefix, in the order of layers."""
    cells: dict[str, list[tuple[str, OwnError, bool]]] = {}
    worst: dict[str, float] = {}
    for grid in layers.grids:
        if grid.columns == "prefix":
            for layer, bound, row in zip(grid.row_labels, grid.bounds, grid.values, strict=True):
                here = cells.setdefault(layer, [])
                for prefix, error in zip(grid.column_labels, row, strict=True):
                    if error is not None:
                        here.append((f"{grid.where}, prefix {prefix}", error, out_of_bounds(error, bound)))
                        worst[layer] = max(worst.get(layer, -1.0), excess(error, bound))
    return [LayerRow(layer, tuple(found), worst.get(layer, -1.0)) for layer, found in cells.items()]


def own_error(error: OwnError) -> str:
    """Three significant digits, "not finite" or "not observed"."""
    if error is None:
        return "not observed"
    return NOT_FINITE if error == NOT_FINITE else number(float(error))


def multiple(error: OwnError, bound: float | None) -> str:
    """Such as "26 times its bound 0.047"."""
    if bound is None:
        return "held against no bound"
    if error is None or error == NOT_FINITE:
        return f"bound {number(bound)}"
    return f"{error / bound:.2g} times its bound {number(bound)}"


def layer_diff_lines(layers: LayersResult) -> list[str]:
    """What is inside in a few sentences: the worst cell, the logits, what was not observed, what failed."""
    lines = []
    for cell in worst_cells(layers, 1):
        lines.append(
            f"Worst own error: layer {cell.layer}, head {cell.head}, {cell.where}: relative L1 {own_error(cell.error)}, "
            f"{multiple(cell.error, cell.bound)}. {_sources(layers)}"
        )
    if not lines:
        lines.append("Nothing was observed inside.")
    if layers.logits:
        lines.append(logits_line(max(layers.logits, key=lambda row: row.mean_kl or 0.0)))
    if layers.not_observed:
        lines.append(f"Not observed: {'; '.join(layers.not_observed)}.")
    if layers.candidate_errors:
        more = f", and {len(layers.candidate_errors) - 1} more" if len(layers.candidate_errors) > 1 else ""
        lines.append(f"Not computed by {layers.candidate}: {layers.candidate_errors[0]}{more}.")
    return lines


def logits_line(row: LogitsRow) -> str:
    """Such as "Logits, cached prefix: mean KL 0.0123 ± 0.0004 nats (floor 1e-07), max 3.2, same first token 98.2 %."."""
    error = "" if row.stderr is None else f" ± {number(row.stderr)}"
    floor = "not measured" if row.floor_mean_kl is None else number(row.floor_mean_kl)
    same = NOTHING if row.same_top is None else f"{100 * row.same_top:.4g} %"
    text = f"Logits, {row.condition}: mean KL {number(row.mean_kl)}{error} nats (floor {floor}), max {number(row.max)}"
    bad = f"; {row.nonfinite:,} positions not finite" if row.nonfinite else ""
    return f"{text}, same first token {same}{bad}."


def worst_ratio(latency: LatencyResult) -> LatencyRow | None:
    """The ratio that decided: of those with the worst verdict the one that reaches furthest up."""
    return max(
        latency.rows,
        key=lambda row: (_BAD[row.verdict], math.inf if row.high is None else row.high, row.ratio or 0.0),
        default=None,
    )


def latency_ratio(value: float | None, low: float | None, high: float | None) -> str:
    """Such as "1.034 (0.998 to 1.071)"; too few ratios leave the interval open, and then it says nothing."""
    if value is None:
        return "not measured"
    return f"{value:.3f} (too few ratios)" if low is None or high is None else f"{value:.3f} ({low:.3f} to {high:.3f})"


def latency_lines(latency: LatencyResult) -> list[str]:
    """Latency in a few sentences: the worst ratio with its floor, how many are within the bound, the lengths of answers."""
    lines = [latency.note] if latency.note else []
    if (worst := worst_ratio(latency)) is not None:
        lines.append(
            f"Worst ratio, candidate over reference: {worst.title}, {worst.shape}, {worst.concurrency} in flight: "
            f"{latency_ratio(worst.ratio, worst.low, worst.high)}, bound {latency.bound:g} by {latency.policy}; "
            f"the reference over itself {latency_ratio(worst.floor, worst.floor_low, worst.floor_high)}."
        )
    counted = [
        f"{sum(row.verdict == verdict for row in latency.rows)} {words}"
        for verdict, words in (("pass", "below the bound"), ("regression", "above it"), ("inconclusive", "undecided"))
    ]
    lines.append(f"Of {len(latency.rows)} ratios: {', '.join(counted)}.")
    if (lengths := latency.lengths) is not None:
        differ = "they differ" if lengths.differ else "no difference shown"
        if min(lengths.reference_cut, lengths.candidate_cut) == lengths.prompts:
            differ = "all ran to the limit, so their lengths say nothing"
        lines.append(
            f"Answers that may end when they like: {lengths.candidate:.1f} tokens on average against "
            f"{lengths.reference:.1f}; {differ}."
        )
    return lines


def _sources(layers: LayersResult) -> str:
    if layers.sources:
        return f"Out of bounds: {layers.sources}."
    judged = sum(row.bound is not None for row in layers.depth)
    if not judged:
        return "No layer was held against a bound."
    return f"No layer of {judged} is out of bounds."


def unmet(report: Report) -> list[Check]:
    """Checks that are not ok: those that forbid a pass first."""
    return [check for status in _UNMET_ORDER for check in report.checks if check.status == status]


def _title(suite: SuiteResult) -> str:
    said = not suite.synthetic or "synthetic" in suite.title.lower()
    return suite.title if said else f"{suite.title} (synthetic)"


def _measured(metric: Metric) -> str:
    text = one_line(metric.text, 60)
    return text if metric.low is None and metric.high is None else f"{text} ({interval(metric)})"


def _role_accuracy(suite: SuiteResult, role: str) -> str:
    return next((accuracy(tally) for tally in suite.tallies if tally.role == role), NOTHING)


def _differences(suite: SuiteResult) -> str:
    if suite.divergences:
        kinds = [divergence.kind for divergence in suite.divergences]
        counted = [f"{kinds.count(kind)} {kind}" for kind in ("apart", "close", "tie") if kind in kinds]
        return ", ".join(counted)
    if suite.flips or suite.tallies:
        lost = sum(flip.direction == "lost" for flip in suite.flips)
        return f"{lost} lost, {len(suite.flips) - lost} gained"
    return NOTHING
