"""The latency suite of a run, from synthetic evidence on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from assay.harness.evidence.bench_folder import TIMINGS, bench_folder
from assay.harness.evidence.folder import RunFolder
from assay.harness.judge.build import build
from assay.harness.judge.latency_result import LatencyRow, worst_ratio
from assay.harness.judge.report import Report
from assay.harness.statement import state

BOUND = "latency_bound = 1.1 (default)"

MakeRun = Callable[..., Report]


@pytest.fixture
def run(recorded_runs: ModuleType, tmp_path: Path) -> Callable[..., RunFolder]:
    """A function that writes a complete run; its arguments are those of `recorded_runs.timed`."""
    return partial(recorded_runs.timed, tmp_path / "run")


@pytest.fixture
def report(run: Callable[..., RunFolder]) -> MakeRun:
    """A function that makes the report of a complete run; `bench` says what is wrong in its times."""
    return lambda **made: build(run(**made))


def suite_of(report: Report) -> Any:
    (found,) = [suite for suite in report.suites if suite.id == "latency"]
    return found


def worst_of(report: Report) -> LatencyRow:
    assert report.latency is not None
    worst = worst_ratio(report.latency)
    assert worst is not None
    return worst


def test_a_candidate_as_fast_as_the_reference_passes(report: MakeRun) -> None:
    made = report()
    assert (made.verdict, made.exit_code) == ("pass", 0)
    suite = suite_of(made)
    assert suite.verdict == "pass"
    assert [each.id for each in suite.why] == ["of-time", "policy"]
    assert suite.why[-1].values == {"lines": [BOUND]}
    worst = suite.metrics[0]
    assert (worst.bound, worst.policy) == (1.1, BOUND)
    assert made.latency is not None
    assert worst.high == max(row.high or 0 for row in made.latency.rows)
    assert made.latency.note is None


def test_a_slower_candidate_alone_makes_the_run_a_regression(report: MakeRun) -> None:
    made = report(bench={"slow": {"shared": 1.5}})
    assert (made.verdict, made.exit_code) == ("regression", 1)
    assert [suite.verdict for suite in made.suites] == ["pass", "regression"]
    ratio, policy = suite_of(made).why
    assert (ratio.values["load"], policy.values) == (worst_of(made).where, {"lines": [BOUND]})
    assert ratio.values["load"].startswith("shared, ")
    assert ratio.values["why"].values["reason"] == "above"
    assert {finding.id for finding in made.findings} == {"latency"}
    assert suite_of(made).metrics[0].low > 1.1


def test_wrong_answers_are_no_speed_up(report: MakeRun) -> None:
    made = report(broken=True, bench={"slow": {"short": 0.5, "shared": 0.5, "chunked": 0.5}})
    assert (made.verdict, made.exit_code) == ("regression", 1)
    questions, suite = made.suites
    assert (questions.id, suite.id, suite.verdict) == ("accuracy", "latency", "inconclusive")
    assert made.latency is not None
    assert made.latency.verdict == "inconclusive"
    note = state("no-gain", faster=True, wrong=[("accuracy", questions.asked)])
    assert suite.why[0] == suite.metrics[0].values["note"] == made.latency.note == note


@pytest.mark.parametrize(
    ("broken", "bench", "verdict", "of_suite", "why"),
    [
        (True, {"slow": {"shared": 1.5}}, "regression", "regression", ["of-time", "policy"]),
        (False, {"interpreted": True}, "inconclusive", "inconclusive", ["overruled", "of-time", "policy"]),
        (True, {"interpreted": True}, "regression", "inconclusive", ["overruled", "of-time", "policy"]),
    ],
)
def test_what_is_wrong_beside_the_times_neither_hides_nor_excuses_them(
    report: MakeRun, broken: bool, bench: dict[str, Any], verdict: str, of_suite: str, why: list[str]
) -> None:
    made = report(broken=broken, bench=bench)
    assert (made.verdict, suite_of(made).verdict) == (verdict, of_suite)
    suite = suite_of(made)
    assert [each.id for each in suite.why] == why
    if "overruled" in why:
        assert suite.why[0].values["requirement"] == "device-kernels"
        assert suite.why[0].values["outcome"] == state("interpreted", kernels=["torch_native"])


@pytest.mark.parametrize("how", ["never began", "was cut off", "is damaged", "is of another run"])
def test_what_was_asked_for_and_not_timed_is_no_pass(run: Callable[..., RunFolder], synthetic_bench: ModuleType, how: str) -> None:
    folder = run(require="latency", benched=False)
    if how != "never began":
        bench = synthetic_bench.write_bench(bench_folder(folder).path, nonce="" if how == "is of another run" else folder.nonce)
        (bench.path / ("end.json" if how == "was cut off" else TIMINGS)).unlink()
    made = build(folder)
    assert made.verdict == "inconclusive"
    assert made.latency is None
    missing = {check.id for check in made.checks if check.status == "missing"}
    assert missing == {"servers-timed", "required-latency"}


def test_a_run_of_latency_alone_names_the_servers_that_were_timed(report: MakeRun) -> None:
    made = report(suites="latency", bench={"slow": {"short": 2.0}})
    assert (made.verdict, made.exit_code) == ("regression", 1)
    assert made.candidate.engine == "SGLang 0 on cpu"
    assert {call.phase for call in made.candidate.calls} == {"extend", "decode"}
