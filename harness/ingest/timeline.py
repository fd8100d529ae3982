"""The timeline of a trace, bounded in size: what ran in each column of each lane."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from assay.harness.schema import Part

MAX_TRACKS, MAX_LANES, MAX_COLUMNS = 16, 8, 160
"""Most tracks, lanes of a track, and columns: 20,480 cells, so that a picture of 100,000 events stays below 2 MB."""
NOTHING, POLLED = ".", "o"
"""Cells in which nothing happened, and in which an action was polled and computed nothing."""
TENTHS = "123456789"
"""Cells in which something ran: in how much of the column, from "1" up to a ninth of it to "9" for all of it."""


def cell(share: float, polled: bool = False) -> str:
    """Return the cell of a column of which this share, from 0 to 1, is taken; `polled` is whether an action was polled in it."""
    return (
        (POLLED if polled else NOTHING) if share <= 0 else TENTHS[min(len(TENTHS) - 1, int(share * len(TENTHS) - 1e-9))]
    )


class Lane(Part):
    """One kind of thing that a track does."""

    name: str
    kind: Literal["extend", "decode", "mixed", "idle", "other"]
    cells: str = Field(
        max_length=MAX_COLUMNS,
        description='one character a column: "." nothing, "o" polled and computed nothing, "1" to "9" how much of it is taken',
    )


class TimelineTrack(Part):
    """A request of an engine, or a device or a thread of a profile."""

    name: str
    note: str = Field(description='such as "forks its sequence, 128 tokens"')
    lanes: tuple[Lane, ...] = Field(max_length=MAX_LANES)


class Timeline(Part):
    """A timeline of what ran, by track."""

    axis: str = Field(description='what the columns count: "segment", or "ms" from the first event')
    low: float = Field(description="where the first column begins, on that axis")
    high: float = Field(description="where the last column ends")
    tracks: tuple[TimelineTrack, ...] = Field(max_length=MAX_TRACKS)
    left_out: int = Field(0, description="tracks that are not shown")
