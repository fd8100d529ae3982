"""The section "Latency" of the page: the variables of its template."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from assay.harness.judge.latency_result import LatencyResult, LatencyRow, LoadRow, ratio_text, worst_ratio
from assay.reports import charts
from assay.reports.latency_terminal import graphs_text, load_text, time_text
from assay.reports.summary import NOTHING, latency_lines


@dataclass(frozen=True)
class RatioView:
    """A ratio, with both times formatted."""

    row: LatencyRow
    reference: str
    candidate: str


@dataclass(frozen=True)
class LoadView:
    """One load: its ratios, their chart, and throughputs in words."""

    load: LoadRow
    more: str
    ratios: tuple[RatioView, ...]
    chart: Markup


@dataclass(frozen=True)
class LatencyView:
    """A latency result, with everything that its template needs computed.

    Attributes:
        lines: a summary in sentences.
        worst: the deciding ratio, with its interval.
        graphs: whether decode ran in CUDA graphs.
    """

    result: LatencyResult
    lines: tuple[str, ...]
    worst: str
    graphs: str
    loads: tuple[LoadView, ...]


def latency_view(latency: LatencyResult) -> LatencyView:
    """The view of a latency result. All charts share one axis, so that loads can be compared by eye."""
    ends = charts.ratio_ends(latency.rows)
    loads = []
    for load in latency.loads:
        rows = [row for row in latency.rows if (row.shape, row.concurrency) == (load.shape, load.concurrency)]
        ratios = tuple(RatioView(row, time_text(row, row.reference_s), time_text(row, row.candidate_s)) for row in rows)
        loads.append(
            LoadView(
                load,
                f"Reference vs candidate: {load_text(load)}.",
                ratios,
                Markup(charts.ratio_chart(rows, ends)),
            )
        )
    worst = worst_ratio(latency)
    return LatencyView(
        result=latency,
        lines=tuple(latency_lines(latency)),
        worst=NOTHING if worst is None else ratio_text(worst.ratio, worst.low, worst.high),
        graphs=graphs_text(latency),
        loads=tuple(loads),
    )
