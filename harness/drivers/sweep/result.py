"""What a sweep leaves: ``cells/<key>/cell.json`` for each cell, and the result of all; `assay.harness.schema.RULE` holds."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from assay.harness.schema import RULE, Part
from assay.harness.verdict import Decided, Verdict

SCHEMA: Literal["assay.sweep/2"] = "assay.sweep/2"
CELLS, CELL, OUT = "cells", "cell.json", "out"
"""Folder of a sweep with a folder for each cell, named by its key; the cell's record there, and the evidence of its command."""
RESULT, LOG = "result.json", "log.txt"
"""Files of a cell beside its record: what the command printed with ``--json``, and everything else that it printed."""


class SweptCell(Part):
    """A cell of a sweep: a command of assay for one combination of the values of the axes."""

    key: str = Field(description="hash of what decides it: command, code under test, files, environment, device kind")
    command: tuple[str, ...] = Field(description='words of the command, such as "check", "mine:forward", "--size=full"')
    axes: dict[str, str] = Field(description="value by name of axis")
    verdict: Verdict | None = Field(None, description="null for a cell that did not run")
    headline: str = Field("", description="the result in a sentence")
    problem: str = Field("", description="why there is no result")
    seconds: float = 0.0
    worker: str = Field("", description="name of the machine on which it ran")
    environment: dict[str, str] = Field(
        {}, description="versions there: Python, assay, packages that can change a result"
    )
    created: str = Field("", description="when it ended: ISO 8601, UTC")
    earlier: bool = Field(False, description="whether an earlier sweep in this folder had run it")


class SweepResult(Decided):
    __doc__ = f"A sweep: its verdict is that of its worst cell. {RULE}"

    schema_id: Literal["assay.sweep/2"] = Field(SCHEMA, alias="schema")

    command: str = Field(description="the command that repeats it")
    folder: str
    created: str = Field(description="ISO 8601, UTC")
    seconds: float
    axes: dict[str, tuple[str, ...]]
    headline: str
    cells: tuple[SweptCell, ...]
    interrupted: bool = False
