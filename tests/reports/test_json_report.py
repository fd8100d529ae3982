from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
from pydantic import ValidationError

from assay.harness.errors import EvidenceError
from assay.harness.judge.report import Report
from assay.harness.schema import RULE
from assay.reports.json_report import SCHEMA_FILE, json_schema, load, schema_text, to_json


def test_committed_schema_is_the_generated_one() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), "run: python -m assay.reports.json_report"


def test_schema_is_a_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_round_trip(any_report: Report, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(to_json(any_report), encoding="utf-8")
    assert load(path) == any_report
    committed = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(committed).validate(json.loads(path.read_text(encoding="utf-8")))
    assert json.loads(path.read_text(encoding="utf-8"))["schema"] == "assay.report/2"


def test_hostile_text_survives_except_what_no_file_can_hold(examples: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(to_json(examples.hostile()), encoding="utf-8")
    text = load(path).findings[0].diagnosis
    assert text.replace("\ufffd", "?") == examples.HOSTILE.replace("\ud800", "?")


def test_lone_surrogates_are_replaced_everywhere(examples: ModuleType) -> None:
    report = examples.error()
    bad = "log line \udc80"
    finding = report.findings[0].model_copy(update={"evidence": (bad,)})
    environment = report.environment.model_copy(update={"packages": {bad: bad}})
    report = report.model_copy(update={"findings": (finding,), "environment": environment, "reasons": (bad,)})
    document = json.loads(to_json(report).encode("utf-8"))
    assert document["findings"][0]["evidence"] == ["log line \ufffd"]
    assert document["environment"]["packages"] == {"log line \ufffd": "log line \ufffd"}


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


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("not json", "cannot be read"),
        ("[]", "has the schema None"),
        ('{"schema": "assay.report/9"}', "assay.report/9"),
        ('{"schema": "assay.report/2"}', "damaged at verdict"),
        ('{"schema": "assay.report/1"}', "damaged at verdict"),
        ('{"schema": "assay.report/1", "checks": [{}]}', "damaged: KeyError"),
    ],
)
def test_load_says_what_is_wrong(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EvidenceError, match=says):
        load(path)


def test_a_report_must_name_its_schema_and_have_no_unknown_keys(examples: ModuleType) -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    document = json.loads(to_json(examples.regression()))
    validator.validate(document)
    assert not validator.is_valid({key: value for key, value in document.items() if key != "schema"})
    assert not validator.is_valid({**document, "surprise": 1})
    assert not validator.is_valid({**document, "schema": "assay.report/1"})
    assert not validator.is_valid({**document, "exit_code": "0"})


VERSION_1 = Path(__file__).parents[1] / "data" / "report-v1"


def test_a_report_of_version_1_is_read() -> None:
    path = VERSION_1 / "regression.json"
    old, report = json.loads(path.read_text(encoding="utf-8")), load(path)
    assert old["schema"] == "assay.report/1"
    assert (report.verdict, report.exit_code, report.reasons) == ("regression", 1, tuple(old["reasons"]))
    assert [check.title for check in report.checks] == [check["name"] for check in old["checks"]]
    assert [check.id for check in report.checks] == [
        "kernel-ran-extend", "decode-compiled", "same-servers", "all-answered", "cached-prefix", "layers-compared",
        "candidate-baseline", "workload-sensitive", "servers-timed", "required-mmlu",
    ]  # fmt: skip
    assert [(one.id, one.title) for one in report.findings] == [("mask-top-left", "causal mask top-left")]
    assert [suite.id for suite in report.suites] == [suite["name"] for suite in old["suites"]]
    metrics = [metric for suite in report.suites for metric in suite.metrics]
    assert [metric.id for metric in metrics] == ["loss-of-accuracy", "smallest-detectable-loss", "texts-apart"]
    row = report.suites[0].conditions[1]
    assert (row.id, row.by, row.title, row.bucket, row.lost) == (
        "cached-prefix-at-least-16", "cached-prefix", "cached prefix", ">= 16", None,
    )  # fmt: skip
    assert report.layers is not None
    assert report.layers.depth[0].total == old["layers"]["depth"][0]["total"]
    assert report.latency is not None
    assert report.latency.rows[0].high == old["latency"]["rows"][0]["high"]
    assert [check.id for check in report.latency.checks] == ["answer-lengths"]


def test_a_report_of_version_1_without_suites_is_read() -> None:
    report = load(VERSION_1 / "error.json")
    assert (report.verdict, report.exit_code, report.suites) == ("error", 3, ())


def test_a_report_that_was_upgraded_is_written_as_the_current_version(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(to_json(load(VERSION_1 / "regression.json")), encoding="utf-8")
    assert json.loads(path.read_text(encoding="utf-8"))["schema"] == "assay.report/2"


def test_the_schema_states_its_rule_of_compatibility() -> None:
    assert RULE in json_schema()["description"]
