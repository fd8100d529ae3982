"""A short bench of two real CPU servers with the tiny model. The tests assert evidence, not times."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path

import pytest

from assay.harness import cli
from assay.harness.evidence.bench_folder import TIMINGS, BenchFolder, Timing
from assay.harness.judge.blocks import blocks_of
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
    report = read_report(out / "report.json")
    result = report.latency
    assert exit_.value.code == report.exit_code
    assert [suite.id for suite in report.suites] == ["latency"]
    assert report.verdict in ("pass", "inconclusive")
    assert not [check for check in report.checks if check.status in ("failed", "missing")], report.checks
    assert result is not None
    assert all(check.status == "ok" for check in result.checks), result.checks
    assert len(result.rows) == 2 * 4
    for row in result.rows:
        assert row.ratio is not None
        assert row.reference_s > 0
        assert 0.1 < row.ratio < 10
    folder = BenchFolder(out / "bench")
    assert folder.complete
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
    assert folder.counters("candidate")
    assert (
        {call.phase for call in report.candidate.calls} == {call.phase for call in result.candidate_calls} == {"extend", "decode"}
    )
    assert headline(report) in (out / "report.html").read_text()
