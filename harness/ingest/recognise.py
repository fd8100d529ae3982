"""Finds the reader for a file, by the file's content and never by its name alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from assay.harness.config import points_meant
from assay.harness.errors import AssayError, EvidenceError, UsageError
from assay.harness.files import timestamp
from assay.harness.ingest import (
    assay_run,
    inspect_ai,
    lm_eval,
    mlc_trace,
    sglang_log,
    simple_evals,
    tensor_files,
)
from assay.harness.ingest.comparison import Comparison
from assay.harness.ingest.result import UNKNOWN, FileDocument, FileRead, FormatReader, IngestResult
from assay.harness.ingest.result_set import ReadResults
from assay.harness.ingest.source_file import SourceFile
from assay.harness.ingest.tensor_diff import TensorRule, diff_tensors
from assay.harness.ingest.trace_diff import diff_traces
from assay.harness.policy import WIDEST_MARGIN
from assay.harness.reading import reading
from assay.harness.text import listed, one_line
from assay.harness.verdict import Verdict

READERS: tuple[FormatReader, ...] = (
    assay_run.READER, lm_eval.READER, inspect_ai.READER, simple_evals.READER, tensor_files.READER, sglang_log.READER,
    # Traces and printed tables come after logs: a log that contains an engine's trace or a table is still a log.
    mlc_trace.READER, sglang_log.TABLE,
)  # fmt: skip
"""All readers, in the order in which they are tried."""


def _taker(source: SourceFile, compared: bool = False) -> FormatReader | None:
    """Return the first reader that recognises a file (with `compared`, only readers for `compare`), or None."""
    takers = (reader for reader in READERS if reader.compared or not compared)
    return next((reader for reader in takers if reader.recognises(source)), None)


def ingest(
    files: str | Path | Sequence[str | Path], damaged: Callable[[AssayError], None] = lambda _: None
) -> IngestResult:
    """Read other tools' logs, results, traces or tensors, and draw conclusions from them.

    Args:
        files: a file or folder, or several.
        damaged: called with the reason why a file could not be read; its document also states the reason.

    Raises:
        UsageError: a file does not exist, or no file was given.
    """
    paths = [Path(files)] if isinstance(files, str | Path) else [Path(file) for file in files]
    if not paths:
        raise UsageError("No file was given.", "a log, a results file, a trace or a dump", "name one")
    documents = tuple(_read(path, damaged) for path in paths)
    return IngestResult(
        verdict=_verdict(documents),
        created=timestamp(),
        documents=documents,
        next_steps=tuple(dict.fromkeys(step for document in documents for step in document.next_steps)),
    )


def _read(path: Path, damaged: Callable[[AssayError], None]) -> FileDocument:
    if not path.exists():
        SourceFile.of(path)  # raises: a missing file is wrong usage, whereas a damaged one gets a document
    source, reader = SourceFile(path, b""), None
    try:
        source = SourceFile.of(path)
        with reading(path, "file of a format that is read"):
            reader = _taker(source)
        if reader is not None:
            with reading(path, reader.title):
                return reader.read(source)
        known = listed([reader.title for reader in READERS])
        why = f"not recognised. What to do: give one of these: {known}"
    except AssayError as error:
        damaged(error)
        why = f"{reader.title}: {error.found}" if reader else error.found
    lines = sum(1 for _ in source.lines()) if path.is_file() else 0
    return FileDocument(file=FileRead.of(source, UNKNOWN, "Unknown", 0, lines, notes=(why,)))


def _verdict(documents: Iterable[FileDocument]) -> Verdict:
    """Return "regression" or "inconclusive". A log cannot prove a pass, because it does not state everything."""
    wrong = any(finding.severity == "serious" for document in documents for finding in document.findings)
    return "regression" if wrong else "inconclusive"


def compare(
    a: str | Path,
    b: str | Path,
    margin: float = 0.02,
    tensors: TensorRule | None = None,
    metric: str = "",
    reproduce: str = "",
) -> Comparison:
    """Compare two results, runs, files of tensors or traces: is B as good as A, or equal to it?

    Args:
        a: the accepted result: a file or folder.
        b: the new result.
        margin: for answers, the largest loss of the mean score that passes, as a fraction.
        tensors: how to compare tensors; by default, within rounding to their dtype.
        metric: which score counts, for tools that write several.
        reproduce: the command.

    Raises:
        UsageError: a path holds nothing comparable, both paths are the same, or they hold different kinds of results.
        EvidenceError: a result is damaged.
    """
    if not 0 < margin <= WIDEST_MARGIN:
        raise UsageError(
            f"--margin is {margin:g}.",
            f"more than 0 and at most {WIDEST_MARGIN:g}, as a fraction",
            points_meant("--margin", margin) or "give another value, or leave it out",
        )
    path_a, path_b = Path(a), Path(b)
    if path_a.resolve() == path_b.resolve():
        raise UsageError(f"{path_a} was named twice.", "two results", "name the other one")
    sources = SourceFile.of(path_a), SourceFile.of(path_b)
    with reading(f"{path_a} or {path_b}", "file that can be compared"):
        reader, other = map(_reader_of, sources)
        if reader.id != other.id:
            raise UsageError(
                f"{a} and {b} are of different kinds: {reader.title} and {other.title}.",
                "two results of one tool", "run the same tool on both",
            )  # fmt: skip
        both = [reader.results(source, metric) if reader.results else ReadResults(source) for source in sources]
        for side in both:
            _one_run(side)
        if reader.results is not None:
            from assay.harness.ingest.compare_answers import compare_answers, compare_runs

            comparing = compare_runs if reader.id == "assay-run" else compare_answers
            result = comparing(reader, both[0], both[1], margin)
        elif reader.steps is not None:
            result = diff_traces(reader.steps(sources[0]), reader.steps(sources[1]))
        else:
            result = diff_tensors(path_a, path_b, tensors or TensorRule())
    return result.model_copy(update={"reproduce": reproduce})


def _one_run(side: ReadResults) -> None:
    """Raise if a file holds several runs, or several values of a score: a tool was run twice, or its outputs were joined.

    Raises:
        UsageError: the file holds several runs.
        EvidenceError: the run has two values of the same score.
    """
    path, runs = side.source.path, dict.fromkeys(score.run for score in side.sets)
    if len(runs) > 1:
        named = listed([one_line(run, 80) for run in runs])
        do = "name the results file of one run, or copy its table into a file"
        raise UsageError(f"{path} holds {len(runs)} runs: {named}.", "one run", do)
    if twice := [score for score in side.sets if side.scores[score.name] != score]:
        says = f"{path} has several scores of {twice[0].name} in one run."
        raise EvidenceError(says, "one of each task, filter and metric", "copy one of its tables into a file")


def _reader_of(source: SourceFile) -> FormatReader:
    if reader := _taker(source, compared=True):
        return reader
    other = _taker(source)
    raise UsageError(
        f"{source.path} is not recognised as something to compare{f': it is of {other.title}' if other else ''}.",
        f"one of: {', '.join(reader.title for reader in READERS if reader.compared)}",
        "name a file, or the tool's output folder",
    )
