"""The timeline of an engine's trace: a lane for each action of a request, a column for each segment."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from assay.harness.ingest.mlc_rules import DECODE, PREFILL
from assay.harness.ingest.mlc_trace import ACTIONS, ADD, FORK, Segment, StepTrace, Track
from assay.harness.ingest.result import (
    MAX_COLUMNS,
    MAX_TRACKS,
    NOTHING,
    POLLED,
    TENTHS,
    Lane,
    Timeline,
    TimelineTrack,
)
from assay.harness.text import counted

_LANES: dict[str, Literal["extend", "decode"]] = {PREFILL: "extend", DECODE: "decode"}
_SEQUENCE = {ADD: "adds its sequence, ", FORK: "forks its sequence, ", "": ""}


def timeline(trace: StepTrace) -> Timeline:
    """Draw the timeline of a trace: a column for each segment, or for several where there are many."""
    shown = trace.tracks[:MAX_TRACKS]
    longest = max((len(track.segments) for track in shown), default=0)
    lanes = tuple(_lanes(track, max(1, -(-longest // MAX_COLUMNS))) for track in shown)
    return Timeline(segments=longest, tracks=lanes, left_out=len(trace.tracks) - len(shown))


def _lanes(track: Track, per: int) -> TimelineTrack:
    groups = [track.segments[at : at + per] for at in range(0, len(track.segments), per)]
    lanes = tuple(
        Lane(name=name, kind=_LANES.get(name, "other"), cells="".join(_cell(group, name) for group in groups))
        for name in ACTIONS
    )
    note = f"{_SEQUENCE[track.sequence[0]]}{counted(sum(track.tokens), 'token')}"
    return TimelineTrack(name=track.name, note=note, lanes=lanes)


def _cell(group: Sequence[Segment], action: str) -> str:
    """Return the cell of an action: in how many of some segments it computed something, or that it was polled."""
    # An action computes something if the model is called before the next one is polled.
    called = re.compile(rf"{ACTIONS[action]}[^pjdmcv]*[mcv]")
    computed = sum(len(called.findall(segment.letters)) for segment in group)
    if computed:
        return TENTHS[int(min(1.0, computed / len(group)) * len(TENTHS) - 1e-9)]
    return POLLED if any(ACTIONS[action] in segment.letters for segment in group) else NOTHING
