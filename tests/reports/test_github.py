from __future__ import annotations

import re
from types import ModuleType

from assay.harness.judge.report import Report
from assay.harness.statement import state
from assay.harness.verdict import Requirement
from assay.reports.github import workflow_commands
from assay.reports.run_report import run_document


def annotations(report: Report) -> str:
    return workflow_commands(run_document(report))


def test_every_line_is_one_command(any_report: Report) -> None:
    lines = annotations(any_report).splitlines()
    assert lines
    assert all(re.fullmatch(r"::(notice|warning|error) title=[^:,]*::.*", line) for line in lines)


def test_the_level_is_the_verdicts(examples: ModuleType) -> None:
    first = {
        name: annotations(getattr(examples, name)()).split(" ")[0] for name in ("passing", "regression", "inconclusive", "error")
    }
    assert first == {"passing": "::notice", "regression": "::error", "inconclusive": "::warning", "error": "::warning"}


def test_a_finding_says_how_to_reproduce_it(examples: ModuleType) -> None:
    report = examples.regression()
    text = annotations(report)
    assert "To reproduce: " in text
    assert text.count("::error") == 1 + len([f for f in report.findings if f.severity == "serious"])


def test_no_text_can_start_another_command(examples: ModuleType) -> None:
    candidate = examples.passing().candidate.model_copy(update={"backend": "a\n::error::b\r\n%0A::set-output name=x::y"})
    report = examples.passing().model_copy(update={"candidate": candidate, "treatment": {}})
    (line, *_) = annotations(report).splitlines()
    assert "%250A" in line
    assert line.startswith("::notice title=assay%3A pass::")
    assert not [one for one in annotations(report).splitlines() if one.startswith(("::set", "::error"))]


def test_findings_and_checks_are_titled_by_their_ids(examples: ModuleType) -> None:
    report = examples.regression()
    unmet = Requirement("kernel-ran").check("missing", state("no-counts"))
    wordy = report.findings[0].model_copy(update={"id": "mask-top-left", "where": "layer 3, " * 100})
    report = report.model_copy(update={"findings": (*report.findings, wordy), "checks": (unmet,)})
    titles = re.findall(r"title=(.*?)::", annotations(report))
    assert titles[1:-2] == [f"assay {f.id}: {f.where}".replace(":", "%3A").replace(",", "%2C") for f in report.findings[:-1]]
    assert titles[-2].startswith("assay mask-top-left%3A layer 3%2C")
    assert all(len(title.replace("%3A", ":").replace("%2C", ",")) <= 255 for title in titles)  # GitHub's limit
    assert titles[-1] == "assay kernel-ran%3A it is not shown that the candidate's own kernel ran in every phase that it claims"
