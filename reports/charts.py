"""Charts as small static SVG: no script, no network, no fonts of their own, readable in light and dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from assay.harness.judge.latency_result import LatencyRow, ratio_text
from assay.harness.judge.report import NOT_FINITE, ConditionRow, DepthRow, Metric, OwnError, Tally
from assay.harness.text import one_line
from assay.reports.summary import bound, error_percent, interval, number, share
from assay.reports.svg import (
    AXIS_HEIGHT,
    FORBIDDEN,
    INK,
    LEGEND_HEIGHT,
    NAME_SIZE,
    PALETTE,
    RULE,
    TITLE_HEIGHT,
    LegendKey,
    LinearScale,
    axis_below,
    bound_rule,
    image,
    legend,
    line,
    log_axis_beside,
    mark,
    path,
    rect,
    text,
    text_width,
    ticks,
)

WIDTH = 330
"""Width in CSS pixels: a chart fits unscaled into a page of 400 pixels."""
WIDE = 1000
"""Width of a chart with an entry for each layer or commit: 128 of them need it, and a narrow page scrolls it in its own frame."""
_ROW_HEIGHT = 26
_MARGIN = 6
_NAME_LIMIT = 20
"""Most characters of a row's name."""
_MAX_NAME_WIDTH = 215

_REFERENCE, _CANDIDATE = PALETTE["chart-reference"], PALETTE["chart-candidate"]
_ANSWERS = {name: PALETTE[f"chart-{name}"] for name in ("right", "wrong", "unparsed")}
_BOUND_OF_OWN = LegendKey("its bound", FORBIDDEN, dash="4 3")
_CELLS = {"own": LegendKey("own error, worst cell", _CANDIDATE)}
_LAYERS = {
    "whole": LegendKey("own", _CANDIDATE),
    "inherited": LegendKey("inherited", PALETTE["chart-unparsed"], dash="2 3"),
    "total": LegendKey("total", _REFERENCE, dash="7 3"),
}


def interval_chart(metric: Metric) -> str:
    """Value and interval of a metric on one axis, with its bound; the side that the bound forbids is tinted.

    Returns:
        An ``<svg>`` element; an empty string where there is no interval, for which the number and its bound in words are enough, or
        where a number is not finite.
    """
    known = [x for x in (metric.value, metric.low, metric.high, metric.bound) if x is not None]
    if metric.value is None or metric.low is None or metric.high is None or not all(map(math.isfinite, known)):
        return ""
    low, high = min(known), max(known)
    slack = (high - low) * 0.12 or abs(high) * 0.1 or 1.0
    x = LinearScale(low - slack, high + slack, _MARGIN, WIDTH - _MARGIN)
    parts: list[str] = []
    if metric.bound is not None:
        edges = {"least": x.low, "most": x.high, None: None}
        parts += bound_rule(x, metric.bound, 0, _ROW_HEIGHT, edges[metric.bound_is])
    middle = _ROW_HEIGHT / 2
    parts.append(_span(x, metric.low, metric.high, middle))
    parts.append(mark("circle", x(metric.value), middle, 5, _CANDIDATE))
    at = ticks(x.low, x.high, 5)
    parts += axis_below(x, _ROW_HEIGHT, at)
    label = f"{one_line(metric.title)}: {number(metric.value)}, interval {interval(metric)}"
    label += f", bound {bound(metric)}" if metric.bound is not None else ""
    return image(WIDTH, _ROW_HEIGHT + AXIS_HEIGHT, label, parts)


def tally_chart(tallies: Sequence[Tally]) -> str:
    """A bar per role, split into right, wrong and unparsed answers; empty where there are no answers."""
    most = max((tally.right + tally.wrong + tally.unparsed for tally in tallies), default=0)
    if not most:
        return ""
    x = LinearScale(0, most, _name_width([tally.role for tally in tallies]), WIDTH - _MARGIN - 8)
    top, bottom = LEGEND_HEIGHT, LEGEND_HEIGHT + _ROW_HEIGHT * len(tallies)
    parts = legend([LegendKey(name, colour, "square") for name, colour in _ANSWERS.items()])
    for row, tally in enumerate(tallies):
        middle, start = top + (row + 0.5) * _ROW_HEIGHT, 0
        parts.append(_row_name(x, tally.role, middle))
        for name, colour in _ANSWERS.items():
            if count := getattr(tally, name):
                parts.append(rect(x(start), x(start + count), middle - 8, middle + 8, colour))
                start += count
    at = ticks(0, most, 4, whole=True)
    parts += axis_below(x, bottom, at)
    label = "; ".join(
        f"{t.role}: {t.right} right, {t.wrong} wrong, {t.unparsed} unparsed of {t.total}" for t in tallies
    )
    return image(WIDTH, bottom + AXIS_HEIGHT, label, parts)


