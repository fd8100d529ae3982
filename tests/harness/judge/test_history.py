from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.judge.history import RunLine, _line_of, check_repeated, list_runs, report_of, worst_own
from assay.harness.judge.report import NOT_FINITE, LayersResult, TruthRow
from assay.harness.statement import state
from assay.reports.write import write_reports

LAST = "2026-11-29T10:00:00Z"


def layers_of(*rows: TruthRow) -> LayersResult:
    return LayersResult(
        reference="triton", candidate="mine", phases=("extend",), layers=2, heads=2, passes=1, sources=(), grids=(), depth=(),
        worst=(), not_observed=(), against_truth=rows,
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


def test_a_run_names_the_earlier_ones_of_its_treatment(tmp_path: Path, examples: ModuleType) -> None:
    first = RunLine(folder="")
    for day, report in enumerate((examples.regression(), examples.regression(), examples.passing()), 1):
        report = report.model_copy(update={"created": f"2026-11-2{day}T10:00:00Z"})
        write_reports(report, tmp_path / f"run-{day}")
        if day == 1:
            first = _line_of(report, "")
    (found,) = check_repeated(tmp_path / "run-9", LAST, first.compared)
    seen = state("ran-before", runs=2, verdicts=[("regression", 2)], last="run-2")
    assert (found.status, found.outcome) == ("not checked", seen)
    assert check_repeated(tmp_path / "run-1", first.created, first.compared) == []
    assert check_repeated(tmp_path / "run-9", LAST, ("other", *first.compared[1:])) == []


def test_earlier_passes_alone_are_no_doubt(tmp_path: Path, examples: ModuleType) -> None:
    report = examples.passing().model_copy(update={"created": "2026-11-20T10:00:00Z"})
    write_reports(report, tmp_path / "old")
    (found,) = check_repeated(tmp_path / "new", LAST, _line_of(report, "").compared)
    assert (found.status, found.outcome) == ("ok", state("ran-before", runs=1, verdicts=[("pass", 1)], last="old"))
