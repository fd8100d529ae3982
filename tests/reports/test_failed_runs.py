"""A server that failed: each output names the cause on its first line, once, and shows the log where it does not hide the cause."""

from __future__ import annotations

import html
import re
import tomllib
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
from junitparser import JUnitXml
from rich.console import Console

from assay.harness.engines.failures import ended
from assay.harness.engines.process import _telling_lines
from assay.harness.evidence.manifest import FailureResult
from assay.harness.judge.report import Report
from assay.reports import junit, markdown, page
from assay.reports.github import workflow_commands
from assay.reports.run_report import run_document
from assay.reports.terminal import render

FOLDER = Path(__file__).parents[1] / "data" / "server_failures"
LOGS = [*sorted(FOLDER.glob("*.log"))[::12], FOLDER / "jit_ninja.log"]  # their causes are tests of the engine
EXPECTED = tomllib.loads((FOLDER / "expected.toml").read_text())
WHO = "the candidate server (mine:forward)"


def to_html(report: Report) -> str:
    return page.to_html(run_document(report))


def to_markdown(report: Report) -> str:
    return markdown.to_markdown(run_document(report))


def to_junit(report: Report) -> str:
    return junit.to_junit(run_document(report))


def failed(examples: ModuleType, log: Path) -> Report:
    """The report of a run whose candidate's server left this log."""
    text = log.read_text()
    tail = "Its log (runs/x/candidate.log) ends:\n" + "\n".join(f"  {line}" for line in _telling_lines(text))
    how = "exited with status 1" if "Traceback" in text and "sigquit" not in text.lower() else "was killed by SIGKILL"
    failure = FailureResult.of("engine", ended("sglang", WHO, how, "during start-up", text, tail))
    shown = FailureResult(**failure.model_dump(exclude={"message"}))
    report: Report = examples.passing()
    return report.model_copy(update={"verdict": "error", "failure": shown, "checks": (), "findings": ()})


def printed(report: Report, everything: bool = False) -> str:
    shown = StringIO()
    render(run_document(report), Console(file=shown, width=80), everything)
    return shown.getvalue()


def plain(text: str) -> str:
    """Text on one line without Markdown's escapes, HTML's entities and GitHub's."""
    unescaped = html.unescape(re.sub(r"<!-- -->|\\(?=[^a-zA-Z0-9\s])|</?b>", "", text)).replace("%25", "%")
    return " ".join(unescaped.split())


def remedies(text: str) -> list[str]:
    """What follows each "What to do:" or "Next", and every other advice that is none of the failure's."""
    said = [plain(one) for one in re.findall(r"What to do:(.*?)(?:</p>|\n|$)", text, re.DOTALL)]
    said += [plain(one) for one in re.findall(r"^Next +(.*)$", text, re.MULTILINE)]
    doctor = "assay doctor" in text and not any("assay doctor" in one for one in said)
    return said + re.findall(r"to resolve:[^\n]*", text, re.IGNORECASE) + ["assay doctor"] * doctor


def outputs(report: Report) -> dict[str, tuple[str, list[str]]]:
    """The first line, or headline, of each output of a failed run, and every remedy in it."""
    lines, page, comment = printed(report).splitlines(), to_html(report), to_markdown(report)
    answer = run_document(report).answer
    [headline] = re.findall(r'<p class="headline">(.*?)</p>', page, re.DOTALL)
    body = re.sub(r"<style.*?</style>|<script.*?</script>", "", page, flags=re.DOTALL)
    cases = [case for suite in JUnitXml.fromstring(to_junit(report).encode()) for case in suite]
    [error] = [result for case in cases for result in case.result if type(result).__name__ in ("Error", "Failure")]
    annotation, *_ = workflow_commands(run_document(report)).splitlines()
    texts = {
        "terminal": (answer, "\n".join(lines)), "html": (headline, body),
        "markdown": (comment.split("\n")[2], comment), "junit": (error.message, error.text), "annotation": (annotation, annotation),
    }  # fmt: skip
    return {name: (plain(first), remedies(text)) for name, (first, text) in texts.items()}


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_each_output_names_the_cause_on_its_first_line_with_its_one_remedy(examples: ModuleType, log: Path) -> None:
    expected, report = EXPECTED[log.stem], failed(examples, log)
    for name, (first, advice) in outputs(report).items():
        assert plain(expected["line"]) in first, name
        assert WHO in first, name
        [remedy] = advice
        assert plain(expected["do"]) in remedy, name
    cases = [case for suite in JUnitXml.fromstring(to_junit(report).encode()) for case in suite]
    assert [type(one).__name__ for case in cases for one in case.result].count("Error") == 1


def test_the_log_is_a_block(examples: ModuleType) -> None:
    report = failed(examples, next(log for log in LOGS if log.stem == "jit_ninja"))
    for text in (printed(report, everything=True), to_markdown(report), html.unescape(to_html(report))):
        assert "SGLang ended its own processes during start-up." in text.replace("\\", "")
        assert "Its log (runs/x/candidate.log) ends" in text
    assert len(printed(report).splitlines()) <= 12
    assert len(printed(report, everything=True).splitlines()) <= 45
    assert len(to_markdown(report).splitlines()) <= 70


def test_on_the_page_the_remedy_comes_below_the_headline_and_the_log_is_folded(examples: ModuleType) -> None:
    report = failed(examples, next(log for log in LOGS if log.stem == "jit_ninja"))
    page = to_html(report)
    assert re.search(r'<p class="headline">[^<]*</p>\s*<p class="remedy"><b>What to do:</b> pip install ninja', page)
    fold = re.search(
        r'<details class="fold">\s*<summary>Its log[^<]*</summary>\s*<figure class="command">.*?<pre[^>]*>(.*?)</pre>',
        page,
        re.DOTALL,
    )
    assert fold is not None
    assert "FileNotFoundError" in fold[1]
    assert page.count("Traceback (most recent call last)") == fold[1].count("Traceback (most recent call last)") == 1
    assert page.count("What to do") == 1


def test_a_command_in_a_remedy_is_code_on_the_page_and_stays_inert(examples: ModuleType) -> None:
    report = failed(examples, LOGS[0])
    assert report.failure is not None
    for do, shown in (
        ("run `assay check`, then <b>", "run <code>assay check</code>, then &lt;b&gt;"),
        ("`<b>`", "<code>&lt;b&gt;</code>"),
        ("one ` alone", "one ` alone"),
    ):
        page = to_html(report.model_copy(update={"failure": report.failure.model_copy(update={"do": do})}))
        assert f"<b>What to do:</b> {shown}</p>" in page
