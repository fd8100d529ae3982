from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.judge.history import list_runs, report_of, worst_own
from assay.harness.judge.report import NOT_FINITE, LayersResult, TruthRow
from assay.reports.write import write_reports


def layers_of(*rows: TruthRow) -> LayersResult:
    return LayersResult(
        reference="triton", candidate="mine", phases=("extend",), layers=2, heads=2, passes=1, sources=(), grids=(), depth=(),
        not_observed=(), against_truth=rows,
    )  # fmt: skip


def test_the_worst_own_error_is_the_one_farthest_beyond_its_bound(examples: ModuleType) -> None:
    report = examples.regression()
    rows = (examples.truth_row(0, "extend", 0.001), examples.truth_row(1, "decode", 0.9))
    assert rows[1].bound is not None
    assert worst_own(report.model_copy(update={"layers": layers_of(*rows)})) == pytest.approx(0.9 / rows[1].bound)
    assert worst_own(report.model_copy(update={"layers": None})) is None
    broken = rows[0].model_copy(update={"own": NOT_FINITE})
    assert worst_own(report.model_copy(update={"layers": layers_of(*rows, broken)})) == NOT_FINITE


def test_a_damaged_report_is_listed_with_its_problem(tmp_path: Path, examples: ModuleType) -> None:
    write_reports(examples.passing(), tmp_path / "good")
    write_reports(examples.passing(), tmp_path / "bad")
    (tmp_path / "bisection").mkdir()
    (tmp_path / "bisection" / "report.json").write_text('{"schema": "assay.bisection/1"}')
    path = tmp_path / "bad" / "report.json"
    path.write_text(path.read_text().replace('"verdict": "pass"', '"verdict": "perfect"'))
    listed = list_runs(tmp_path)
    assert [(Path(one.folder).name, one.verdict) for one in listed.runs] == [("good", "pass"), ("bad", None)]
    assert "is damaged" in listed.runs[1].problem
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "report.json").write_text('{"schema": "assay.rep')
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped" / "report.json")
    listed = list_runs(tmp_path)
    assert [Path(one.folder).name for one in listed.runs] == ["good", "torn", "piped", "bad"]
    assert all(one.problem for one in listed.runs[1:])


def test_a_path_that_is_no_run(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(UsageError):
            report_of(path)
    with pytest.raises(UsageError):
        list_runs(tmp_path / "nowhere")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(EvidenceError, match="assay report"):
        report_of(tmp_path)
