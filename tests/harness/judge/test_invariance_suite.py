"""What features of the candidate do to the verdict of a run, from synthetic evidence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.invariance import ArmRecord, InvarianceFolder, invariance_folder
from assay.harness.judge.build import build
from assay.harness.judge.report import Report
from assay.harness.verdict import Check

Judge = Callable[..., Report]


@pytest.fixture
def judged(recorded_runs: ModuleType, arm_records: ModuleType, tmp_path: Path) -> Judge:
    """Judges a sound run whose policy names two features, and which compared these arms; none if it compared nothing."""

    def judge(*arms: ArmRecord, **made: Any) -> Report:
        folder = recorded_runs.answered(tmp_path / "run", invariance="prefix-cache,page-size")
        if arms:
            compared = InvarianceFolder.new(invariance_folder(folder).path, folder.nonce)
            arm_records.write(compared, arms, **made)
        return build(folder)

    return judge


def switched(report: Report) -> Check:
    return next(check for check in report.checks if check.id == "features-switched")


@pytest.fixture
def honest(arm_records: ModuleType) -> list[ArmRecord]:
    return [arm_records.arm("prefix-cache"), arm_records.arm("page-size", number=3)]


def test_features_that_change_nothing_pass(judged: Judge, honest: list[ArmRecord]) -> None:
    report = judged(*honest)
    assert (report.verdict, report.exit_code) == ("pass", 0), report.checks
    suite = next(suite for suite in report.suites if suite.id == "invariance")
    assert suite.verdict == "pass"
    assert report.invariance is not None
    assert suite.why[0] == report.invariance.decided
    assert suite.why[1].values["lines"][0].startswith("invariance = ('prefix-cache', 'page-size')")
    assert suite.metrics[0].value is not None
    assert len(report.invariance.arms) == 4
    assert switched(report).status == "ok"


def test_a_feature_that_changes_the_output_forbids_a_merge(judged: Judge, honest: list[ArmRecord], arm_records: ModuleType) -> None:
    report = judged(honest[0], arm_records.arm("page-size", number=3, decode=0.5))
    assert (report.verdict, report.exit_code) == ("regression", 1)
    (finding,) = report.findings
    assert finding.title == "page-size changes the output"


def test_a_gate_that_did_not_switch_them_does_not_pass(judged: Judge) -> None:
    report = judged()
    assert (report.verdict, report.exit_code) == ("inconclusive", 3)
    assert switched(report).status == "missing"
    assert report.invariance is None


def test_a_comparison_that_did_not_end_is_no_pass(judged: Judge, honest: list[ArmRecord]) -> None:
    report = judged(*honest, ended=False)
    assert (report.verdict, switched(report).status) == ("inconclusive", "missing")


def test_a_feature_that_no_arm_had_is_no_pass(judged: Judge, honest: list[ArmRecord]) -> None:
    report = judged(honest[0])
    assert report.verdict == "inconclusive"
    assert switched(report).outcome.values["features"] == ["page-size"]


def test_evidence_of_another_run_is_no_pass(judged: Judge, honest: list[ArmRecord], tmp_path: Path) -> None:
    judged(*honest)
    for file in (tmp_path / "run" / "invariance").rglob("*.json"):
        file.write_text(file.read_text().replace('"run":"', '"run":"other').replace('"run": "', '"run": "other'))
    report = build(RunFolder(tmp_path / "run"))
    assert switched(report).status == "missing"
    assert "other" in switched(report).outcome.values["said"]


def test_without_a_line_of_policy_nothing_is_asked_for(recorded_runs: ModuleType, tmp_path: Path) -> None:
    report = build(recorded_runs.answered(tmp_path / "run"))
    assert report.verdict == "pass"
    assert "features-switched" not in {check.id for check in report.checks}
