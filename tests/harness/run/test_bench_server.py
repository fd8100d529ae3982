"""A short bench of two real CPU servers with the tiny model. The tests assert evidence, not times."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path

import pytest

from assay.harness import cli
from assay.harness.evidence.bench_folder import LENGTHS, TIMINGS, BenchFolder, Timing
from assay.harness.evidence.records import Answer
from assay.harness.judge.blocks import blocks_of
from assay.harness.judge.latency_result import LatencyResult
from assay.harness.judge.report import read_report
from assay.reports.wording.verdict import headline

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_a_reference_against_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--candidate", "torch_native", "--latency-shapes", "shared,chunked", "--latency-concurrency", "2"]
    # Of two servers that are one, none is ten times slower; a closer bound is for the benchmark.
    monkeypatch.setattr(
        sys, "argv", ["assay", "bench", *flags, "--latency-bound", "10", "--latency-seconds", "6", "--out", str(out)]
    )
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    result = LatencyResult.model_validate_json((out / "bench.json").read_text())
    assert exit_.value.code == result.exit_code
    assert result.verdict in ("pass", "inconclusive")
    assert all(check.status == "ok" for check in result.checks), result.checks
    assert len(result.rows) == 2 * 4
    for row in result.rows:
        assert row.ratio is not None
        assert row.reference_s > 0
        assert 0.1 < row.ratio < 10
    folder = BenchFolder(out)
    timings = folder.lines(TIMINGS, Timing)
    assert {timing.completion_tokens for timing in timings} == {16}, "forced, whatever the model would say"
    assert {timing.prompt_tokens for timing in timings} == {120, 320}
    assert all(timing.chunk_tokens[-1] == 16 and len(timing.chunk_s) > 1 for timing in timings)
    for block in blocks_of(timings):
        assert block.cached_tokens == (2 * 96 if block.load[0] == "shared" else 0)
        assert math.isfinite(block.itl_s)
        assert 0 < block.ttft_s < block.e2e_s <= block.seconds
    played = Counter((t.role, t.again) for t in timings)
    assert set(played) == {(role, again) for role in ("reference", "candidate") for again in (False, True)}
    assert len(set(played.values())) == 1, "either role was asked as often"
    lengths = {(one.role, one.item): one.completion_tokens for one in folder.lines(LENGTHS, Answer)}
    assert len(lengths) == 2 * 16
    assert result.lengths is not None
    assert not result.lengths.differ
    assert json.loads((out / "counters.json").read_text())["candidate"]
    assert {call.phase for call in result.candidate_calls} == {"extend", "decode"}
    assert headline(result) in (out / "bench.html").read_text()


def test_a_run_that_asks_for_latency_has_it_in_its_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ["--candidate", "torch_native", "--suites", "latency", "--latency-shapes", "short"]
    flags += ["--latency-concurrency", "2", "--latency-seconds", "4", "--latency-bound", "10", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["assay", "run", *flags])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    report = read_report(out / "report.json")
    assert exit_.value.code == report.exit_code == 3, "times alone prove no answers"
    (suite,) = report.suites
    assert suite.id == "latency"
    assert suite.verdict in ("pass", "inconclusive")
    assert report.latency is not None
    assert {(row.shape, row.concurrency) for row in report.latency.rows} == {("short", 2)}
    assert all(check.status == "ok" for check in report.latency.checks), report.latency.checks
    assert {call.phase for call in report.candidate.calls} == {"extend", "decode"}
    assert not [check for check in report.checks if check.id == "servers-timed" and check.status != "ok"]
    assert BenchFolder(out / "bench").complete
