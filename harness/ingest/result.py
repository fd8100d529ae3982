"""The records that result from reading other tools' files."""

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
"""Format of a file that no reader recognises."""
MAX_TRACKS, MAX_COLUMNS = 16, 160
"""Most tracks and columns in a timeline, so that the picture of a trace of 100,000 lines stays below 2 MB."""
NOTHING, POLLED, TENTHS = ".", "o", "123456789"
"""Cells of a timeline: nothing happened; an action was polled but computed nothing; it computed something in up to a ninth of the
segments ("1") to all of them ("9")."""


class Excerpt(Part):
    """Some lines of a file, quoted. The text comes from outside: never trust it."""

    first: int = Field(description="number of the first line, counted from 1")
    last: int
    text: str = Field(description="the first line, clipped")


@dataclass
class CitedLines:
    """Lines that state the same thing: their count, the first and last line number, and the first line's text.

    Attributes:
        first: the first line's number, or 0 while there is none.
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
        """Count another line."""
        if not self.count:
            self.first, self.text = number, text
        self.count += 1
        self.last = number

    @property
    def excerpt(self) -> Excerpt:
        """The lines, quoted."""
        return Excerpt(first=self.first, last=self.last, text=one_line(self.text))


class FileRead(Part):
    """How much of a file was understood. Nothing is silently dropped: read + unread = lines."""

    path: str
    format: str = Field(description='id of the reader, such as "sglang-log"; "unknown" if no reader recognised it')
    title: str = Field(description='such as "SGLang server log with pytest output"')
    bytes: int
    sha256: str = Field(description="empty for a folder")
    unit: str = Field("line", description='unit of the counts: "line", "record", "tensor", "event"')
    lines: int = Field(description="units in the file")
    read: int = Field(description="units understood")
    unread: int = Field(description="the others")
    excerpts: tuple[Excerpt, ...] = Field((), description="the first units that were not understood")
    notes: tuple[str, ...] = Field((), description='such as "3 lines are not UTF-8 (the first is line 12)"')

    @classmethod
    def of(
        cls, source: SourceFile, format: str, title: str, read: int, unread: int, unit: str = "line",
        excerpts: Iterable[Excerpt] = (), notes: Iterable[str] = (),
    ) -> FileRead:  # fmt: skip
        """Describe how much of a file or folder was read, with its size and hash."""
        return cls(
            path=str(source.path), format=format, title=title, bytes=source.size, unit=unit,
            sha256=file_hash(source.path) if source.path.is_file() else "",
            lines=read + unread, read=read, unread=unread, excerpts=tuple(excerpts), notes=tuple(notes),
        )  # fmt: skip


class Fact(Part):
    """A statement in a file, with its lines."""

    id: str
    title: str
    text: str
    cites: tuple[Excerpt, ...] = ()


class FactTable(Part):
    """Facts of one kind, one per row."""

    id: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


class TimelineTrack(Part):
    """One request."""

    name: str
    note: str = Field(description='such as "forks its sequence, 128 tokens"')
    lanes: dict[str, str] = Field(description="by action, one character per column: NOTHING, POLLED or one of TENTHS")


class Timeline(Part):
    """The segments of an engine's requests by action, limited in size."""

    segments: int = Field(description="of the longest request; each column stands for one or more")
    tracks: tuple[TimelineTrack, ...] = Field(max_length=MAX_TRACKS)
    left_out: int = Field(0, description="requests not shown")


class FileDocument(Part):
    """The result of one reader on one file."""

    file: FileRead
    facts: tuple[Fact, ...] = ()
    tables: tuple[FactTable, ...] = ()
    findings: tuple[CitedFinding, ...] = ()
    next_steps: tuple[str, ...] = Field((), description="commands that would prove what the file only suggests")
    timeline: Timeline | None = Field(None, description="for engine traces; null for other files")


class CitedFinding(Finding):
    """A finding that follows from the file alone, with the lines that support it."""

    explained: ClassVar[bool] = False  # a log is not a kernel

    cites: tuple[Excerpt, ...] = ()


@dataclass(frozen=True)
class FormatReader:
    """A reader of one format: file in, facts out.

    Attributes:
        id: the format's stable id, in kebab-case.
        title: the format's name for people.
        recognises: returns True if the file is in this format, judging by `SourceFile.head` or the names in a folder.
        read: reads the whole file.
        results: reads all results for `assay compare`, or None if the format holds no results. The second argument names the score
            that counts, for tools that write several; if it is empty, the first counts. Raises EvidenceError if the file is
            damaged, and UsageError if no score has that name.
        steps: reads a trace for `assay compare`, or None if the format is not a trace.
        compared: whether `assay compare` accepts two such files.
    """

    id: str
    title: str
    recognises: Callable[[SourceFile], bool]
    read: Callable[[SourceFile], FileDocument]
    results: Callable[[SourceFile, str], ReadResults] | None = None
    steps: Callable[[SourceFile], StepTrace] | None = None
    compared: bool = True


class IngestResult(Decided, Worded):
    __doc__ = f"All files read by one ``assay ingest``. {RULE}"

    words = ("headline",)

    schema_id: Literal["assay.ingest/1"] = Field("assay.ingest/1", alias="schema")

    created: str = Field(description="ISO 8601, UTC")
    documents: tuple[FileDocument, ...]
    next_steps: tuple[str, ...] = Field((), description="commands that would prove what the files only suggest")

    @property
    def _about(self) -> str:
        return ", ".join(document.file.path for document in self.documents)
