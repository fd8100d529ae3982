"""The record of ``assay compare A B``, for every kind of A and B."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, FiniteFloat

from assay.harness.ingest.result import FileRead, Timeline
from assay.harness.judge.answer_lengths import AnswerLengths
from assay.harness.judge.report import ErrorGrid, OwnError
from assay.harness.schema import RULE, Part
from assay.harness.statement import Statement, Worded
from assay.harness.verdict import Check, Decided, Verdict

ComparedKind = Literal["answers", "runs", "tensors", "trace"]
SIDES = ("A", "B")
UNDECIDED = ("off-scale", "no-direction")
"""Documents whose score cannot be decided by pairs: it is outside 0 to 1 and 0 to 100, such as a difference, or nobody records
which way is better.
"""
LISTED = 200
"""Most differing tensors, and most unpaired names, that a result lists. The rest are only counted."""


class Unpaired(Part):
    """Items of one task that were not compared, all for the same reason."""

    id: str = Field(description='stable, such as "other-prompt"')
    count: int
    examples: tuple[str, ...] = Field(description="the first few keys")


class AnswerFlip(Part):
    """A document and both sides' answers. The texts come from outside: never trust them."""

    task: str
    key: str
    direction: Literal["lost", "gained"]
    question: str = ""
    target: str
    a: str
    b: str


class ComparedTask(Part):
    """One score of one task, or, with an empty `task`, the first scores of all tasks together."""

    task: str
    metric: str = ""
    shots: int | None = None
    verdict: Verdict
    why: tuple[Statement, ...]
    # "exact": a single look; "betting": valid at any stopping time; "bootstrap": a perplexity, with loss = ratio - 1;
    # "unpaired": scores whose answers cannot be paired.
    test: Literal["exact", "betting", "bootstrap", "unpaired"] = "exact"
    pairs: int = 0
    again: int = Field(0, description="pairs beyond the first of a document; a document's pairs count once")
    a: float = Field(0.0, description="mean score")
    b: float = 0.0
    a_error: float | None = Field(None, description="standard error of the mean score; null if unknown")
    b_error: float | None = None
    lost: int = 0
    gained: int = 0
    loss: float = 0.0
    low: float = -1.0
    high: float = 1.0
    p_mcnemar: float = Field(1.0, description="two-sided, exact; for information only")
    p_inferior: float = 1.0
    p_regression: float = 1.0
    differs: tuple[Statement, ...] = Field((), description="why B asked a different question, and so cannot pass")
    unpaired: tuple[Unpaired, ...] = ()

    @property
    def changed(self) -> bool:
        """True if the score changed by more than the margin in either direction, or improved implausibly."""
        return any(why.values.get("outcome") == "changed" for why in self.why)

    @property
    def name(self) -> str:
        """The task with its metric, such as "gsm8k (exact_match,strict-match)"."""
        return f"{self.task} ({self.metric})" if self.metric else self.task


class ComparedAnswers(Part):
    """The answers of two results to the same documents."""

    margin: float = Field(description="largest loss that passes, as a share of 1")
    alpha: float
    overall: ComparedTask = Field(description="all tasks together")
    tasks: tuple[ComparedTask, ...] = ()
    flips: tuple[AnswerFlip, ...] = Field((), description="the first documents that one side answered better")
    lengths: AnswerLengths | None = Field(None, description="A is the reference; null if no lengths are recorded")


class CellAt(Part):
    """One cell of a tensor that differs: one index in all dimensions but the last."""

    tensor: str = Field(description="its key")
    layer: int | None = Field(description="null if outside the layers")
    boundary: str = Field(description='such as "attention", "o_proj", "mlp"; "other" if the name does not say')
    step: int = Field(description="number of the forward pass")
    index: tuple[int, ...] = Field(description="index in all dimensions but the last, or in those of a vector")
    axes: str = Field(description='a letter of "bth" (sequence, token, head) for each, or empty if --layout names none')
    error: OwnError = Field(description="the larger of sum |b - a| / sum |a| and max |b - a| / max |a|")
    bound: FiniteFloat | None = Field(description="null if every bit must be equal")


class TensorRow(Part):
    """One tensor that differs."""

    cells: int = Field(description="elements of all dimensions but the last")
    out_of_bounds: int
    first: CellAt | None = Field(description="null if all cells are within bounds")
    worst: CellAt


class ComparedTensors(Part):
    """Two files or folders of tensors, paired by name."""

    exact: bool
    pairs: int = Field(description="pairs of tensors that are not empty")
    identical: int = Field(description="pairs that are equal bit for bit")
    within: int = Field(description="pairs that differ within bounds")
    differing: int = Field(description="pairs out of bounds")
    empty: int = Field(0, description="pairs without elements, which show nothing")
    bytes: int = Field(description="bytes compared on both sides together")
    seconds: FiniteFloat
    first: CellAt | None = Field(description="the first cell out of bounds in depth order")
    worst: CellAt | None = Field(description="the cell with the largest error")
    tensors: tuple[TensorRow, ...] = Field(description=f"pairs that differ, in depth order: at most {LISTED}")
    not_compared: tuple[Statement, ...] = Field(description=f"tensors not compared, and why: at most {LISTED}")
    not_compared_count: int
    grids: tuple[ErrorGrid, ...] = Field((), description="the worst error by layer and head, one heat map per boundary")


class TraceDifference(Part):
    """Identical differences between two traces, in one or more places."""

    where: str = Field(description='track and kind of segment, such as "request 2, decode"')
    a: Statement | None = Field(description="A's action; null if it does nothing")
    b: Statement | None
    count: int
    lines: tuple[int, int] = Field(description="of the first; if a side does nothing, the line before; 0 if unknown")


class ComparedTraces(Part):
    """Two traces, step by step."""

    differences: int = 0
    kinds: tuple[TraceDifference, ...] = Field((), description="in order of first occurrence")
    kinds_left_out: int = 0
    timelines: tuple[Timeline, ...] = ()


class Comparison(Decided, Worded):
    __doc__ = f"Comparison of two results, tensor dumps or traces: is B as good as A, or equal to it? {RULE}"

    words = ("headline", "reasons", "covers")

    schema_id: Literal["assay.compare/5"] = Field("assay.compare/5", alias="schema")

    created: str = Field(description="ISO 8601, UTC")
    kind: ComparedKind
    why: tuple[Statement, ...] = Field(description="conclusions from the pairs, most important first")
    cause: Statement | None = Field(None, description="the fault that B's candidate kernel has and A's does not")
    a: FileRead
    b: FileRead
    notes: tuple[Statement, ...] = ()
    checks: tuple[Check, ...] = ()
    answers: ComparedAnswers | None = None
    tensors: ComparedTensors | None = None
    trace: ComparedTraces | None = None
    reproduce: str = ""

    @property
    def _about(self) -> str:
        return f"{self.a.path} and {self.b.path}"
