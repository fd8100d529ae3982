"""A server that failed: each output names the cause on its first line, once, and shows the log where it does not hide the cause."""

from __future__ import annotations

import html
import re
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
from junitparser import JUnitXml
from rich.console import Console

from assay.harness.engines.failures import ended, read
from assay.harness.engines.process import telling_lines
from assay.harness.evidence.manifest import Failure
from assay.harness.judge.decide import decide
from assay.harness.judge.report import FailureResult, Report
from assay.reports.github import workflow_commands
from assay.reports.junit import to_junit
from assay.reports.markdown import to_markdown
from assay.reports.run_page import to_html
from assay.reports.run_terminal import render

LOGS = sorted((Path(__file__).parents[1] / "data" / "server_failures").glob("*.log"))
WHO = "the candidate server (mine:forward)"


def failed(examples: ModuleType, log: Path) -> Report:
    """The report of a run whose candidate's server left this log."""
    text = log.read_text()
    tail = "Its log (runs/x/candidate.log) ends:\n" + "\n".join(f"  {line}" for line in telling_lines(text))
    failure = Failure.of("engine", ended(WHO, "was killed by SIGKILL", "during start-up", text, tail))
    judged = decide("mine:forward", [], [], failure)
    shown = FailureResult(**failure.model_dump(exclude={"message"}))
    report: Report = examples.inconclusive()
    changes = {"headline": judged.headline, "reasons": judged.reasons, "verdict": "error", "failure": shown}
    return report.model_copy(update={**changes, "checks": (), "findings": ()})


def printed(report: Report) -> str:
    shown = StringIO()
    render(report, Console(file=shown, width=80))
    return shown.getvalue()


def plain(text: str) -> str:
    """Text without Markdown's escapes, HTML's entities and GitHub's."""
    unescaped = html.unescape(re.sub(r"<!-- -->|\\", "", text)).replace("%25", "%")
    return " ".join(unescaped.split())


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_each_output_names_the_cause_on_its_first_line(examples: ModuleType, log: Path) -> None:
    report, cause = failed(examples, log), plain(read(log.read_text()).line[:200])
    first = {
        "terminal": printed(report).strip().split("\n")[1],
        "html": re.search(r'<p class="headline">(.*?)</p>', to_html(report), re.DOTALL)[1],  # type: ignore[index]
        "markdown": to_markdown(report).split("\n")[2],
        "junit": next(iter(next(iter(JUnitXml.fromstring(to_junit(report).encode()))))).result[0].message,
        "annotation": workflow_commands(report).split("\n")[0],
    }
    assert [name for name, text in first.items() if cause not in plain(text) or WHO not in plain(text)] == []


@pytest.mark.parametrize("log", LOGS[:3], ids=lambda path: path.stem)
def test_one_cause_is_one_error_with_one_remedy(examples: ModuleType, log: Path) -> None:
    report = failed(examples, log)
    cases = [case for suite in JUnitXml.fromstring(to_junit(report).encode()) for case in suite]
    assert [type(one).__name__ for case in cases for one in case.result].count("Error") == 1
    assert len(workflow_commands(report).splitlines()) == 1
    shown = printed(report)
    assert shown.count("What to do: ") == 1
    assert "Checks that are not ok" not in shown
    assert "--enable-cache-report" not in shown


def test_the_log_is_a_block_and_the_doctor_is_near(examples: ModuleType) -> None:
    report = failed(examples, next(log for log in LOGS if log.stem == "jit_ninja"))
    for text in (printed(report), plain(to_markdown(report)), plain(to_html(report))):
        assert "SGLang ended its own processes during start-up." in text
        assert "Its log (runs/x/candidate.log) ends:" in text
    assert "assay doctor" in printed(report)
    assert len(printed(report).splitlines()) <= 40
    assert len(to_markdown(report).splitlines()) <= 60
