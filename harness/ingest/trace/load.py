"""A trace from a file, whatever wrote it."""

from __future__ import annotations

from pathlib import Path

from assay.harness.errors import EvidenceError
from assay.harness.ingest.result import Document
from assay.harness.ingest.source import Source, two
from assay.harness.ingest.trace import chrome, chrome_facts, facts, mlc
from assay.harness.ingest.trace.diff import Side, TraceDiff, compare
from assay.harness.reading import reading


def document_of(path: Path) -> Document:
    """Make the document of a trace: what it states, and the rules that it breaks.

    Raises:
        UsageError: there is no such file.
        EvidenceError: it is no trace that a reader knows.
    """
    source = Source.of(path)
    with reading(path, "trace"):
        for reader in (mlc.MlcReader(), chrome.ChromeReader()):
            if reader.recognises(source):
                return reader.read(source)
    raise _unknown(path)


def diff_files(a: Path, b: Path) -> TraceDiff:
    """Compare the traces in two files.

    Raises:
        UsageError: one of the files does not exist.
        EvidenceError: one of them is no trace that a reader knows.
    """
    two(a, b, "traces")
    with reading(f"{a} or {b}", "trace"):
        return _compared(Source.of(a), Source.of(b))


def _compared(*sources: Source) -> TraceDiff:
    left, right = (_side(source) for source in sources)
    timelines = tuple(
        facts.timeline(side.trace) if side.trace.unit == "line" else chrome_facts.timeline(side.trace)
        for side in (left, right)
    )
    return compare(left, right, timelines)


def _side(source: Source) -> Side:
    if mlc.is_engine_trace(source):
        read = mlc.load(source)
        return Side(read.trace, read.file)
    if chrome.is_chrome_trace(source):
        profile = chrome.load(source)
        return Side(profile.trace, profile.file)
    raise _unknown(source.path)


def _unknown(path: Path) -> EvidenceError:
    return EvidenceError(
        f"{path} is no trace that assay knows.",
        "the lines of an MLC-LLM engine, or Chrome trace events in JSON (.json or .json.gz)",
        "give a trace; assay ingest reports what a file is",
    )
