from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.errors import UsageError
from assay.harness.ingest.results.compare_results import PassLimits
from assay.harness.ingest.results.comparison import RunRow, RunsComparison
from assay.harness.ingest.results.side_by_side import compare_runs
from assay.harness.judge.report import DepthRow, ErrorGrid, LayersResult, Report
from assay.reports.compare import runs_compared_document
from assay.reports.json_report import to_json
from assay.reports.page import to_html


def with_layers(report: Report, own: float, head: float) -> Report:
    depth = (DepthRow(layer=0, own=own, bound=0.01, out_of_bounds=own > 0.01),)
    grid = ErrorGrid(
        title="layer × head", where="extend, cached prefix", columns="head", row_labels=("0",), column_labels=("0", "1"),
        values=((0.001, head),), bounds=(0.01,),
    )  # fmt: skip
    layers = LayersResult(
        reference="triton", candidate="mine", phases=("extend",), layers=1, heads=2, passes=1, sources="", grids=(grid,),
        depth=depth, worst=(), not_observed=(),
    )  # fmt: skip
    return report.model_copy(update={"layers": layers})


@pytest.fixture
def compared(tmp_path: Path, examples: ModuleType) -> RunsComparison:
    """Three runs that differ in the own error: within noise, and far out of bounds."""
    paths = []
    for name, own, head in (("a", 0.005, 0.002), ("b", 0.0052, 0.002), ("c", 1.4, 1.4)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(to_json(with_layers(examples.passing(), own, head)))
    return compare_runs(paths, PassLimits())


def row(compared: RunsComparison, id_: str) -> RunRow:
    return next(one for one in compared.rows if one.id == id_)


def test_an_own_error_is_worse_only_beyond_noise(compared: RunsComparison) -> None:
    layer = row(compared, "own-error-0")
    assert [cell.worse for cell in layer.cells] == [None, None, True]
    assert [cell.text for cell in layer.cells] == ["0.5 % (0.5x its bound)", "0.52 % (0.52x its bound)", "140 % (140x its bound)"]
    assert layer.differs
    heads = row(compared, "heads-extend, cached prefix")
    assert [cell.text for cell in heads.cells] == ["0 of 2", "0 of 2", "1 of 2, worst layer 0, head 1"]
    assert [cell.worse for cell in heads.cells] == [None, None, True]


def test_what_is_equal_is_kept_apart(compared: RunsComparison) -> None:
    assert not row(compared, "verdict").differs
    assert not row(compared, "environment-python").differs
    assert {one.group for one in compared.changed} == {"own error"}


def test_the_heat_maps_of_all_runs_are_beside_each_other(compared: RunsComparison) -> None:
    (maps,) = compared.maps
    assert [grid is not None for grid in maps.grids] == [True, True, True]
    page = to_html(runs_compared_document(compared))
    assert all(f"{name}: layer × head" in page for name in "ABC")


def test_reports_without_answers_give_no_verdict(compared: RunsComparison) -> None:
    assert compared.verdict == "inconclusive"
    assert [one.compared for one in compared.runs] == [None, "inconclusive", "inconclusive"]
    assert compared.runs[2].sentence.startswith("C: No verdict: ")


def test_a_run_is_named_once(tmp_path: Path, examples: ModuleType) -> None:
    path = tmp_path / "a.json"
    path.write_text(to_json(examples.passing()))
    with pytest.raises(UsageError, match="twice"):
        compare_runs([path, path], PassLimits())
    with pytest.raises(UsageError, match="2 to 26"):
        compare_runs([path], PassLimits())


def test_a_comparison_is_no_better_than_the_runs_own_verdict_and_an_error_is_not_better(
    tmp_path: Path, examples: ModuleType
) -> None:
    paths = [tmp_path / f"{name}.json" for name in "abc"]
    failed = examples.regression().model_copy(update={"verdict": "error"})
    for path, report in zip(paths, (examples.regression(), failed, examples.regression()), strict=True):
        path.write_text(to_json(report))
    compared = compare_runs(paths, PassLimits())
    assert [one.compared for one in compared.runs] == [None, "error", "regression"]
    assert compared.runs[2].sentence.startswith("C's own verdict is regression: ")
    assert compared.exit_code == 1
    assert [cell.worse for cell in row(compared, "verdict").cells] == [None, None, None]
