"""``report.html``: the page of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from assay.harness.judge.latency_result import ratio_text, worst_ratio
from assay.harness.judge.report import ConditionRow, DivergenceRow, Flip, Metric, Report, SuiteResult
from assay.harness.text import clip, listed, visible
from assay.reports import charts, summary
from assay.reports.latency import latency_blocks
from assay.reports.layer_diff_view import layer_diff_view
from assay.reports.page import TEXT_SHOWN, to_page

FLIPS_SHOWN = 256
"""Most flips embedded for a suite; with texts cut at `TEXT_SHOWN` the page stays below a few megabytes."""
DIVERGENCES_SHOWN = 60


@dataclass(frozen=True)
class DivergenceView:
    """A divergence with its texts split where they differ."""

    divergence: DivergenceRow
    common: str
    reference_rest: str
    candidate_rest: str


@dataclass(frozen=True)
class ConditionView:
    """The rows of one condition, with their chart."""

    title: str
    rows: tuple[ConditionRow, ...]
    chart: Markup


@dataclass(frozen=True)
class SuiteView:
    """A suite, with everything that its template needs computed.

    Attributes:
        metric: what decided, or comes nearest to it; None if nothing was measured.
        conditions: those that questions differ in.
        alike: those that they share, in words.
    """

    anchor: str
    suite: SuiteResult
    line: summary.SuiteLine
    metric: Metric | None
    metrics: tuple[tuple[Metric, Markup], ...]
    tally_chart: Markup
    conditions: tuple[ConditionView, ...]
    alike: tuple[str, ...]
    flips: tuple[Flip, ...]
    groups: tuple[str, ...]
    divergences: tuple[DivergenceView, ...]
    masses: tuple[str, ...]


def to_html(report: Report) -> str:
    """The report as one self-contained HTML page."""
    cause = summary.main_finding(report)
    return to_page(
        "report.html.jinja",
        report.verdict,
        ("page.js", "layer_diff.js"),
        report=report,
        mark=summary.VERDICTS[report.verdict],
        layer_diff=layer_diff_view(report.layers) if report.layers else None,
        latency=latency_blocks(report.latency) if report.latency else None,
        worst=_worst(report),
        numbers={},
        suites=[_suite_view(suite, i) for i, suite in enumerate(report.suites, start=1)],
        cause=cause,
        further=[finding for finding in report.findings if finding is not cause],
        steps=summary.next_steps(report),
        after="To go on" if report.failure else "What to do",
        shown=_shown(report),
        unmet=summary.unmet(report),
        met=[check for check in report.checks if check.status == "ok"],
        roles=(("reference", report.reference), ("candidate", report.candidate)),
    )


def _worst(report: Report) -> str:
    worst = worst_ratio(report.latency) if report.latency else None
    return summary.NOTHING if worst is None else ratio_text(worst.ratio, worst.low, worst.high)


def _shown(report: Report) -> tuple[str, str, str] | None:
    """What shows a failure: how the server ended, a title for the log, and the log; None where nothing does."""
    if report.failure is None or not report.failure.details:
        return None
    first, _, rest = report.failure.details.partition("\n")
    if first.startswith("Its log"):
        return "", first.rstrip(":"), rest
    title, _, log = rest.partition("\n")
    return first, title.rstrip(":"), log


def choose_flips(flips: Sequence[Flip], most: int) -> tuple[Flip, ...]:
    """At most `most` flips in their given order, taken in turn from each direction and group so that all are represented."""
    if len(flips) <= most:
        return tuple(flips)
    kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, flip in enumerate(flips):
        kinds[flip.direction, flip.group].append(index)
    turns = sorted((turn, index) for indices in kinds.values() for turn, index in enumerate(indices))
    return tuple(flips[index] for index in sorted(index for _, index in turns[:most]))


def split_divergence(divergence: DivergenceRow) -> DivergenceView:
    """Split both texts at the first word that differs.

    A `DivergenceRow` has the index of the first differing token but not the tokens' texts, so the split is found by
    characters, and moved back to the start of its word.
    """
    reference, candidate = visible(divergence.reference_text), visible(divergence.candidate_text)
    shorter = min(len(reference), len(candidate))
    at = next((i for i in range(shorter) if reference[i] != candidate[i]), shorter)
    while at > 0 and not reference[at - 1].isspace():
        at -= 1
    return DivergenceView(
        divergence, clip(reference[:at], TEXT_SHOWN), clip(reference[at:], TEXT_SHOWN), clip(candidate[at:], TEXT_SHOWN)
    )


def _suite_view(suite: SuiteResult, index: int) -> SuiteView:
    flips = choose_flips(suite.flips, FLIPS_SHOWN)
    conditions, alike = [], []
    for _, group in groupby(suite.conditions, key=lambda row: row.by):
        rows = tuple(group)
        seen = [row for row in rows if row.items]
        if len(seen) < 2:
            unseen = [row.bucket for row in rows if not row.items]
            alike += [f"{row.title} {row.bucket}{f', none {listed(unseen)}' if unseen else ''}" for row in seen]
            continue
        conditions.append(ConditionView(rows[0].title, rows, Markup(charts.condition_chart(rows))))
    return SuiteView(
        anchor=f"suite-{index}",
        suite=suite,
        line=summary.suite_line(suite),
        metric=summary.shown_metric(suite),
        metrics=tuple((metric, Markup(charts.interval_chart(metric))) for metric in suite.metrics),
        tally_chart=Markup(charts.tally_chart(suite.tallies)),
        conditions=tuple(conditions),
        alike=tuple(alike),
        flips=flips,
        groups=tuple(dict.fromkeys(flip.group for flip in flips)),
        divergences=tuple(split_divergence(d) for d in suite.divergences[:DIVERGENCES_SHOWN]),
        masses=summary.compared_tokens(suite.logits),
    )
