"""Damaged copies of a log: no crash, no line lost, no wrong count."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from assay.harness.ingest import sglang_log
from assay.harness.ingest.recognise import ingest
from assay.harness.ingest.sglang_facts import Log
from assay.harness.ingest.sglang_reader import read_log
from assay.harness.ingest.source_file import SourceFile

PREFILL = re.compile(r"Prefill batch, #new-seq: \d+, #new-token: (\d+), #cached-token: (\d+),")


def truth(lines: list[str]) -> tuple[int, int, int, int]:
    """Prefill batches, their new tokens, metrics and decode batches, by a plain search."""
    batches = [match for line in lines if (match := PREFILL.search(line))]
    metrics = sum(line.startswith("[METRIC] ") for line in lines)
    return len(batches), sum(int(one[1]) for one in batches), metrics, sum("Decode batch, #" in line for line in lines)


def counted(log: Log) -> tuple[int, int, int, int]:
    prefills, decodes = (sum(getattr(each, kind).count for each in log.servers) for kind in ("prefills", "decodes"))
    metrics = sum(each.at.text.startswith("[METRIC] ") for each in log.metrics)
    return prefills, sum(each.new_tokens for each in log.servers), metrics, decodes


def copy(tmp_path: Path, data: bytes) -> SourceFile:
    path = tmp_path / "copy.log"
    path.write_bytes(data)
    return SourceFile.of(path)


def test_cut_off_at_any_byte(seed_log: Path, tmp_path: Path) -> None:
    data = seed_log.read_bytes()
    draw = random.Random(0)
    for cut in [*range(0, 3000, 97), *(draw.randrange(len(data)) for _ in range(60))]:
        source = copy(tmp_path, data[:cut])
        whole = data[:cut].rpartition(b"\n")[0].decode().split("\n")
        last = data[len("\n".join(whole).encode()) :].split(b"\n")[1].decode()
        log = read_log(source.lines())
        least, most = truth(whole), truth([*whole, last])
        assert all(low <= found <= high for low, found, high in zip(least, counted(log), most, strict=True))
        assert log.read + sum(one.count for one in log.unread) == log.lines
        ingest([source.path])


def test_interleaved_with_another_log(seed_log: Path, server_log: Path, tmp_path: Path) -> None:
    for seed in range(5):
        draw = random.Random(seed)
        sides = [one.read_text().split("\n")[::-1] for one in (seed_log, server_log)]
        mixed = []
        while any(sides):
            mixed.append(draw.choice([one for one in sides if one]).pop())
        log = read_log(copy(tmp_path, "\n".join(mixed).encode()).lines())
        assert counted(log) == truth(mixed)
        assert log.outcomes == {"passed": 3, "failed": 1}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "crlf"])
def test_line_ends_and_encodings_change_nothing(encoding: str, seed_log: Path, tmp_path: Path) -> None:
    text = seed_log.read_text()
    data = text.replace("\n", "\r\n").encode() if encoding == "crlf" else text.encode(encoding)
    source = copy(tmp_path, data)
    assert sglang_log.READER.recognises(source)
    found, expected = sglang_log.READER.read(source), sglang_log.READER.read(SourceFile.of(seed_log))
    assert (found.facts, found.tables, found.findings) == (expected.facts, expected.tables, expected.findings)
    assert found.file.unread == 0


def test_bytes_that_do_not_belong_there_make_no_count_wrong(seed_log: Path, tmp_path: Path) -> None:
    rows, draw = seed_log.read_bytes().split(b"\n"), random.Random(1)
    hit = set(draw.sample(range(len(rows)), 60))
    kept = [row.decode() for index, row in enumerate(rows) if index not in hit]
    for index in hit:
        at = draw.randint(0, len(rows[index]))
        rows[index] = rows[index][:at] + draw.choice([b"\0", b"\xe9", b"\xff\xfe"]) + rows[index][at:]
    source = copy(tmp_path, b"\n".join(rows))
    log = read_log(source.lines())
    bounds = zip(truth(kept), counted(log), truth(seed_log.read_text().split("\n")), strict=True)
    assert all(low <= found <= high for low, found, high in bounds)
    assert log.read < log.lines
    assert "lines are not UTF-8" in " ".join(ingest([source.path]).documents[0].file.notes)


@pytest.mark.parametrize("start", ["", "[2026-01-24 18:15:48] ", "[METRIC] a=1", "==== ", "FAILED ", "Prefill batch, #new-seq: 1"])
@pytest.mark.parametrize("part", ["1%|", "a: ", "_ ", "= ", "9", "'a': 1, ", "#x: 1, ", "a.py::b ", "1 passed, ", "{[("])
def test_a_long_line_takes_time_in_proportion_to_its_length(start: str, part: str) -> None:
    """A quadratic expression takes a second for such a line, a linear one a millisecond."""
    line = start + part * (30_000 // len(part)) + "!"
    began = time.process_time()
    log = read_log([(1, line), (2, f"  {line}")])
    assert time.process_time() - began < 0.5
    assert log.lines == 2
