from __future__ import annotations

import json
from pathlib import Path

import pytest

from assay.harness.errors import EvidenceError
from assay.harness.judge.report_file import read_report
from assay.reports.json_report import to_json


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("not json", "cannot be read"),
        ("[]", "is no report"),
        ('{"schema": "assay.report/9"}', "assay.report/9"),
        ('{"schema": "assay.report/2"}', "damaged at verdict"),
        ('{"schema": "assay.report/1"}', "damaged at verdict"),
        ('{"schema": "assay.report/1", "checks": [{}]}', "damaged: KeyError"),
    ],
)
def test_the_reader_says_what_is_wrong(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EvidenceError, match=says):
        read_report(path)


VERSION_1 = Path(__file__).parents[2] / "data" / "report-v1"


def test_a_report_of_version_1_is_read() -> None:
    path = VERSION_1 / "regression.json"
    old, report = json.loads(path.read_text(encoding="utf-8")), read_report(path)
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
    report = read_report(VERSION_1 / "error.json")
    assert (report.verdict, report.exit_code, report.suites) == ("error", 3, ())


def test_a_report_that_was_upgraded_is_written_as_the_current_version(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(to_json(read_report(VERSION_1 / "regression.json")), encoding="utf-8")
    assert json.loads(path.read_text(encoding="utf-8"))["schema"] == "assay.report/2"
