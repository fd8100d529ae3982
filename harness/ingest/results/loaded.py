"""A path -> the results in it, by whichever reader recognises it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from assay.harness.errors import UsageError
from assay.harness.ingest.recognise import reader_of, readers
from assay.harness.ingest.result import FormatReader
from assay.harness.ingest.results.comparison import ComparedSide, ResultKind
from assay.harness.ingest.results.result_set import ReadResults
from assay.harness.ingest.source_file import SourceFile
from assay.harness.reading import reading


@dataclass(frozen=True)
class Loaded:
    """One side of a comparison, read."""

    source: SourceFile
    reader: FormatReader
    reading: ReadResults

    @property
    def kind(self) -> ResultKind:
        """The kind of its results."""
        if self.reader.id == "assay-run":
            return "runs"
        return self.reading.sets[0].kind if self.reading.sets else "answers"

    def side(self, name: str) -> ComparedSide:
        """Return it as a side of the comparison, under this name."""
        first = self.reading.sets[0] if self.reading.sets else None
        return ComparedSide(
            name="A" if name == "A" else "B",
            path=str(self.source.path),
            format=self.reader.id,
            tool=first.tool if first else self.reader.title,
            version=first.version if first else "",
            model=first.model if first else "",
            read=self.reading.read,
            unread=self.reading.unread,
            unit=self.reading.unit,
            notes=tuple(self.reading.notes),
        )


def load(path: Path, metric: str = "") -> Loaded:
    """Read a file or a folder of results.

    Args:
        path: what the readers of results read.
        metric: which score counts, for the tools that write several.

    Raises:
        UsageError: there is no such file, or no reader recognises it.
        EvidenceError: it is damaged.
    """
    source = SourceFile.of(path)
    with reading(path, "results file"):
        reader = reader_of(source, "results")
        if reader is not None and reader.results is not None:
            return Loaded(source, reader, reader.results(source, metric))
    raise UsageError(
        f"{path} is not recognised as results.",
        f"one of: {', '.join(reader.title for reader in readers('results'))}",
        "name a results file, or the output folder of the tool",
    )
