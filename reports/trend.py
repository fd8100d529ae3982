"""The document of ``assay trend``: a number over commits or dates, with intervals, and where it moved."""

from __future__ import annotations

import math
from collections.abc import Sequence

from assay.harness.history.trend import Move, Point, Series, Trend, label
from assay.harness.text import counted, one_line
from assay.reports import charts
from assay.reports.document import Block, Cell, Document, Drawing, Fold, Items, Line, Only, Section, Table, Words, more
from assay.reports.summary import NOTHING
from assay.reports.svg import (
    AXIS_HEIGHT,
    FORBIDDEN,
    PALETTE,
    TITLE_HEIGHT,
    LinearScale,
    image,
    line,
    log_axis_beside,
    mark,
    text,
    tick_texts,
    ticks,
)

_LAST = 12
"""Points of a series that a terminal shows: the last of them."""
_SHOWN = 60
"""Series that are shown: those that moved first."""
_DRAWN = 12
"""Series that a page draws: those that moved first."""
_MOST_POINTS = 400
"""Points of a chart: the last of them."""


def trend_document(trend: Trend) -> Document:
    """Each comparison with its numbers, those that moved first."""
    moved = [series for series in trend.series if series.moves]
    points = sum(len(series.points) for series in trend.series)
    body: list[Block] = []
    for number, series in enumerate(trend.series[:_SHOWN], 1):
        last = series.points[-_LAST:]
        lines = [Line(_sentence(move, series.metric), "strong") for move in series.moves] or [
            Line("No move was found.", "quiet")
        ]
        rows = [_row(point, series) for point in last]
        left = len(series.points) - len(last)
        shown = [Only("terminal", [Line(f"The last {_LAST} of {len(series.points)}:", "quiet")])] if left else []
        drawing: list[Block] = [Drawing(_trend_chart(series, trend))] if number <= _DRAWN else []
        table = Table(("Date", "Commit", "Value", "Interval", "Bound", "Run"), rows, numbers=(2,), style="stacked")
        body.append(
            Section(f"series-{number}", one_line(series.title, 160), [*lines, *drawing, *shown, table], announced=True)
        )
    body += more(len(trend.series) - _SHOWN, "comparison")
    # A trend says what moved; whether that is wrong is for the runs to say, so there is no verdict.
    first = moved[0] if moved else None
    headline = f"{one_line(first.title, 200)}: {_sentence(first.moves[0], '')}" if first else "No move was found."
    rate = f"Of the moves, {100 * trend.alpha:g} % at most are expected to be chance."
    return Document(
        command="trend",
        title=one_line(f"{trend.metric} in {trend.place}", 80),
        verdict=None,
        exit_code=0,
        word=f"{len(moved)} of {len(trend.series)} moved",
        headline=headline,
        meaning=f"{counted(points, 'number')} of {counted(len(trend.series), 'comparison')}. {rate}",
        crumbs=[one_line(trend.metric, 60), f"in {one_line(trend.place, 120)}", one_line(trend.where, 200)],
        body=body,
        foot=f"{trend.schema_id}.",
        result=trend,
    )  # fmt: skip


def trend_sections(trends: Sequence[Trend]) -> list[Block]:
    """For the page of many runs: what moved in any of these trends, and charts of it."""
    series = [(each, trend) for trend in trends for each in trend.series]
    moved = [(each, trend) for each, trend in series if each.moves]
    drawn = sorted(moved, key=lambda pair: min(move.p for move in pair[0].moves))[:_DRAWN]
    if not series:
        return []
    lines: list[Words] = [
        (Cell(one_line(each.title, 200), "strong"), f": {_sentence(each.moves[0], '')}") for each, _ in drawn
    ]
    names = ", ".join(trend.metric for trend in trends)
    blocks: list[Block] = [Line(f"{len(moved)} of {len(series):,} series of {names} moved.", "deciding")]
    if drawn:
        left = len(moved) - len(drawn)
        blocks += [Items(lines), *([Line(f"… and {left}: see assay trend METRIC", "quiet")] if left else [])]
        blocks.append(Fold("Charts", [Drawing(_trend_chart(each, trend)) for each, trend in drawn]))
    return [Section("trends", "Trends", blocks)]