def condition_chart(rows: Sequence[ConditionRow]) -> str:
    """Accuracy of both roles by bucket, two dots joined by a line where they differ.

    Buckets without items are left out. One bucket is no comparison: it is not drawn.
    """
    seen = [row for row in rows if row.items]
    if len(seen) < 2:
        return ""
    names = [f"{one_line(row.bucket, _NAME_LIMIT)} ({row.items})" for row in seen]
    x = LinearScale(0, 1, _name_width(names) + 8, WIDTH - _MARGIN - 12)
    bottom = LEGEND_HEIGHT + _ROW_HEIGHT * len(seen)
    parts = legend([LegendKey("reference", _REFERENCE, "diamond"), LegendKey("candidate", _CANDIDATE, "circle")])
    at = [0.0, 0.25, 0.5, 0.75, 1.0]
    parts += [line(x(value), LEGEND_HEIGHT, x(value), bottom, RULE) for value in at]
    for row, (name, condition) in enumerate(zip(names, seen, strict=True)):
        middle = LEGEND_HEIGHT + (row + 0.5) * _ROW_HEIGHT
        reference, candidate = condition.reference_right / condition.items, condition.candidate_right / condition.items
        parts.append(_row_name(x, name, middle, 8))
        parts.append(line(x(reference), middle, x(candidate), middle, _CANDIDATE, 2, stroke_opacity=0.35))
        # The reference's mark is larger and drawn first, so that both show where the roles agree.
        parts.append(mark("diamond", x(reference), middle, 6.5, _REFERENCE, f"reference {reference:.3f}"))
        parts.append(mark("circle", x(candidate), middle, 4.4, _CANDIDATE, f"candidate {candidate:.3f}"))
    parts += axis_below(x, bottom, at, rule=False)
    label = f"accuracy by {one_line(seen[0].title)}: " + "; ".join(
        f"{one_line(row.bucket)}: reference {share(row.reference_right, row.items)}, "
        f"candidate {share(row.candidate_right, row.items)} of {row.items}"
        for row in seen
    )
    return image(WIDTH, bottom + AXIS_HEIGHT, label, parts)


def cells_chart(rows: Sequence[DepthRow]) -> str:
    """Own error of each layer's worst cell along depth, with the bound that applies to cells, on a log scale.

    Layers out of bounds are marked. What is not finite is a cross at the upper edge. A line is broken where nothing was observed.
    One layer is no profile: it is not drawn.
    """
    return _profile(rows, _CELLS, bounded=True)


def layers_chart(rows: Sequence[DepthRow]) -> str:
    """Own, inherited and total error along depth, each of whole layers, so that they can be compared; as `cells_chart`.

    Empty where no free-running candidate was traced: own errors alone say nothing that the worst cells do not say.
    """
    if all(row.total is None or row.whole is None for row in rows):
        return ""
    return _profile(rows, _LAYERS, bounded=False)


def _profile(rows: Sequence[DepthRow], keys_of: Mapping[str, LegendKey], bounded: bool) -> str:
    drawn: dict[str, list[OwnError]] = {kind: [getattr(row, kind) for row in rows] for kind in keys_of}
    limits: list[OwnError] = [row.bound for row in rows] if bounded else []
    numbers = [x for values in [*drawn.values(), limits] for x in values if isinstance(x, float) and x > 0]
    if not numbers or len(rows) < 2:
        return ""
    low, high = 10.0 ** math.floor(math.log10(min(numbers))), 10.0 ** math.ceil(math.log10(max(numbers)) + 0.01)
    bottom = LEGEND_HEIGHT + 8 + 200
    x = LinearScale(rows[0].layer - 0.5, rows[-1].layer + 0.5, 56, WIDE - _MARGIN)
    y = LinearScale(low, high, bottom, LEGEND_HEIGHT + 8, log=True)
    parts = log_axis_beside(x, y, percent=True)
    bounds = [(row, row.bound) for row in rows if bounded and row.bound is not None]
    for row, limit in bounds:
        height = y(max(limit, low))
        parts.append(
            line(x(row.layer - 0.5), height, x(row.layer + 0.5), height, FORBIDDEN, 1.5, stroke_dasharray="4 3")
        )
    shown = {}
    for kind, key in keys_of.items():
        errors = drawn[kind]
        if any(error is not None for error in errors):
            shown[kind] = key
            parts += _error_line(rows, errors, x, y, key)
    parts += [
        _outlier(row, x, y)
        for row in rows
        if bounded and (row.own == NOT_FINITE or (row.out_of_bounds and row.own is not None))
    ]
    at = ticks(rows[0].layer, rows[-1].layer, 16, whole=True)
    parts += axis_below(x, bottom, at, "layer")
    keys = [*shown.values(), *([_BOUND_OF_OWN] if bounds else [])]
    bad = sum(row.out_of_bounds for row in rows)
    what = "own error of the worst cell" if bounded else "own, inherited and total error of whole layers"
    label = f"{what}, layers {rows[0].layer} to {rows[-1].layer}: {bad} of {len(rows)} layers are out of bounds"
    return image(WIDE, bottom + AXIS_HEIGHT + TITLE_HEIGHT, label, [*legend(keys, x.start), *parts])


