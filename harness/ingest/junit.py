"""JUnit files, as pytest and others write them: the tests that failed, and why."""

from __future__ import annotations

from xml.etree.ElementTree import Element, ParseError, fromstring

from assay.harness.errors import EvidenceError
from assay.harness.ingest.result import CitedFinding, FactTable, FileDocument, FileRead, FormatReader
from assay.harness.ingest.sglang_findings import failed_test
from assay.harness.ingest.source_file import SourceFile
from assay.harness.reading import whole_file
from assay.harness.text import counted, one_line

# Rows of the table.
_SHOWN = 50


def _recognises(source: SourceFile) -> bool:
    """Recognise XML of which a test suite is the root."""
    head = source.head_text[:2000].lstrip()
    return head.startswith("<") and ("<testsuites" in head or "<testsuite" in head)


def _read(source: SourceFile) -> FileDocument:
    try:
        # What entities expand to is bounded by expat.
        root = fromstring(whole_file(source.path))
    except ParseError as error:
        raise EvidenceError(f"{source.path} is damaged: {error}.", "XML", "copy the file again") from None
    tests = list(root.iter("testcase"))
    failed = [(test, wrong) for test in tests for wrong in (*test.iter("failure"), *test.iter("error"))]
    findings = [failed_test(_name(test), _why(wrong)) for test, wrong in failed]
    stated = sum(int(suite.get(kind) or 0) for suite in root.iter("testsuite") for kind in ("failures", "errors"))
    if stated > len(failed):
        said = f"The file counts {counted(stated, 'failure')}, and names {len(failed)}."
        findings.append(failed_test("the file", said))
    outcomes = [(_name(test), _outcome(test), test.get("time") or "not stated") for test in tests[:_SHOWN]]
    table = FactTable(id="tests", title="Tests", columns=("test", "outcome", "seconds"), rows=tuple(outcomes))
    file = FileRead.of(source, READER.id, READER.title, len(tests), 0, "test")
    return FileDocument(file=file, tables=(table,) if tests else (), findings=tuple[CitedFinding, ...](findings))


def _name(test: Element) -> str:
    return "::".join(filter(None, (test.get("classname"), test.get("name"))))


def _why(wrong: Element) -> str:
    said = wrong.get("message") or (wrong.text or "").strip()
    return one_line(said, 300) or "The file does not state why."


def _outcome(test: Element) -> str:
    return next((child.tag for child in test if child.tag in ("failure", "error", "skipped")), "passed")


READER = FormatReader("junit", "JUnit file", _recognises, _read, compared=False)
