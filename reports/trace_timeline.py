"""The timeline of an engine's trace as a picture: a row for each action of each request, and a column for each segment."""

from __future__ import annotations

from itertools import groupby

from assay.harness.ingest.mlc_rules import DECODE, PREFILL
from assay.harness.ingest.result import NOTHING, POLLED, TENTHS, Timeline, TimelineTrack
from assay.harness.text import one_line
from assay.reports import svg

_WIDTH = 1000  # CSS pixels: a narrow page scrolls it in its own frame
_LEGEND = 24
# Heights in CSS pixels: of a lane, of the name of a track, and between tracks.
_ROW, _HEAD, _GAP = 15, 20, 8
# Room for the name of a lane: CSS pixels, and characters.
_NAME_WIDTH, _NAME_LENGTH = 150, 24
_COLOURS = {
    "extend": svg.CANDIDATE, "decode": svg.PALETTE["chart-right"], "other": svg.PALETTE["chart-unparsed"],
}  # fmt: skip
_KINDS = {PREFILL: "extend", DECODE: "decode"}


def timeline_svg(timeline: Timeline) -> str:
    """Draw the picture as an ``<svg>`` element, or return an empty string if there is nothing to show.

    Runs of equal cells are one rectangle, so its size depends on the changes and not on the events.
    """
    lanes = [lane for track in timeline.tracks for lane in track.lanes.items()]
    columns = max((len(cells) for _, cells in lanes), default=0)
    if not columns:
        return ""
    x = svg.Scale(0, columns, _NAME_WIDTH, _WIDTH - 6)
    kinds = {_KINDS.get(name, "other") for name, cells in lanes if set(cells) & set(TENTHS)}
    keys: list[tuple[str, str]] = [(kind, colour) for kind, colour in _COLOURS.items() if kind in kinds]
    polled = any(POLLED in cells for _, cells in lanes)
    keys += [("polled, computed nothing", svg.RULE)] if polled else []
    parts, y = [], float(_LEGEND)
    for number, (name, colour) in enumerate(keys):
        at = x.start + 90 * number
        parts += [svg.rect(at, at + 9, 4, 13, colour), svg.text(name, at + 15, 8, size=svg.NAME_SIZE, colour=svg.INK)]
    for track in timeline.tracks:
        parts += _track(track, x, y, timeline.segments / columns)
        y += _HEAD + _ROW * len(track.lanes) + _GAP
    parts += svg.axis_below(svg.Scale(0, timeline.segments, x.start, x.stop), y, 10, "segment of the request")
    says = "; ".join(f"{track.name}: {track.note}" for track in timeline.tracks)
    return svg.image(_WIDTH, y + svg.AXIS_HEIGHT + 16, one_line(says, 600), parts)


def _track(track: TimelineTrack, x: svg.Scale, y: float, per: float) -> list[str]:
    parts = [
        svg.text(one_line(track.name, 40), 4, y + _HEAD / 2, size=svg.NAME_SIZE, colour=svg.INK),
        svg.text(one_line(track.note, 120), x.start, y + _HEAD / 2),
    ]
    for number, (name, cells) in enumerate(track.lanes.items()):
        top = y + _HEAD + number * _ROW
        parts.append(svg.text(one_line(name, _NAME_LENGTH), 12, top + _ROW / 2))
        parts += _cells(name, cells, x, top, per)
    return parts


def _cells(name: str, cells: str, x: svg.Scale, top: float, per: float) -> list[str]:
    """Draw a lane; a column stands for `per` segments."""
    colour = _COLOURS[_KINDS.get(name, "other")]
    parts, at = [], 0
    for cell, run in groupby(cells):
        start, at = at, at + len(list(run))
        if cell == NOTHING:
            continue
        left, width = x(start), max(x(at) - x(start), 0.5)
        says = f"{one_line(name, 60)}, segment {start * per:,.6g} to {at * per:,.6g}"
        middle = top + _ROW / 2
        if cell == POLLED:
            parts.append(svg.rect(left, left + width, middle - 1, middle + 1, svg.MUTED, says, 0.5))
        elif per == 1:  # segments can be counted
            across = f"{width / (at - start) - 1:.2f} 1"
            parts.append(svg.line(left, middle, left + width, middle, colour, _ROW - 4, stroke_dasharray=across))
        else:
            opacity = 0.3 + 0.7 * (TENTHS.index(cell) + 1) / len(TENTHS)
            parts.append(svg.rect(left, left + width, top + 2, top + _ROW - 2, colour, says, opacity))
    return parts
