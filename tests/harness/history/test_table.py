"""Rows of runs and cells: what is in them, that they last, and what a condition may ask."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import pytest

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.evidence.cell import CellRecord, write_cell
from assay.harness.evidence.storage import Storage, open_storage
from assay.harness.history.rows import COLUMNS, ClaimRow, line_of_rows, rows_of
from assay.harness.history.table import RunTable, has_cells
from assay.harness.judge.history import line_of, list_runs
from assay.harness.judge.report import LayersResult, Metric, Tally
from assay.reports.json_report import to_json
from assay.reports.write import write_reports

duckdb = pytest.importorskip("duckdb")


@pytest.fixture
def runs(tmp_path: Path, examples: ModuleType) -> Path:
    """A run of each verdict, and one without a report."""
    for number, name in enumerate(("passing", "regression", "inconclusive", "error")):
        report = getattr(examples, name)().model_copy(update={"created": f"2026-11-2{number}T10:00:00Z"})
        layers = layers_with(examples, 0.9 if name == "regression" else 0.001)
        write_reports(report.model_copy(update={"layers": layers}), tmp_path / "runs" / name)
    (tmp_path / "runs" / "killed").mkdir()
    for name in ("manifest.json", "items.jsonl"):
        (tmp_path / "runs" / "killed" / name).write_text("{}")
    return tmp_path / "runs"


def layers_with(examples: ModuleType, own: float | str) -> LayersResult:
    """A layer diff of one layer, with this own error."""
    row = examples.truth_row(0, "extend", 0.1).model_copy(update={"own": own})
    return LayersResult(
        reference="triton", candidate="mine", phases=("extend",), layers=2, heads=2, passes=1, sources="", grids=(), depth=(),
        worst=(), not_observed=(), against_truth=(row,),
    )  # fmt: skip


def cell(folder: Path, key: str, result: object = None, **changes: object) -> None:
    record = CellRecord(
        verdict="pass", key=key, command=("check", "mine:forward"), axes={"candidate": "mine:forward", "size": "full"},
        created="2026-11-25T10:00:00Z", environment={"commit": "c0ffee"},
    )  # fmt: skip
    folder = folder / "cells" / key
    folder.mkdir(parents=True)
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    write_cell(folder, record.model_copy(update=changes))


def test_the_columns_are_those_of_a_row() -> None:
    assert tuple(COLUMNS) == ClaimRow._fields


def test_rows_say_what_the_report_says(examples: ModuleType) -> None:
    for name in ("passing", "regression", "inconclusive", "error"):
        report = getattr(examples, name)()
        rows = rows_of("r", "runs/r", "", {"report.json": to_json(report).encode()})
        assert line_of_rows(rows, "runs/r") == line_of(report, "runs/r")
        for suite in report.suites:
            for metric in suite.metrics:
                (row,) = [row for row in rows if (row.claim, row.metric) == (suite.id, metric.id)]
                assert (row.value, row.bound, row.claim_verdict) == (metric.value, metric.bound, suite.verdict)
                if metric.low is not None:
                    assert (row.low, row.high) == (metric.low, metric.high)


def test_the_accuracies_have_intervals(examples: ModuleType) -> None:
    report = examples.passing()
    accuracy = Metric(id="candidate-accuracy", title="", value=0.5, text="")
    tally = Tally(role="candidate", right=50, wrong=50, unparsed=0, ran_to_limit=0, total=100)
    suite = report.suites[0].model_copy(update={"id": "accuracy", "metrics": (accuracy,), "tallies": (tally,)})
    rows = rows_of("r", "runs/r", "", {"report.json": to_json(report.model_copy(update={"suites": (suite,)})).encode()})
    (row,) = [row for row in rows if row.metric == "candidate-accuracy"]
    assert (row.low, row.high) == (pytest.approx(0.398, abs=1e-3), pytest.approx(0.602, abs=1e-3))


def test_what_is_not_finite_comes_back_as_such(runs: Path, examples: ModuleType) -> None:
    changes = {"layers": layers_with(examples, "not finite"), "headline": 'An Infinity, "quoted" and NaN'}
    write_reports(examples.regression().model_copy(update=changes), runs / "broken")
    history = RunTable(str(runs))
    ((value,),) = history.rows("run = 'broken' and metric = 'own-error'", ["value"])
    assert value == float("inf")
    (line,) = [line for line in history.runs().runs if line.folder.endswith("broken")]
    assert line.worst is not None
    assert (line.worst.error, line.headline) == ("not finite", 'An Infinity, "quoted" and NaN')


def test_a_folder_is_listed_as_without_rows(runs: Path) -> None:
    assert RunTable(str(runs)).runs().model_dump() == list_runs(runs).model_dump()


def test_rows_are_added_in_new_files_and_none_is_changed(runs: Path, examples: ModuleType) -> None:
    RunTable(str(runs))
    (first,) = (runs / "rows").iterdir()
    before = first.read_bytes()
    RunTable(str(runs))
    assert list((runs / "rows").iterdir()) == [first], "nothing is new"
    write_reports(examples.passing(), runs / "later")
    write_reports(examples.regression(), runs / "passing")  # as after assay report
    history = RunTable(str(runs))
    assert len(list((runs / "rows").iterdir())) == 2
    assert first.read_bytes() == before
    assert dict(history.rows("", ["run", "verdict"])) | {} == {
        "passing": "regression", "regression": "regression", "inconclusive": "inconclusive", "error": "error", "later": "pass",
    }  # fmt: skip
    verdicts = duckdb.read_parquet(str(runs / "rows" / "*.parquet")).filter("run = 'passing'").project("verdict").distinct()
    assert len(verdicts.fetchall()) == 2, "anything that reads Parquet reads the rows"


def test_rows_outlive_the_evidence(runs: Path) -> None:
    RunTable(str(runs))
    for file in (runs / "regression").iterdir():
        file.unlink()
    (runs / "regression").rmdir()
    assert [Path(run.folder).name for run in RunTable(str(runs)).runs("verdict = 'regression'").runs] == ["regression"]


def test_cells_of_sweeps_are_runs_too(tmp_path: Path, examples: ModuleType) -> None:
    checked = {"schema": "assay.check/1", "kernel": "mine:forward", "worst_own": 0.02, "worst_bound": 0.01, "findings": [
        {"title": "An aside", "severity": "info"}, {"title": "Off by one", "severity": "serious"}]}  # fmt: skip
    cell(tmp_path / "nightly", "a1", checked, verdict="regression", headline="wrong")
    cell(tmp_path / "nightly", "b2", json.loads(to_json(examples.passing())))
    cell(tmp_path / "nightly", "c3", verdict="error", problem="The worker was lost.")
    for place, before in ((tmp_path, "nightly/"), (tmp_path / "nightly", "")):
        listed = {run.folder: run for run in RunTable(str(place)).runs().runs}
        wrong, run, lost = (listed[f"{place}/{before}cells/{key}"] for key in ("a1", "b2", "c3"))
        assert (wrong.verdict, wrong.candidate, wrong.cause, wrong.seconds) == ("regression", "mine:forward", "Off by one", 0.0)
        assert wrong.worst is not None
        assert wrong.worst.multiple == pytest.approx(2)
        assert wrong.treatment == {"backend": ("", "mine:forward"), "command": ("", "check"), "size": ("", "full")}
        assert (run.verdict, run.model) == ("pass", examples.passing().environment.model)
        assert (lost.verdict, lost.headline) == ("error", "The worker was lost.")
        assert has_cells(place)
    assert RunTable(str(tmp_path)).rows("commit = 'c0ffee'", ["run"])
    assert not has_cells(tmp_path / "nightly" / "cells")


def test_damage_of_one_hides_nothing(runs: Path) -> None:
    cell(runs / "sweep", "a1", verdict="regression")
    (runs / "sweep" / "cells" / "a1" / "cell.json").write_text('{"schema": ')
    (runs / "passing" / "report.json").write_text('{"schema": "assay.report/2"}')
    listed = RunTable(str(runs)).runs().runs
    problems = {Path(run.folder).name: run.problem for run in listed if run.verdict is None}
    assert problems.keys() == {"a1", "passing", "killed"}
    assert "damaged" in problems["a1"]
    assert "is damaged" in problems["passing"]
    assert sum(run.verdict is not None for run in listed) == 3


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_storage_is_read_once(request: pytest.FixtureRequest, runs: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = f"{request.getfixturevalue('object_store') if kind == 's3' else 'memory:/'}/{uuid4()}"
    storage = open_storage(place)
    for name in ("passing", "regression"):
        storage.put_folder(runs / name, f"nightly/{name}")
    history = RunTable(place)
    assert [(run.folder, run.verdict) for run in history.runs("verdict = 'regression'").runs] == [
        (f"{place}/nightly/regression", "regression")
    ]
    storage.put_folder(runs / "error", "nightly/error")
    read: list[str] = []
    read_files = type(storage).read_files

    def noted(self: Storage, names: list[str], wanted: list[str]) -> dict[str, dict[str, bytes]]:
        read.extend(names)
        return read_files(self, names, wanted)

    monkeypatch.setattr(type(storage), "read_files", noted)
    assert len(RunTable(place).runs().runs) == 3
    assert read == ["nightly/error"], "what has rows is not read again"


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("verdict = 'regression'", {"regression"}),
        ("claim = 'accuracy' and claim_verdict = 'pass' and verdict = 'pass'", {"passing"}),
        ("metric = 'own-error' and value > bound", {"regression"}),
        ("created >= '2026-11-22' or verdict in ('pass')", {"passing", "inconclusive", "error"}),
        ("model = 'nothing'", set()),
    ],
)
def test_a_condition_chooses_runs(runs: Path, where: str, found: set[str]) -> None:
    assert {Path(run.folder).name for run in RunTable(str(runs)).runs(where).runs} == found


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("modle = 'x'", "did you mean 'model'"),
        ("verdict = ", "syntax error"),
        ("1 = 1) ; DROP TABLE runs; --", "syntax error"),
        ("1 = 1; DROP TABLE runs", "--where"),
        ("(SELECT count(*) FROM runs) > 0", "a query of its own"),
        ("verdict IN (SELECT verdict FROM information_schema.tables)", "a query of its own"),
        ("(SELECT count(*) FROM read_text('/etc/passwd')) > 0", "disabled by configuration"),
        ("verdict = pass", 'column "pass"'),
        ("duckdb", "--where"),
    ],
)
def test_a_condition_asks_of_the_rows_alone(runs: Path, where: str, says: str) -> None:
    history = RunTable(str(runs))
    with pytest.raises(UsageError) as refused:
        history.runs(where)
    assert says in str(refused.value)
    assert "verdict, headline" in refused.value.expected or "one condition" in refused.value.expected
    assert len(history.runs().runs) == 5


def test_damaged_rows_are_named(runs: Path) -> None:
    RunTable(str(runs))
    (file,) = (runs / "rows").iterdir()
    file.write_bytes(b"PAR1 no more")
    with pytest.raises(EvidenceError, match="made again"):
        RunTable(str(runs))


def test_a_place_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="There is no folder"):
        RunTable(str(tmp_path / "nowhere"))