def _sentence(move: Move, metric: str) -> str:
    of = f"{metric} " if metric else ""
    means = f"from {_figure(move.before_mean)} to {_figure(move.after_mean)} on average"
    return f"{of}moved between {move.after} and {move.first}, {means} (p = {move.p:.2g})."


def _row(point: Point, series: Series) -> tuple[Words, ...]:
    moved = next((move for move in series.moves if series.points[move.index] == point), None)
    interval = NOTHING if point.low is None or point.high is None else f"{_figure(point.low)} to {_figure(point.high)}"
    bound = NOTHING if point.bound is None else _figure(point.bound)
    value = "not finite" if point.value is None else _figure(point.value)
    date = label(point, "date")
    return (
        Cell(date, "strong", note="moved") if moved else date,
        point.commit[:12] or NOTHING, value, interval, bound, one_line(point.run, 200),
    )  # fmt: skip


def _figure(value: float) -> str:
    """A number to three digits; with an exponent where it is very small or very large."""
    return f"{value:.3g}"


def _trend_chart(series: Series, trend: Trend) -> str:
    """A number by commit or date, oldest first: a mark with its interval each, the bound dashed, and a line where it moved.

    Returns:
        An ``<svg>`` element; an empty string where no number is finite.
    """
    first = max(0, len(series.points) - _MOST_POINTS)
    points = [(index, p) for index, p in enumerate(series.points) if index >= first and p.value is not None]
    if not points:
        return ""
    values = [v for _, p in points for v in (p.value, p.low, p.high) if v is not None and math.isfinite(v)]
    bounds = [p.bound for _, p in points if p.bound is not None and math.isfinite(p.bound)]
    positive = [v for v in values if v > 0]
    log = len(positive) == len(values) and max(values) > 50 * min(values)
    known = values + [b for b in bounds if b > 0 or not log]
    low, high = min(known), max(known)
    margin = 0.08 * (high - low) or abs(high) * 0.1 or 1.0
    bottom = TITLE_HEIGHT + 160
    x = LinearScale(points[0][0] - 0.5, points[-1][0] + 0.5, 64, charts.WIDE - 6)
    y = (
        LinearScale(low / 1.5, high * 1.5, bottom, TITLE_HEIGHT + 8, log=True)
        if log
        else LinearScale(low - margin, high + margin, bottom, TITLE_HEIGHT + 8)
    )
    parts = log_axis_beside(x, y) if log else _axis_beside(x, y)
    parts += [text(one_line(series.title, 110), x.start, TITLE_HEIGHT - 8, size=12)]
    if bounds:
        parts += [line(x.start, y(bounds[-1]), x.stop, y(bounds[-1]), FORBIDDEN, 1.5, stroke_dasharray="4 3")]
    parts += [
        line(x(move.index - 0.5), y.start, x(move.index - 0.5), y.stop, PALETTE["chart-wrong"], 2)
        for move in series.moves
        if move.index > first
    ]
    blue = PALETTE["chart-candidate"]
    for index, point in points:
        if point.low is not None and point.high is not None:
            ends = [min(max(end, y.low), y.high) if math.isfinite(end) else y.high for end in (point.low, point.high)]
            parts.append(line(x(index), y(ends[0]), x(index), y(ends[1]), blue, 1.5, stroke_opacity=0.5))
        assert point.value is not None
        parts.append(
            mark("circle", x(index), y(point.value), 3.2, blue, f"{label(point, trend.by)}: {_figure(point.value)}")
        )
    for (_, point), anchor in ((points[0], "start"), (points[-1], "end")):
        place = x.start if anchor == "start" else x.stop
        parts.append(text(label(point, trend.by), place, bottom + 13, anchor))
    says = f"{series.title}: {counted(len(points), 'number')}, the last {_figure(points[-1][1].value or 0.0)}"
    return image(charts.WIDE, bottom + AXIS_HEIGHT, says, parts)


def _axis_beside(x: LinearScale, y: LinearScale) -> list[str]:
    at = ticks(y.low, y.high, 5)
    rules = [line(x.start, y(value), x.stop, y(value), PALETTE["chart-rule"]) for value in at]
    return rules + [text(word, x.start - 8, y(value), "end") for value, word in zip(at, tick_texts(at), strict=True)]
