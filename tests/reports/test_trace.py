"""The pages of traces: bounded, inert, and readable without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.harness.ingest.recognise import ingest
from assay.harness.ingest.result import IngestResult, Timeline, TimelineTrack
from assay.reports.ingest import ingest_document
from assay.reports.page import to_html
from assay.reports.trace_timeline import timeline_svg

TRACES = Path(__file__).parents[1] / "data" / "traces"


def read(path: Path) -> tuple[IngestResult, Timeline]:
    result = ingest([path])
    timeline = result.documents[0].timeline
    assert timeline is not None
    return result, timeline


def test_an_engine_trace_by_request_and_action() -> None:
    document, timeline = read(TRACES / "mlc_engine.txt")
    one, two = timeline.tracks
    assert (one.note, two.note) == ("adds its sequence, 4 tokens", "forks its sequence, 4 tokens")
    assert two.lanes == {"NewRequestPrefill": "9oooo", "Batch jump forward": ".oooo", "Batch decode": ".999o"}
    page = to_html(ingest_document(document))
    assert "request 2: forks its sequence, 4 tokens" in page
    assert "Answer to request 1, lines 75-79" in page
    assert "style=" not in page


@pytest.mark.parametrize("requests", [1, 400])
def test_a_large_engine_trace_has_a_small_picture(tmp_path: Path, requests: int) -> None:
    lines = (TRACES / "mlc_engine.txt").read_text().splitlines()
    one = lines[13:26] + lines[26:40] * (3_000 // requests)
    (tmp_path / "trace.txt").write_text("\n".join(one * requests))
    document, timeline = read(tmp_path / "trace.txt")
    assert timeline.left_out == max(0, requests - 16)
    assert "9" in timeline.tracks[0].lanes["Batch decode"]
    assert len(to_html(ingest_document(document))) < 300_000


def test_the_picture_of_all_cells_stays_below_its_bound() -> None:
    lanes = {f"lane {n}": "19" * 80 for n in range(8)}
    tracks = tuple(TimelineTrack(name=f"track {n}", note="", lanes=lanes) for n in range(16))
    svg = timeline_svg(Timeline(segments=320, tracks=tracks))
    assert svg.count("<rect") >= 16 * 8 * 160
    assert len(svg) < 4_000_000


def test_nothing_to_show() -> None:
    assert timeline_svg(Timeline(segments=0, tracks=())) == ""