def _error_line(
    rows: Sequence[DepthRow], errors: Sequence[OwnError], x: LinearScale, y: LinearScale, key: LegendKey
) -> list[str]:
    runs: list[list[tuple[float, float]]] = [[]]
    dots = []
    for row, error in zip(rows, errors, strict=True):
        if error is None:
            runs.append([])
            continue
        point = (x(row.layer), y(y.high if error == NOT_FINITE else max(float(error), y.low)))
        runs[-1].append(point)
        dots.append(mark("circle", *point, 2.2, key.colour, f"layer {row.layer}, {key.name}: {error_percent(error)}"))
    return [*(path(run, key.colour, 2, key.dash) for run in runs if len(run) > 1), *dots]


def _outlier(row: DepthRow, x: LinearScale, y: LinearScale) -> str:
    title = f"layer {row.layer}, own: {error_percent(row.own)}, bound {error_percent(row.bound)}"
    if row.own is None or row.own == NOT_FINITE:
        return mark("cross", x(row.layer), y.stop, 4.5, INK, title)
    return mark("diamond", x(row.layer), y(max(float(row.own), y.low)), 4.5, FORBIDDEN, title)


def ratio_ends(rows: Sequence[LatencyRow]) -> tuple[float, float]:
    """Ends of an axis that holds 1, the bound, and every measured ratio with its interval."""
    numbers = [x for row in rows for x in (row.bound, row.ratio, row.low, row.high, row.floor) if x is not None]
    low, high = min(numbers, default=1.0), max(numbers, default=1.0)
    low, high = min(low, 1.0), max(high, 1.0)
    slack = 0.06 * (high - low) or 0.1
    return low - slack, high + slack


def ratio_chart(rows: Sequence[LatencyRow], ends: tuple[float, float]) -> str:
    """Ratios of times of one load with their intervals, a row for each metric; what lies beyond the bound is tinted.

    The diamond is the floor: reference / reference. An interval that too few ratios leave open is not drawn.
    """
    shown = [row for row in rows if row.ratio is not None]
    if not shown:
        return ""
    x = LinearScale(*ends, _name_width([row.metric for row in shown]), WIDTH - _MARGIN)
    bottom, limit = LEGEND_HEIGHT + _ROW_HEIGHT * len(shown), shown[0].bound
    parts = legend(
        [LegendKey("reference / reference", _REFERENCE, "diamond"), LegendKey("candidate", _CANDIDATE, "circle")]
    )
    parts.append(line(x(1.0), LEGEND_HEIGHT, x(1.0), bottom, RULE, 1.5))
    parts += bound_rule(x, limit, LEGEND_HEIGHT, bottom, x.high)
    for row, measured in enumerate(shown):
        middle = LEGEND_HEIGHT + (row + 0.5) * _ROW_HEIGHT
        parts.append(_row_name(x, measured.metric, middle))
        if measured.low is not None and measured.high is not None:
            parts.append(_span(x, measured.low, measured.high, middle))
        if measured.floor is not None:
            parts.append(
                mark(
                    "diamond", x(measured.floor), middle, 4.7, _REFERENCE, f"reference / reference {measured.floor:.3f}"
                )
            )
        if measured.ratio is not None:
            parts.append(mark("circle", x(measured.ratio), middle, 4.7, _CANDIDATE, f"candidate {measured.ratio:.3f}"))
    at = ticks(x.low, x.high, 5)
    parts += axis_below(x, bottom, at)
    label = (
        f"{one_line(shown[0].shape)}, {shown[0].concurrency} in flight, candidate / reference, bound {limit:g}: "
        + "; ".join(f"{row.metric} {ratio_text(row.ratio, row.low, row.high)}" for row in shown)
    )
    return image(WIDTH, bottom + AXIS_HEIGHT, label, parts)


def _span(x: LinearScale, low: float, high: float, y: float) -> str:
    return line(x(low), y, x(high), y, _CANDIDATE, 3, stroke_linecap="round")


def _name_width(names: Sequence[str]) -> float:
    """Where the plot begins, to the right of the rows' names."""
    return min(max(text_width(name, NAME_SIZE) for name in names), _MAX_NAME_WIDTH) + 12


def _row_name(x: LinearScale, name: str, middle: float, gap: float = 0) -> str:
    return text(name, x.start - 8 - gap, middle, "end", NAME_SIZE, INK)
