"""``assay compare A B``: finds what A and B hold, and compares it."""

from __future__ import annotations

from pathlib import Path

from assay.harness.errors import UsageError
from assay.harness.extras import require
from assay.harness.ingest.comparison import Comparison, PassLimits
from assay.harness.ingest.recognise import reader_of, readers
from assay.harness.ingest.result import FormatReader
from assay.harness.ingest.source_file import SourceFile
from assay.harness.ingest.tensors.tensor_diff import TensorRule, diff_tensors
from assay.harness.ingest.trace.trace_diff import diff_traces
from assay.harness.reading import reading


def compare(
    a: Path, b: Path, limits: PassLimits, tensors: TensorRule, metric: str = "", reproduce: str = ""
) -> Comparison:
    """Compare two results: is B as good as A, or equal to it?

    Args:
        a: the accepted result: file or folder.
        b: the new one.
        limits: of a pass, for answers.
        tensors: how tensors are compared.
        metric: which score counts, for the tools that write several.
        reproduce: the command.

    Raises:
        UsageError: a path holds nothing that can be compared, both are the same, or they hold different things.
        EvidenceError: one of them is damaged.
    """
    if a.resolve() == b.resolve():
        raise UsageError(f"{a} was named twice.", "two results", "name the other one")
    sources = SourceFile.of(a), SourceFile.of(b)
    with reading(f"{a} or {b}", "file that can be compared"):
        reader, other = map(_reader_of, sources)
        if reader.id != other.id:
            raise UsageError(
                f"{a} is of {reader.title}, and {b} is of {other.title}: they do not name things alike.",
                "two results of one tool",
                "run the same tool on both",
            )
        if reader.results is not None:
            require("reports", "assay compare with results")  # the tests of scores need scipy
            from assay.harness.ingest.results.compare_answers import Loaded, compare_answers, compare_runs

            left, right = (Loaded(source, reader, reader.results(source, metric)) for source in sources)
            comparing = compare_runs if reader.id == "assay-run" else compare_answers
            made = comparing(left, right, limits)
        elif reader.steps is not None:
            made = diff_traces(reader.steps(sources[0]), reader.steps(sources[1]))
        else:
            made = diff_tensors(a, b, tensors)
    return made.model_copy(update={"reproduce": reproduce})


def _reader_of(source: SourceFile) -> FormatReader:
    known = [reader for reader in readers() if reader.compared]
    reader = reader_of(source)
    if reader is None or not reader.compared:
        raise UsageError(
            f"{source.path} is not recognised as something to compare{f': it is of {reader.title}' if reader else ''}.",
            f"one of: {', '.join(reader.title for reader in known)}",
            "name a file, or the output folder of the tool",
        )
    return reader
