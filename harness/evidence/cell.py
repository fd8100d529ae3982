"""``cell.json``: one cell of a sweep, a command of assay that has ended. It is written last: a cell without it has not ended."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from assay.harness.errors import EvidenceError
from assay.harness.files import write_whole
from assay.harness.schema import read_json
from assay.harness.verdict import Decided

SCHEMA: Literal["assay.cell/1"] = "assay.cell/1"
CELLS = "cells"
"""Folder of a sweep with a folder for each cell, named by its key."""
FILE = "cell.json"
RESULT, LOG = "result.json", "log.txt"
"""Files of a cell beside its record: what the command printed with ``--json``, and everything else that it printed."""
OUT = "out"
"""Folder of the evidence of a cell's command."""


class CellRecord(Decided):
    """A cell of a sweep, in ``<sweep>/cells/<key>/``. Its exit code is that of its verdict."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)

    schema_id: Literal["assay.cell/1"] = Field(SCHEMA, alias="schema")
    key: str = Field(description="hash of what decides the cell: command, code under test, environment, device kind")
    command: tuple[str, ...] = Field(description='words of the command, such as "check", "mine:forward", "--size=full"')
    axes: dict[str, str] = Field(
        description="value by name of the sweep's axis, of axes that it takes, or the command that recorded its pack"
    )
    headline: str = Field("", description="the result in a sentence; empty where there is none")
    problem: str = Field("", description="why there is no result, where the verdict is error; else empty")
    seconds: float = Field(0.0, description="from the first attempt's start to the end, on the worker")
    attempts: int = Field(1, description="times that it was started: more than once where workers were lost")
    worker: str = Field("", description="name of the machine on which it ended")
    environment: dict[str, str] = Field(
        {}, description="versions there: Python, assay, packages that can change a result"
    )
    created: str = Field(description="when it ended: ISO 8601, UTC")
    evidence: dict[str, str] = Field(
        {}, description="SHA-256 by path in the cell's folder, of each file of its evidence"
    )

    @property
    def stage(self) -> str:
        """The command's own name, such as "check"."""
        return self.command[0]


def read_cell(folder: Path) -> CellRecord | None:
    """Read the record of a cell; None if it has not ended, or if its record is damaged: then it runs again."""
    try:
        return read_json(folder / FILE, CellRecord, "run the sweep again")
    except EvidenceError:
        return None


def write_cell(folder: Path, record: CellRecord) -> None:
    """Write the record of a cell, as the last of its files."""
    write_whole(folder / FILE, record.model_dump_json(indent=1))
