from __future__ import annotations

import re
from types import ModuleType

from assay.harness.judge.report import Report
from assay.reports.github import workflow_commands


def test_every_line_is_one_command(any_report: Report) -> None:
    lines = workflow_commands(any_report).splitlines()
    assert lines
    assert all(re.fullmatch(r"::(notice|warning|error) title=[^:,]*::.*", line) for line in lines)


def test_the_level_is_the_verdicts(examples: ModuleType) -> None:
    first = {
        name: workflow_commands(getattr(examples, name)()).split(" ")[0]
        for name in ("passing", "regression", "inconclusive", "error")
    }
    assert first == {
        "passing": "::notice",
        "regression": "::error",
        "inconclusive": "::warning",
        "error": "::warning",
    }


def test_a_finding_says_how_to_reproduce_it(examples: ModuleType) -> None:
    report = examples.regression()
    text = workflow_commands(report)
    assert "To reproduce: " in text
    assert text.count("::error") == 1 + len([f for f in report.findings if f.severity == "serious"])


def test_no_text_can_start_another_command(examples: ModuleType) -> None:
    report = examples.passing().model_copy(update={"headline": "a\n::error::b\r\n%0A::set-output name=x::y"})
    (line, *_) = workflow_commands(report).splitlines()
    assert "%250A" in line
    assert line.startswith("::notice title=assay%3A pass::")
    assert not [one for one in workflow_commands(report).splitlines() if one.startswith(("::set", "::error"))]


def test_a_diagnosis_ends_before_the_command_begins(examples: ModuleType) -> None:
    report = examples.regression()
    for ending in ("it is wrong", "it is wrong."):
        finding = report.findings[0].model_copy(update={"diagnosis": ending})
        text = workflow_commands(report.model_copy(update={"findings": (finding,)}))
        assert "::it is wrong. To reproduce: " in text
