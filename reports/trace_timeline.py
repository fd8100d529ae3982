"""The timeline of an engine's trace as a picture: a row for each action of each request, and a column for each segment."""

from __future__ import annotations

from itertools import groupby

from assay.harness.ingest.result import NOTHING, POLLED, TENTHS, Lane, Timeline, TimelineTrack
from assay.harness.text import one_line
from assay.reports import charts
from assay.reports.svg import (
    AXIS_HEIGHT,
    INK,
    LEGEND_HEIGHT,
    MUTED,
    NAME_SIZE,
    PALETTE,
    RULE,
    TITLE_HEIGHT,
    LegendKey,
    LinearScale,
    axis_below,
    element,
    image,
    legend,
    line,
    text,
    ticks,
)

_ROW, _HEAD, _GAP = 15, 20, 8
"""Heights in CSS pixels: of a lane, of the name of a track, and between tracks."""
_NAME_WIDTH, _NAME_LENGTH = 150, 24
"""Room for the name of a lane: CSS pixels, and characters."""
_COLOURS = {
    "extend": PALETTE["chart-candidate"], "decode": PALETTE["chart-right"], "other": PALETTE["chart-unparsed"],
}  # fmt: skip


def timeline_svg(timeline: Timeline) -> str:
    """The picture as an ``<svg>`` element; empty if there is nothing to show.

    Runs of equal cells are one rectangle, so its size follows the changes and not the events.
    """
    columns = max((len(lane.cells) for track in timeline.tracks for lane in track.lanes), default=0)
    if not columns:
        return ""
    x = LinearScale(0, columns, _NAME_WIDTH, charts.WIDE - 6)
    kinds = {lane.kind for track in timeline.tracks for lane in track.lanes if set(lane.cells) & set(TENTHS)}
    keys = [LegendKey(kind, colour, "square") for kind, colour in _COLOURS.items() if kind in kinds]
    polled = any(POLLED in lane.cells for track in timeline.tracks for lane in track.lanes)
    keys += [LegendKey("polled, computed nothing", RULE, "square")] if polled else []
    parts, y = legend(keys, x.start), float(LEGEND_HEIGHT)
    for track in timeline.tracks:
        parts += _track(track, x, y, timeline.segments / columns)
        y += _HEAD + _ROW * len(track.lanes) + _GAP
    axis = LinearScale(0, timeline.segments, x.start, x.stop)
    parts += axis_below(axis, y, ticks(axis.low, axis.high, 8), "segment of the request")
    says = "; ".join(f"{track.name}: {track.note}" for track in timeline.tracks)
    return image(charts.WIDE, y + AXIS_HEIGHT + TITLE_HEIGHT, one_line(says, 600), parts)


def _track(track: TimelineTrack, x: LinearScale, y: float, per: float) -> list[str]:
    parts = [
        text(one_line(track.name, 40), 4, y + _HEAD / 2, size=NAME_SIZE, colour=INK),
        text(one_line(track.note, 120), x.start, y + _HEAD / 2),
    ]
    for number, lane in enumerate(track.lanes):
        top = y + _HEAD + number * _ROW
        parts.append(text(one_line(lane.name, _NAME_LENGTH), 12, top + _ROW / 2))
        parts += _cells(lane, x, top, per)
    return parts


def _cells(lane: Lane, x: LinearScale, top: float, per: float) -> list[str]:
    """Draw a lane; a column stands for so many segments."""
    colour = _COLOURS[lane.kind]
    parts, at = [], 0
    for cell, run in groupby(lane.cells):
        start, at = at, at + len(list(run))
        if cell == NOTHING:
            continue
        left, width = x(start), max(x(at) - x(start), 0.5)
        says = f"{one_line(lane.name, 60)}, segment {start * per:,.6g} to {at * per:,.6g}"
        middle = top + _ROW / 2
        if cell == POLLED:
            shape: dict[str, str | float | None] = {"y": middle - 1, "height": 2, "fill": MUTED, "fill_opacity": 0.5}
        elif per == 1:  # segments can be counted
            across = f"{width / (at - start) - 1:.2f} 1"
            parts.append(line(left, middle, left + width, middle, colour, _ROW - 4, stroke_dasharray=across))
            continue
        else:
            opacity = 0.3 + 0.7 * (TENTHS.index(cell) + 1) / len(TENTHS)
            shape = {"y": top + 2, "height": _ROW - 4, "fill": colour, "fill_opacity": opacity}
        parts.append(element("rect", says, x=left, width=width, **shape))
    return parts
