"""Files → what they state, for the checker of claims: whatever a reader lists, JUnit, and reports of assay's own runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from assay.harness.errors import EvidenceError
from assay.harness.ingest.recognise import readers
from assay.harness.ingest.source import Source
from assay.harness.ingest.statement import Statement
from assay.harness.judge.report import Report
from assay.harness.judge.report_file import read_report
from assay.harness.text import one_line

_OUTCOMES = {"pass": "passed", "regression": "failed", "ok": "passed", "failed": "failed"}


def statements_of(path: Path) -> list[Statement]:
    """What a file states, or the report in a folder of a run.

    Raises:
        UsageError: there is no such file.
        EvidenceError: no reader that can list statements takes it, or it is damaged.
    """
    if path.is_dir() and (path / "report.json").is_file():
        path = path / "report.json"
    source = Source.of(path)
    if b'"assay.report/' in source.head[:4096]:
        return list(_of_report(read_report(path), str(path)))
    for reader in readers():
        statements = getattr(reader, "statements", None)
        if statements is not None and reader.recognises(source):
            found: Iterable[Statement] = statements(source)
            return list(found)
    if b"<testsuite" in source.head:
        return list(_of_junit(path))
    raise EvidenceError(
        f"No reader knows what {path} states.",
        "a log, a JUnit file, a report.json or the folder of a run",
        "see docs/ingest.md for what is read",
    )


def _of_report(report: Report, path: str) -> Iterator[Statement]:
    yield _verdict(("verdict",), report.verdict, path, report.headline)
    for check in report.checks:
        yield Statement(
            "test", (check.id, check.title), _OUTCOMES.get(check.status, ""), path, f"{check.id}: {check.found}"
        )
    for suite in report.suites:
        yield _verdict((f"suite {suite.id}",), suite.verdict, path, suite.why)
        for tally in suite.tallies:
            if tally.role == "candidate" and tally.total:
                text = f"{suite.id}: candidate {tally.right} of {tally.total} right"
                yield Statement("number", (suite.id,), tally.right / tally.total, path, text)
        for metric in suite.metrics:
            if metric.value is not None:
                text = f"{suite.id}: {metric.title}: {metric.text}"
                yield Statement("number", (metric.id, metric.title), float(metric.value), path, text)


def _verdict(names: tuple[str, ...], verdict: str, path: str, why: str) -> Statement:
    return Statement("test", names, _OUTCOMES.get(verdict, ""), path, f"{names[0]}: {verdict}: {why}")


def _of_junit(path: Path) -> Iterator[Statement]:
    from junitparser import JUnitXml, JUnitXmlError

    try:
        document: Any = JUnitXml.fromfile(str(path))
        suites = list(document) if isinstance(document, JUnitXml) else [document]
        for case in (case for suite in suites for case in suite):
            kinds = {type(one).__name__ for one in case.result}
            outcome = next((word for kind, word in _JUNIT.items() if kind in kinds), "passed")
            text = next((one.message for one in case.result if one.message), None) or ""
            name = f"{case.classname or ''}::{case.name or ''}"
            yield Statement("test", (name, str(case.name)), outcome, str(path), one_line(f"{name} {outcome}: {text}"))
    except (JUnitXmlError, SyntaxError, ValueError) as error:  # a ParseError is a SyntaxError
        raise EvidenceError(f"{path} is damaged: {error}.", "a JUnit file", "write it again") from None


_JUNIT = {"Failure": "failed", "Error": "error", "Skipped": "skipped"}
