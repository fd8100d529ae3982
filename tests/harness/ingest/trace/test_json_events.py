"""Events are read one at a time from any way to write the array, whole or damaged, and every one is counted."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from assay.harness.ingest.trace import json_events
from assay.harness.ingest.trace.json_events import EventStream

EVENTS = [{"name": f"k{n} }},{{", "ph": "X", "ts": n, "dur": 1, "args": {"dims": [[1, 2], {"name": "]"}]}} for n in range(20)]


def read(tmp_path: Path, data: bytes | str) -> tuple[list[object], str]:
    path = tmp_path / "trace.json"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    stream = EventStream(path)
    events = list(stream.events())
    assert [number for number, _, _ in events] == list(range(1, len(events) + 1))
    return [value for _, value, _ in events], stream.ended


@pytest.fixture(params=[7, 64, 1 << 20])
def _chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_events, "CHUNK", request.param)


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("data", [
    json.dumps(EVENTS),
    json.dumps(EVENTS, indent=2),
    json.dumps({"schemaVersion": 1, "traceEvents": EVENTS, "traceName": "x"}),
    json.dumps({"traceEvents": EVENTS}, indent=1).replace("\n", "\r\n"),
    b"\xef\xbb\xbf" + json.dumps(EVENTS).encode(),
    gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()),
])  # fmt: skip
def test_all_ways_to_write_them(tmp_path: Path, data: bytes | str) -> None:
    assert read(tmp_path, data) == (EVENTS, "")


@pytest.mark.usefixtures("_chunk")
def test_an_array_without_its_end_is_read_and_said(tmp_path: Path) -> None:
    assert read(tmp_path, json.dumps(EVENTS)[:-1]) == (EVENTS, "the array of events has no end")


@pytest.mark.usefixtures("_chunk")
def test_half_an_event_is_one_that_is_not_understood(tmp_path: Path) -> None:
    text = json.dumps(EVENTS)
    values, ended = read(tmp_path, text[: text.index("k12") + 2])
    assert values == [*EVENTS[:12], None]
    assert ended


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("broken", [(5,), (5, 6)])
def test_broken_events_are_counted_one_by_one_and_do_not_hide_the_next(tmp_path: Path, broken: Sequence[int]) -> None:
    text = json.dumps(EVENTS)
    for number in broken:
        text = text.replace(f'"ts": {number},', '"ts": ,')
    values, ended = read(tmp_path, text)
    assert values == [None if number in broken else event for number, event in enumerate(EVENTS)]
    assert ended == ""


def test_compressed_data_that_ends_early(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps(EVENTS * 400).encode())
    values, ended = read(tmp_path, whole[: len(whole) // 2])
    assert values[: len(EVENTS)] == EVENTS
    assert "compressed data is damaged" in ended


@pytest.mark.parametrize("text", ["", "{}", '{"traceEvents": 3}', "[", "hello", '{"a": [1, 2'])
def test_no_events(tmp_path: Path, text: str) -> None:
    values, ended = read(tmp_path, text)
    assert values == []
    assert ended


def test_numbers_and_depth_that_no_parser_takes(tmp_path: Path) -> None:
    deep = "[" * 100_000
    values, _ = read(tmp_path, f'[{{"ph": "X", "ts": {"9" * 5000}}}, {{"ph": "i", "args": {deep}')
    assert values == [None, None]


@pytest.mark.slow
def test_memory_is_that_of_an_event_and_not_of_the_file(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "trace.json"
    path.write_text(json.dumps(EVENTS * 10_000))
    assert path.stat().st_size > 15 * json_events.CHUNK
    tracemalloc.start()
    count = sum(1 for _ in EventStream(path).events())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 200_000
    assert peak < 8 * json_events.CHUNK


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize(("whole", "broken"), [("]}}", "]}"), ("]}}", "]"), ('"args": {', '"args": ')])
def test_an_event_that_does_not_end_hides_no_other(tmp_path: Path, whole: str, broken: str) -> None:
    texts = [json.dumps(event) for event in EVENTS]
    texts[5] = texts[5].replace(whole, broken)
    values, ended = read(tmp_path, f"[{', '.join(texts)}]")
    assert values == [*EVENTS[:5], None, *EVENTS[6:]]
    assert ended == ""
