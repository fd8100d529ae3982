"""``compare.json``: the comparison of two results, or of two or more runs of assay; and one side of it, read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from assay.harness.compare.answer_lengths import AnswerLengths
from assay.harness.errors import UsageError
from assay.harness.ingest.recognise import reader_of, readers
from assay.harness.ingest.result import FormatReader
from assay.harness.ingest.results.pairing import Unpaired
from assay.harness.ingest.results.result_set import ReadResults
from assay.harness.ingest.source_file import SourceFile
from assay.harness.judge.history import RunLine
from assay.harness.judge.report import ErrorGrid
from assay.harness.reading import reading
from assay.harness.schema import RULE, Part
from assay.harness.verdict import Check, Decided, Verdict

ResultKind = Literal["answers", "latencies", "tests", "runs"]
COVERS: dict[ResultKind, str] = {
    "answers": (
        "A pass covers the scores that these files state, on the documents that were paired. It does not show which kernel "
        "computed the answers, that both servers differed in nothing else, or that long, cached or batched requests occurred: "
        "assay run does."
    ),
    "latencies": (
        "A pass covers the requests of this load, as the client timed them. It does not show that the answers were right, or "
        "that both servers ran on equal, idle machines: assay bench does."
    ),
    "runs": (
        "A pass covers the candidates' answers to the questions that both runs asked, of a new run that passes by itself. Each "
        "run's own report lists which kernels ran."
    ),
    "tests": "A pass covers the outcomes of these tests. It does not show that they can fail, or what they ran on.",
}


class ComparedSide(Part):
    """One of the two results."""

    name: Literal["A", "B"]
    path: str
    format: str = Field(description="id of the reader")
    tool: str
    version: str = ""
    model: str = ""
    read: int = Field(description="units that were understood")
    unread: int
    unit: str
    notes: tuple[str, ...] = ()


class AnswerFlip(Part):
    """A document that one side got right, or more right, and the other did not. Texts come from outside: never trust them."""

    task: str
    key: str
    direction: Literal["lost", "gained"]
    question: str = ""
    target: str
    a: str
    b: str


class ComparedTask(Part):
    """One task, or all tasks together (`task` is then empty)."""

    task: str
    metric: str = ""
    shots: int | None = None
    verdict: Verdict
    why: str
    test: Literal["exact", "betting"] = Field(
        "exact", description="exact: one look; betting: valid whenever one stopped"
    )
    pairs: int = 0
    again: int = Field(0, description="documents that both hold more than once; each counts once")
    a: float = Field(0.0, description="mean score")
    b: float = 0.0
    lost: int = 0
    gained: int = 0
    loss: float = 0.0
    low: float = -1.0
    high: float = 1.0
    p_mcnemar: float = Field(1.0, description="two-sided, exact; it decides nothing")
    p_inferior: float = 1.0
    p_regression: float = 1.0
    refused: tuple[str, ...] = Field((), description="why it cannot be compared at all")
    unpaired: tuple[Unpaired, ...] = ()


class ComparedLatency(Part):
    """The ratio of one quantity, B over A, request by request."""

    id: str
    title: str
    verdict: Verdict
    why: str
    pairs: int
    ratio: float | None
    low: float | None
    high: float | None
    floor: float | None = Field(None, description="A over A, from a second run of A; null without one")
    a_median: float | None = Field(description="seconds")
    b_median: float | None


class OutcomeChange(Part):
    """A test with another outcome."""

    test: str
    a: str
    b: str


class CompareResult(Decided):
    __doc__ = f"Two results. {RULE}"

    schema_id: Literal["assay.compare/1"] = Field("assay.compare/1", alias="schema")
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    created: str = Field(description="ISO 8601, UTC")
    kind: ResultKind
    headline: str
    reasons: tuple[str, ...]
    covers: str = Field(description="what the verdict covers, and what it does not")
    margin: float = Field(description="largest loss that passes, as a share of 1")
    alpha: float
    a: ComparedSide
    b: ComparedSide
    checks: tuple[Check, ...]
    overall: ComparedTask | None = Field(None, description="all tasks together; null for anything but answers")
    tasks: tuple[ComparedTask, ...] = ()
    flips: tuple[AnswerFlip, ...] = Field((), description="the first of them")
    lengths: AnswerLengths | None = Field(None, description="A is the reference; null where no lengths are recorded")
    latencies: tuple[ComparedLatency, ...] = ()
    outcomes: tuple[OutcomeChange, ...] = ()
    reproduce: str = ""


def requirement(id: str, title: str, wrong: str, right: str, settles: str) -> Check:
    """Make a requirement of a pass: missing where something is wrong.

    Args:
        id: of the check.
        title: what is required.
        wrong: what is wrong, without its full stop; empty if nothing is.
        right: what was found otherwise.
        settles: what to do about it.
    """
    if wrong:
        return Check(id=id, title=title, status="missing", found=f"{wrong}.", settles=settles)
    return Check(id=id, title=title, status="ok", found=right)


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


Group = Literal["verdict", "questions", "own error", "latency", "measured", "environment"]


class RunColumn(Part):
    """One run of the comparison."""

    name: str = Field(description="a letter; A is the accepted run")
    run: RunLine
    compared: Verdict | None = Field(None, description="pass: as good as A; null for A itself")
    sentence: str = Field("", description="what it is beside A, and why; empty for A itself")


class RunCell(Part):
    """The entry of one run in a row."""

    text: str = Field(description="a dash where the run does not have it")
    worse: bool | None = Field(None, description="than A; null where neither is better, or the difference is noise")


class RunRow(Part):
    """One quantity, of all runs."""

    group: Group
    id: str
    title: str
    cells: tuple[RunCell, ...] = Field(description="one for each run")
    differs: bool


class HeadMaps(Part):
    """Own errors by layer and head under one condition, of all runs."""

    where: str
    grids: tuple[ErrorGrid | None, ...] = Field(description="one for each run; null where it was not observed")


class RunsComparison(Decided):
    __doc__ = f"Two or more runs: is each as good as the first? {RULE}"

    schema_id: Literal["assay.compare-runs/1"] = Field("assay.compare-runs/1", alias="schema")
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    created: str = Field(description="ISO 8601, UTC")
    headline: str
    covers: str
    runs: tuple[RunColumn, ...]
    rows: tuple[RunRow, ...]
    maps: tuple[HeadMaps, ...]
    pairs: tuple[CompareResult, ...] = Field(description="A with each of the others, in their order")
    reproduce: str = ""

    @property
    def changed(self) -> list[RunRow]:
        """The rows in which any run differs from another."""
        return [row for row in self.rows if row.differs]
