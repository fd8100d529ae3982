from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from junitparser import JUnitXml

from assay.reports.json_report import to_json

DATA = Path(__file__).parents[2] / "data" / "results"


COMMAND = ("compare",)
"""What `call` begins with."""


def test_a_regression_exits_with_1_and_is_shown_and_written(
    call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("c.html", "c.xml")]
    flags = ["--html", files[0], "--junit", files[1]]
    assert call(DATA / "lm_eval_a", DATA / "lm_eval_b", *flags) == 1
    shown = capsys.readouterr().out
    assert "REGRESSION (exit code 1): B is worse than A" in shown
    assert "lost 7" in shown
    assert "not checked: the kernel under test computed the answers" in shown
    assert call(DATA / "lm_eval_a", DATA / "lm_eval_b", "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["verdict"], document["exit_code"]) == ("assay.compare/1", "regression", 1)
    assert "assay_synthetic" in files[0].read_text()
    (suite,) = JUnitXml.fromfile(str(files[1]))
    results = {case.name: [type(one).__name__ for one in case.result] for case in suite}
    assert results["verdict"] == ["Failure"]
    assert results["execution"] == ["Skipped"]
    assert results["all-paired"] == []


def test_wrong_use_exits_with_2_and_no_verdict_with_3(call: Callable[..., int]) -> None:
    assert call(DATA / "lm_eval_a", DATA / "junit_a.xml") == 2
    assert call(DATA / "lm_eval_a") == 2
    assert call(DATA / "lm_eval_a", DATA / "lm_eval_b", "--margin", "0.5") == 2
    assert call(DATA / "sgl_eval_a", DATA / "sgl_eval_b") == 3


def test_equal_tests_exit_with_0(call: Callable[..., int], tmp_path: Path) -> None:
    same = tmp_path / "same.xml"
    same.write_text((DATA / "junit_a.xml").read_text().replace('timestamp="2026-11-22', 'timestamp="2026-11-23'))
    assert call(DATA / "junit_a.xml", same) == 0


def test_runs_are_put_side_by_side(
    call: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], examples: ModuleType
) -> None:
    paths = []
    for name in ("passing", "regression", "error"):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(to_json(getattr(examples, name)()))
    flags = ["--html", tmp_path / "c.html", "--junit", tmp_path / "c.xml"]
    assert call(*paths, *flags) == 1, "as the worst of their own verdicts"
    shown = capsys.readouterr().out
    assert "verdict: A pass; B regression (worse); C error\n" in shown
    assert shown.splitlines()[-1].startswith("REGRESSION (exit code 1): B's own verdict is regression: ")
    page = (tmp_path / "c.html").read_text()
    assert 'class="worse">regression' in page
    (suite,) = JUnitXml.fromfile(str(tmp_path / "c.xml"))
    assert {case.name for case in suite} >= {"B", "C", "answers"}
    assert call(*paths[:2], "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "assay.compare-runs/1"
    assert [one["name"] for one in document["runs"]] == ["A", "B"]


def test_only_runs_are_compared_by_more_than_two(call: Callable[..., int]) -> None:
    assert call(DATA / "junit_a.xml", DATA / "junit_b.xml", DATA / "lm_eval_a") == 2
