"""The result of reading other tools' files, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from assay.harness.files import file_hash
from assay.harness.ingest.source_file import SourceFile
from assay.harness.schema import RULE, Part
from assay.harness.statement import Worded
from assay.harness.text import one_line
from assay.harness.verdict import Decided, Finding

if TYPE_CHECKING:
    from assay.harness.ingest.mlc_trace import StepTrace
    from assay.harness.ingest.result_set import ReadResults

UNKNOWN = "unknown"
"""Format of a file that no reader takes."""
MAX_TRACKS, MAX_COLUMNS = 16, 160
"""Most tracks and columns of a timeline, so that a picture of 100,000 lines stays below 2 MB."""
NOTHING, POLLED, TENTHS = ".", "o", "123456789"
"""Cells of a timeline: nothing happened; an action was polled and computed nothing; it computed something, in up to a ninth of the
segments ("1") to all of them ("9")."""


class Excerpt(Part):
    """Some lines of a file, quoted. The text comes from outside: never trust it."""

    first: int = Field(description="number of the first line, from 1")
    last: int
    text: str = Field(description="the first of them, clipped")


@dataclass
class CitedLines:
    """Lines that state the same: how many, the first and the last, and the text of the first.

    Attributes:
        first: its number; 0 while there is none.
    """

    count: int = 0
    first: int = 0
    last: int = 0
    text: str = ""

    @classmethod
    def of(cls, number: int, text: str) -> CitedLines:
        """Cite one line."""
        return cls(1, number, number, text)

    def see(self, number: int, text: str) -> None:
        """Count one more."""
        if not self.count:
            self.first, self.text = number, text
        self.count += 1
        self.last = number

    @property
    def excerpt(self) -> Excerpt:
        """The lines, quoted."""
        return Excerpt(first=self.first, last=self.last, text=one_line(self.text))


class FileRead(Part):
    """One file: how much of it was understood. Nothing is dropped in silence: read + unread = lines."""

    path: str
    format: str = Field(description='id of the reader, such as "sglang-log"; "unknown" where none took it')
    title: str = Field(description='such as "SGLang server log with pytest output"')
    bytes: int
    sha256: str = Field(description="empty for a folder")
    unit: str = Field("line", description='what is counted: "line", "record", "tensor", "event"')
    lines: int = Field(description="units in the file")
    read: int = Field(description="units that were understood")
    unread: int = Field(description="the others")
    excerpts: tuple[Excerpt, ...] = Field((), description="the first of the others")
    notes: tuple[str, ...] = Field((), description='such as "3 lines are not UTF-8 (the first is line 12)"')

    @classmethod
    def of(
        cls, source: SourceFile, format: str, title: str, read: int, unread: int, unit: str = "line",
        excerpts: Iterable[Excerpt] = (), notes: Iterable[str] = (),
    ) -> FileRead:  # fmt: skip
        """Describe how much of a file or a folder was read, with its size and its hash."""
        return cls(
            path=str(source.path), format=format, title=title, bytes=source.size, unit=unit,
            sha256=file_hash(source.path) if source.path.is_file() else "",
            lines=read + unread, read=read, unread=unread, excerpts=tuple(excerpts), notes=tuple(notes),
        )  # fmt: skip


class Fact(Part):
    """Something that a file states, with its lines."""

    id: str
    title: str
    text: str
    cites: tuple[Excerpt, ...] = ()


class FactTable(Part):
    """Facts of one kind, a row each."""

    id: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class TimelineTrack(Part):
    """One request."""

    name: str
    note: str = Field(description='such as "forks its sequence, 128 tokens"')
    lanes: dict[str, str] = Field(description="by action, a character for each column: NOTHING, POLLED or of TENTHS")


class Timeline(Part):
    """The segments of an engine's requests, by action, bounded in size."""

    segments: int = Field(description="of the longest request; a column is one of them, or several")
    tracks: tuple[TimelineTrack, ...] = Field(max_length=MAX_TRACKS)
    left_out: int = Field(0, description="requests that are not shown")


class FileDocument(Part):
    """The result of one reader on one file."""

    file: FileRead
    facts: tuple[Fact, ...] = ()
    tables: tuple[FactTable, ...] = ()
    findings: tuple[CitedFinding, ...] = ()
    next_steps: tuple[str, ...] = Field((), description="commands that would prove what the file only suggests")
    timeline: Timeline | None = Field(None, description="of an engine's trace; null for other files")


class CitedFinding(Finding):
    """A finding that follows from the file alone, with the lines that it follows from."""

    explained: ClassVar[bool] = False  # a log is no kernel

    cites: tuple[Excerpt, ...] = ()


@dataclass(frozen=True)
class FormatReader:
    """A reader of one format: file in, facts out.

    Attributes:
        id: of the format, kebab-case and stable.
        title: for people.
        recognises: returns True if the file is of this format, from `SourceFile.head`, or from the names in a folder.
        read: reads all of it.
        results: reads all results, for `assay compare`; None for what holds none. The second argument is the score that counts, for
            the tools that write several; empty for the first. Raises EvidenceError if the file is damaged, and UsageError if no
            score has that name.
        steps: reads a trace, for `assay compare`; None for what is none.
        compared: whether `assay compare` takes two of them.
    """

    id: str
    title: str
    recognises: Callable[[SourceFile], bool]
    read: Callable[[SourceFile], FileDocument]
    results: Callable[[SourceFile, str], ReadResults] | None = None
    steps: Callable[[SourceFile], StepTrace] | None = None
    compared: bool = True


class IngestResult(Decided, Worded):
    __doc__ = f"All files of one ``assay ingest``. {RULE}"

    words = ("headline",)

    schema_id: Literal["assay.ingest/1"] = Field("assay.ingest/1", alias="schema")

    created: str = Field(description="ISO 8601, UTC")
    documents: tuple[FileDocument, ...]
    next_steps: tuple[str, ...] = Field((), description="commands that would prove what the files only suggest")

    @property
    def _about(self) -> str:
        return ", ".join(document.file.path for document in self.documents)
