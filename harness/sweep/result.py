"""The result of a sweep: what became of each cell, and where each combination stopped; `assay.harness.schema.RULE` holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import ConfigDict, Field

from assay.harness.evidence.cell import CellRecord
from assay.harness.schema import RULE, Part
from assay.harness.sweep.cells import Combination, SweepCell
from assay.harness.text import counted
from assay.harness.verdict import WORST_FIRST, Decided, Verdict

SCHEMA: Literal["assay.sweep/1"] = "assay.sweep/1"
STOPS: tuple[Verdict, ...] = ("regression", "error")
"""Verdicts with which a combination goes on to no later stage. One that is undecided does: servers may decide it."""


class SweptCell(Part):
    """A cell of a sweep, whether it ran or not."""

    key: str
    command: tuple[str, ...]
    axes: dict[str, str] = Field(description="value by name of axis, of those axes that the command takes")
    verdict: Verdict | None = Field(description="null for a cell that did not run")
    headline: str = Field("", description="the result in a sentence")
    problem: str = Field("", description="why there is no result, or why it did not run")
    seconds: float = 0.0
    attempts: int = 0
    worker: str = ""
    environment: dict[str, str] = Field({})
    earlier: bool = Field(False, description="whether an earlier sweep in this folder had run it")

    @property
    def stage(self) -> str:
        """The command's own name, such as "check"."""
        return self.command[0]


class SweptCombination(Part):
    """A combination of values of the axes: its verdict at each stage, and where it stopped."""

    axes: dict[str, str]
    cells: dict[str, str] = Field(description="key of its cell by stage, of those stages that it came to")
    stopped: str = Field("", description="the stage that it did not survive; empty if it survived all that ran")


class SweepResult(Decided):
    __doc__ = f"A sweep: its verdict is that of its worst cell. {RULE}"

    schema_id: Literal["assay.sweep/1"] = Field(SCHEMA, alias="schema")
    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    command: str = Field(description="the command that repeats it")
    folder: str
    created: str = Field(description="ISO 8601, UTC")
    seconds: float
    stages: tuple[str, ...]
    axes: dict[str, tuple[str, ...]]
    headline: str
    cells: tuple[SweptCell, ...]
    combinations: tuple[SweptCombination, ...]
    ended_early: str = Field("", description="why cells were left out; empty if none was")


def swept(cell: SweepCell, record: CellRecord | None, problem: str = "", earlier: bool = False) -> SweptCell:
    """Describe what became of a cell; without a record it did not run, or failed before it could leave one."""
    if record is None:
        return SweptCell(key=cell.key, command=cell.command, axes=dict(cell.axes), verdict=None, problem=problem)
    return SweptCell(
        key=cell.key, command=cell.command, axes=dict(cell.axes), verdict=record.verdict, headline=record.headline,
        problem=record.problem, seconds=record.seconds, attempts=record.attempts, worker=record.worker,
        environment=record.environment, earlier=earlier,
    )  # fmt: skip


def traced(combination: Combination, verdicts: Mapping[str, Verdict | None]) -> SweptCombination:
    """Describe how far a combination came.

    Args:
        combination: the combination.
        verdicts: by key of a cell; a cell that did not run has none.
    """
    reached, stopped = {}, ""
    for cell in combination.cells:
        if verdicts.get(cell.key) is None:
            break
        reached[cell.command[0]] = cell.key
        if verdicts[cell.key] in STOPS:
            stopped = cell.command[0]
            break
    return SweptCombination(axes=dict(combination.axes), cells=reached, stopped=stopped)


def worst(cells: Sequence[SweptCell]) -> Verdict:
    """Return the verdict of a sweep: the worst of its cells'. One that did not run is undecided."""
    verdicts = {cell.verdict or "inconclusive" for cell in cells}
    return next((verdict for verdict in WORST_FIRST if verdict in verdicts), "inconclusive")


def headline_of(cells: Sequence[SweptCell]) -> str:
    """Summarise a sweep in a sentence: "12 cells: 1 regression, 11 pass"."""
    counts = Counter(cell.verdict for cell in cells)
    parts = [f"{counts[verdict]} {verdict}" for verdict in WORST_FIRST if counts[verdict]]
    parts += [f"{counts[None]} not run"] if counts[None] else []
    return f"{counted(len(cells), 'cell')}: {', '.join(parts)}."
