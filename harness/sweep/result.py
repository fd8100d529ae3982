"""The result of a sweep: what became of each cell, and where each combination stopped; `assay.harness.schema.RULE` holds."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from assay.harness.schema import RULE, Part
from assay.harness.verdict import Decided, Verdict

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
