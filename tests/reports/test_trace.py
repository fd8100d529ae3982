"""The pages of traces: bounded, inert, and readable without a network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from assay.harness.ingest.result import Lane, Timeline, TimelineTrack
from assay.harness.ingest.source_file import SourceFile
from assay.harness.ingest.trace import chrome
from assay.harness.ingest.trace.trace_diff import diff_files, document_of
from assay.reports.page import to_html
from assay.reports.trace_steps import trace_diff_document, trace_document
from assay.reports.trace_timeline import timeline_svg

TRACES = Path(__file__).parents[1] / "data" / "traces"


def test_an_engine_trace_by_request_and_action() -> None:
    document = document_of(TRACES / "mlc_engine.txt")
    assert document.timeline is not None
    one, two = document.timeline.tracks
    assert (one.note, two.note) == ("adds its sequence, 4 tokens", "forks its sequence, 4 tokens")
    assert [(lane.name, lane.cells) for lane in two.lanes] == [
        ("NewRequestPrefill", "9oooo"),
        ("Batch jump forward", ".oooo"),
        ("Batch decode", ".999o"),
    ]
    page = to_html(trace_document(document))
    assert "request 2: forks its sequence, 4 tokens" in page
    assert "Answer to request 1, line 75" in page
    assert "style=" not in page


@pytest.mark.parametrize("requests", [1, 400])
def test_a_large_engine_trace_has_a_small_picture(tmp_path: Path, requests: int) -> None:
    lines = (TRACES / "mlc_engine.txt").read_text().splitlines()
    one = lines[13:26] + lines[26:40] * (3_000 // requests)
    (tmp_path / "trace.txt").write_text("\n".join(one * requests))
    document = document_of(tmp_path / "trace.txt")
    assert document.timeline is not None
    assert document.timeline.left_out == max(0, requests - 16)
    assert "9" in document.timeline.tracks[0].lanes[2].cells
    assert len(to_html(trace_document(document))) < 300_000


def test_the_page_of_many_events_is_bounded(tmp_path: Path) -> None:
    names = [f"kernel_{n % 300}" for n in range(40_000)]
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "pid": n % 40, "tid": 7, "ts": 10 * n, "dur": 1 + n % 13}
        for n, name in enumerate(names)
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    document = chrome.READER.read(SourceFile.of(path))
    assert len(to_html(trace_document(document))) < 2_000_000
    assert len(document.model_dump_json()) < 100_000


def test_the_picture_of_all_cells_stays_below_its_bound() -> None:
    lanes = tuple(Lane(name=f"lane {n}", kind="decode", cells="19" * 80) for n in range(8))
    tracks = tuple(TimelineTrack(name=f"track {n}", note="", lanes=lanes) for n in range(16))
    svg = timeline_svg(Timeline(segments=320, tracks=tracks))
    assert svg.count("<rect") >= 16 * 8 * 160
    assert len(svg) < 4_000_000


def test_names_from_a_file_are_inert(tmp_path: Path) -> None:
    name = "</title><script>alert(1)</script>\u202e"
    event = {"ph": "X", "cat": "kernel", "name": name, "pid": name, "tid": 7, "ts": 1, "dur": 1}
    paths = tmp_path / "a.json", tmp_path / "b.json"
    paths[0].write_text(json.dumps([event]))
    paths[1].write_text(json.dumps([{**event, "name": "other"}]))
    for page in (to_html(trace_document(document_of(paths[0]))), to_html(trace_diff_document(diff_files(*paths)))):
        assert "<script>alert" not in page
        assert "\u202e" not in page


def test_every_colour_follows_the_theme() -> None:
    from assay.reports.svg import PALETTE

    document = document_of(TRACES / "mlc_engine.txt")
    assert document.timeline is not None
    svg = timeline_svg(document.timeline)
    colours = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6})"', svg))
    assert colours
    assert colours <= set(PALETTE.values())


def test_nothing_to_show() -> None:
    assert timeline_svg(Timeline(segments=0, tracks=())) == ""
