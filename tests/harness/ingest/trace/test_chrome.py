"""Profiles as tracks and passes: three that PyTorch's profiler wrote on an H100, and events as MLC-LLM's recorder writes them."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from assay.harness.ingest.source_file import SourceFile
from assay.harness.ingest.trace import chrome
from assay.harness.ingest.trace.chrome import _phase_of
from assay.harness.ingest.trace.steps import StepTrace

READER = chrome.READER
TRACES = Path(__file__).parents[3] / "data" / "traces"


def events_of(name: str) -> list[dict[str, Any]]:
    data = (TRACES / name).read_bytes()
    found = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    return found if isinstance(found, list) else list(found["traceEvents"])


def written(tmp_path: Path, value: Any) -> StepTrace:
    path = tmp_path / "trace.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return READER.steps(SourceFile.of(path))


@pytest.mark.parametrize("name", ["flash", "math", "graph"])
def test_every_kernel_is_counted_by_the_pass_that_launched_it(name: str) -> None:
    file = f"h100_{name}.json.gz"
    loaded, events = READER.steps(SourceFile.of(TRACES / file)), events_of(file)
    assert loaded.file.lines == loaded.file.read == len(events)
    assert (loaded.writer, loaded.violations) == ("PyTorch's profiler", ())
    (device,) = loaded.tracks
    assert Counter(one.kind for one in device.segments) == {"extend": 1, "decode": 4, "other": 4}
    ran = Counter(event["name"] for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    assert Counter(step.name for one in device.segments for step in one.steps) == ran
    decodes = [one for one in device.segments if one.kind == "decode"]
    assert {one.label for one in decodes} == {"step[DECODE bs=2]"}
    assert len({one.steps for one in decodes}) == 1
    attention = [step for step in decodes[0].steps if "flash_fwd_kernel" in step.name or "softmax" in step.name]
    assert len(attention) == 4


def test_kernels_keep_the_number_of_their_event() -> None:
    events = events_of("h100_flash.json.gz")
    for track in READER.steps(SourceFile.of(TRACES / "h100_flash.json.gz")).tracks:
        for segment in track.segments:
            for step, place, time in zip(segment.steps, segment.places, segment.times, strict=True):
                assert (events[place - 1]["name"], events[place - 1]["ts"]) == (step.name, time)


def test_a_document_of_a_profile() -> None:
    document = READER.read(SourceFile.of(TRACES / "h100_flash.json.gz"))
    kernels = next(table for table in document.tables if table.id == "kernels")
    events = [one for one in events_of("h100_flash.json.gz") if "flash_fwd" in one["name"]]
    name, phase, count, ms, _ = kernels.rows[0]
    assert ("flash_fwd_kernel" in name, phase, count) == (True, "decode", "16")
    assert float(ms) == pytest.approx(sum(sorted(one["dur"] for one in events)) / 1e3, rel=0.5)
    assert {row[1] for row in kernels.rows} == {"decode", "extend", "other"}


def test_requests_of_mlc_llms_recorder() -> None:
    loaded = READER.steps(SourceFile.of(TRACES / "mlc_events.json"))
    assert loaded.writer == "MLC-LLM's event recorder"
    assert loaded.violations == ()
    assert [track.name for track in loaded.tracks] == [
        "request 1", "request 1, front end", "request 2", "request 2, front end",
    ]  # fmt: skip
    engine = loaded.tracks[0]
    assert [one.kind for one in engine.segments] == ["other", "extend", "decode", "decode"]
    assert [step.name for step in engine.segments[1].steps] == [
        "embedding", "prefill", "update logits", "apply logit bias", "apply penalty", "apply logit mask", "softmax", "sampling",
    ]  # fmt: skip


def test_a_request_that_is_decoded_before_it_is_prefilled(tmp_path: Path) -> None:
    events = [one for one in events_of("mlc_events.json") if not one["name"].startswith("prefill")]
    found = written(tmp_path, events)
    assert [one.rule for one in found.violations] == ["trace-decode-before-prefill"] * 2


def test_a_begin_without_an_end_in_a_profile_is_a_finding(tmp_path: Path) -> None:
    events = [one for one in events_of("mlc_events.json") if (one["name"], one["ph"]) != ("decode (1)", "E")]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    document = READER.read(SourceFile.of(path))
    assert [one.id for one in document.findings] == ["trace-begin-not-closed"] * 2
    number = next(n for n, one in enumerate(events, 1) if one["name"] == "decode (1)")
    assert document.findings[0].cites[0].first == number


def test_without_a_device_the_operators_of_threads_are_its_steps(tmp_path: Path) -> None:
    events = [one for one in events_of("h100_flash.json.gz") if one.get("cat") in ("cpu_op", "user_annotation")]
    tracks = written(tmp_path, events).tracks
    assert [track.kind for track in tracks] == ["thread"]
    assert Counter(one.kind for one in tracks[0].segments)["decode"] == 4


def test_a_cut_profile_says_so(tmp_path: Path) -> None:
    whole = gzip.decompress((TRACES / "h100_flash.json.gz").read_bytes()).decode()
    found = written(tmp_path, whole[: len(whole) // 2])
    assert [one.rule for one in found.violations] == ["trace-cut-off"]
    assert found.file.unread <= 1


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_profile_is_neither_a_crash_nor_a_wrong_count(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    events: list[Any] = events_of("mlc_events.json" if seed % 2 else "h100_flash.json.gz")
    for _ in range(20):
        at = rng.randrange(len(events))
        if isinstance(events[at], dict):
            key = rng.choice(["ph", "name", "ts", "dur", "pid", "tid", "cat", "args"])
            events[at] = {**events[at], key: rng.choice([None, -1, "x", [], {}, 10**400, "E", "b"])}
    rng.shuffle(events)
    found = written(tmp_path, events[: rng.randrange(1, len(events))] if seed % 3 else events)
    text = (tmp_path / "trace.json").read_text()
    assert found.file.lines == len(json.loads(text))
    assert found.file.read + found.file.unread == found.file.lines
    READER.read(SourceFile.of(tmp_path / "trace.json"))


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("step[EXTEND bs=1 toks=64]", "extend"), ("step[DECODE bs=2]", "decode"), ("step[VERIFY bs=2]", "decode"),
        ("step[DRAFT bs=2]", "other"), ("step[IDLE bs=0]", "idle"), ("step[MIXED bs=3 c=1]", "mixed"),
        ("prefill", "extend"), ("forward_decode", "decode"), ("forward", "other"),
    ],
)  # fmt: skip
def test_phases(name: str, phase: str) -> None:
    assert _phase_of(name) == phase


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('[{"name": "a", "ph": "X"}]', True), ('{"traceEvents": []}', True), ('{"results": [{"name": "a"}]}', False),
        ("[1, 2]", False), ("{", False), ("", False),
    ],
)  # fmt: skip
def test_what_is_recognised(tmp_path: Path, text: str, taken: bool) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    assert READER.recognises(SourceFile.of(path)) is taken
    path.write_bytes(gzip.compress(text.encode()))
    assert READER.recognises(SourceFile.of(path)) is (taken and "ph" in text)
