"""The chart of a commit bisection: the error by commit."""

from __future__ import annotations

import math

from assay.harness.bisect.commits.state import BisectResult, BisectState, CommitProbe
from assay.reports import charts
from assay.reports.svg import (
    AXIS_HEIGHT,
    FORBIDDEN,
    LEGEND_HEIGHT,
    PALETTE,
    TITLE_HEIGHT,
    LegendKey,
    LinearScale,
    Shape,
    axis_below,
    image,
    legend,
    line,
    log_axis_beside,
    mark,
    text,
    ticks,
)

_COLOURS = {"good": "chart-right", "bad": "chart-forbidden", "skip": "chart-muted"}
SHAPES: dict[str, Shape] = {"good": "circle", "bad": "diamond", "skip": "cross"}


def error_chart(state: BisectState, result: BisectResult) -> str:
    """Worst own error by commit, as a multiple of its limit, on a log scale; a vertical line marks the named commit.

    A probe without a number (skipped, raised, or classified by accuracy) is drawn at the edge: bad at the top, good and skipped at
    the bottom. An error that is not finite is drawn at the top.

    Returns:
        An ``<svg>`` element; an empty string if nothing was probed.
    """
    place = {entry.commit: i for i, entry in enumerate(state.history, start=1)} | {state.spec.good: 0}
    if not state.probes:
        return ""
    known = [p.worst for p in state.probes if p.worst is not None and 0 < p.worst < math.inf]
    low, high = min([0.5, *known]) / 2, max([2.0, *known]) * 2

    def height(probe: CommitProbe) -> float:
        if probe.worst is None or not math.isfinite(probe.worst):
            return high if probe.outcome == "bad" else low
        return max(probe.worst, low)

    x = LinearScale(-0.5, len(state.history) + 0.5, 64, charts.WIDE - 6)
    bottom = LEGEND_HEIGHT + 228
    y = LinearScale(low, high, bottom, LEGEND_HEIGHT + 8, log=True)
    kinds = [kind for kind in _COLOURS if any(p.outcome == kind for p in state.probes)]
    parts = legend([LegendKey(kind, PALETTE[_COLOURS[kind]], SHAPES[kind]) for kind in kinds], x.start)
    parts += log_axis_beside(x, y)
    parts += [line(x.start, y(1.0), x.stop, y(1.0), FORBIDDEN, 1.5, stroke_dasharray="4 3")]
    parts += [text("error / limit", x.stop, y.stop - 14, "end")]
    if result.outcome != "flaky":
        spots = [x(place[commit]) for commit in result.suspects]
        parts += [line(at, y.start, at, y.stop, PALETTE["chart-candidate"], 2, stroke_opacity=0.6) for at in spots]
    parts += [
        mark(SHAPES[p.outcome], x(place[p.commit]), y(height(p)), 4.7, PALETTE[_COLOURS[p.outcome]], p.outcome)
        for p in state.probes
    ]
    at = ticks(0, len(state.history), 16, whole=True)
    parts += axis_below(x, bottom, at, "commit of the range, oldest first")
    counts = ", ".join(f"{len({p.commit for p in state.probes if p.outcome == kind})} {kind}" for kind in kinds)
    says = f"worst own error by commit, {len(state.history)} commits: {counts}"
    return image(charts.WIDE, bottom + AXIS_HEIGHT + TITLE_HEIGHT, says, parts)
