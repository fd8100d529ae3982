"""JUnit XML, as pytest writes it with ``--junitxml`` (pytest 9.2.0, ``junitxml.py``, family xunit2), through junitparser 5.0.3."""

from __future__ import annotations

from typing import Any

from assay.harness.errors import EvidenceError
from assay.harness.ingest.results.result_set import ReadResults, ResultItem, ResultSet, results_reader
from assay.harness.ingest.source_file import SourceFile


def _recognises(source: SourceFile) -> bool:
    """Recognise XML whose first elements are test suites."""
    head = source.head_text.lstrip()
    return head.startswith("<") and any(f"<{name}" in head[:2_000] for name in ("testsuites", "testsuite"))


def _results(source: SourceFile, metric: str) -> ReadResults:
    """Read all tests of the file, with their outcomes: passed, failed, error or skipped.

    Raises:
        EvidenceError: it is no XML, or its document type declares entities.
    """
    reading = ReadResults(unit="test")
    cases = _tests(source)
    items = tuple(map(_item, cases))
    reading.read = len(cases)
    reading.sets.append(
        ResultSet(
            source=str(source.path),
            tool="JUnit",
            kind="tests",
            task=source.path.stem,
            metric="outcome",
            items=items,
            failed=max(0, _stated_failures(source) - sum(item.answer in ("failed", "error") for item in items)),
        )
    )
    return reading


def _tests(source: SourceFile) -> list[Any]:
    """Read all tests of a file."""
    return [case for suite in _suites(source) for case in _cases(suite)]


def _stated_failures(source: SourceFile) -> int:
    """Count the failed tests of a file, as its suites state it."""
    return sum((suite.failures or 0) + (suite.errors or 0) for suite in _suites(source))


def _suites(source: SourceFile) -> list[Any]:
    """Return the outermost suites of a file."""
    import junitparser

    if "<!DOCTYPE" in source.head_text or "<!ENTITY" in source.head_text:
        raise EvidenceError(
            f"{source.path} has a document type.", "JUnit XML without one", "remove the line with <!DOCTYPE"
        )
    try:
        document = junitparser.JUnitXml.fromfile(str(source.path))
    except Exception as error:  # junitparser lets the errors of whatever XML parser is installed through
        raise EvidenceError(f"{source.path} is not JUnit XML: {error}.", "JUnit XML", "write it again") from None
    return [document] if isinstance(document, junitparser.TestSuite) else list(document)


def _cases(suite: Any) -> list[Any]:
    """List the tests of a suite and of the suites within it."""
    return [*suite, *(case for inner in suite.testsuites() for case in _cases(inner))]


def _item(case: Any) -> ResultItem:
    kinds = {type(entry).__name__.lower() for entry in case.result or ()}
    outcome = next((kind for kind in ("error", "failure", "skipped") if kind in kinds), "passed")
    outcome = "failed" if outcome == "failure" else outcome
    return ResultItem(
        key=f"{case.classname or ''}::{case.name or ''}".removeprefix("::"),
        answer=outcome,
        parsed=outcome,
        score={"passed": 1.0, "failed": 0.0, "error": 0.0}.get(outcome),
    )


READER = results_reader("junit", "JUnit test results", _recognises, _results)
