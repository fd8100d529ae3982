from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
from pydantic import ValidationError

from assay.harness.errors import EvidenceError
from assay.harness.judge.judgement import WHOLE
from assay.harness.judge.report import Report, read_report
from assay.reports.json_report import _SCHEMA_FILE, _json_schema, _schema_text, to_json


def test_committed_schema_is_the_generated_one() -> None:
    assert _SCHEMA_FILE.read_text(encoding="utf-8") == _schema_text(), "run: python -m assay.reports.json_report"


def test_round_trip(any_report: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(to_json(any_report), encoding="utf-8")
    assert read_report(path) == any_report
    committed = json.loads(_SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(committed).validate(json.loads(path.read_text(encoding="utf-8")))
    assert json.loads(path.read_text(encoding="utf-8"))["schema"] == "assay.report/3"


def test_a_verdict_that_its_suites_and_checks_contradict_is_refused(examples: ModuleType, tmp_path: Path) -> None:
    """What an editor turned into a pass, or emptied of what did not pass."""
    path, good = tmp_path / "report.json", examples.passing()
    losing = examples.regression()
    for edited in (
        losing.model_copy(update={"verdict": "pass"}),
        good.model_copy(update={"verdict": "regression"}),
        good.model_copy(update={"suites": (), "left_out": WHOLE}),
    ):
        path.write_text(to_json(edited), encoding="utf-8")
        with pytest.raises(EvidenceError, match="contradicts its suites and checks"):
            read_report(path)


def test_a_pass_whose_failing_suite_was_cut_out_is_refused(examples: ModuleType, tmp_path: Path) -> None:
    path, losing = tmp_path / "report.json", examples.regression()
    for name in ("accuracy", "greedy"):
        good = examples.passing()
        cut = good.model_copy(update={"suites": tuple(suite for suite in good.suites if suite.id != name)})
        path.write_text(to_json(cut), encoding="utf-8")
        with pytest.raises(EvidenceError, match=f"no result of {name}, which the run was asked for"):
            read_report(path)
    assert losing.suites
    path.write_text(to_json(losing.model_copy(update={"suites": losing.suites[:1]})), encoding="utf-8")
    assert read_report(path).verdict == "regression", "what remains decides it"


def test_hostile_text_survives_except_what_no_file_can_hold(examples: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(to_json(examples.hostile()), encoding="utf-8")
    text = read_report(path).findings[0].diagnosis
    assert text.replace("\ufffd", "?") == examples.HOSTILE.replace("\ud800", "?")


def test_numbers_that_are_not_finite_become_null(examples: ModuleType) -> None:
    report = examples.passing()
    metric = report.suites[0].metrics[0].model_copy(update={"value": float("nan"), "high": float("inf")})
    suite = report.suites[0].model_copy(update={"metrics": (metric,)})
    document = json.loads(to_json(report.model_copy(update={"suites": (suite,)})))
    written = document["suites"][0]["metrics"][0]
    assert (written["value"], written["high"]) == (None, None)


def test_what_the_schema_does_not_allow_is_not_written(examples: ModuleType) -> None:
    with pytest.raises(ValidationError, match="perhaps"):
        to_json(examples.passing().model_copy(update={"verdict": "perhaps"}))


def test_a_report_must_name_its_schema_and_have_no_unknown_keys(examples: ModuleType) -> None:
    validator = jsonschema.Draft202012Validator(_json_schema())
    document = json.loads(to_json(examples.regression()))
    validator.validate(document)
    assert not validator.is_valid({key: value for key, value in document.items() if key != "schema"})
    assert not validator.is_valid({**document, "surprise": 1})
    assert not validator.is_valid({**document, "schema": "assay.report/1"})
    assert not validator.is_valid({**document, "exit_code": "0"})
