"""``compare.json`` of two or more runs of assay: what each has, side by side, and what each is beside the first."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from assay.harness.ingest.results.comparison import CompareResult
from assay.harness.judge.history import RunLine
from assay.harness.judge.report import ErrorGrid
from assay.harness.schema import RULE, Part
from assay.harness.verdict import Decided, Verdict

SCHEMA: Literal["assay.compare-runs/1"] = "assay.compare-runs/1"
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

    schema_id: Literal["assay.compare-runs/1"] = Field(SCHEMA, alias="schema")
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
