"""JSON lines: appended as things happen, and readable after a crash in the middle of a line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from assay.harness.errors import EvidenceError
from assay.harness.evidence.run_file import RunRecord, check_run
from assay.harness.reading import regular_file, whole_file

_Line = TypeVar("_Line", bound=BaseModel)
LARGEST = 1 << 32
"""Largest file of lines in bytes. The answers of a long run take many."""


def lines_of(records: Iterable[BaseModel]) -> str:
    """Format each record as a line of JSON."""
    return "".join(record.model_dump_json() + "\n" for record in records)


def append(path: Path, records: Iterable[BaseModel]) -> None:
    """Append one line per record. The operating system has them when this returns.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    try:
        with path.open("a") as file:
            file.write(lines_of(records))
    except OSError as error:
        raise EvidenceError(
            f"{path} cannot be written: {error.strerror}.",
            "a writable folder on a disk with free space",
            "free some space, and resume with the same command",
        ) from error


def read(path: Path, kind: type[_Line], nonce: str = "") -> list[_Line]:
    """Read all lines of a file, if it exists. A truncated last line is skipped.

    Args:
        kind: the type of each line.
        nonce: the run's nonce, which each line must carry, or empty to accept any.

    Raises:
        EvidenceError: another line is not a valid `kind`, or is of another run, or the file cannot be read.
    """
    if not path.exists():
        return []
    try:
        text = whole_file(path, LARGEST).decode(errors="replace")
    except OSError as error:
        raise EvidenceError(
            f"{path} cannot be read: {error.strerror}.",
            "a file of JSON lines",
            "restore it, or run again with a new --out",
        ) from None
    complete = text[: text.rfind("\n") + 1]
    records = []
    for number, line in enumerate(complete.split("\n")[:-1], 1):  # splitlines would also split at U+2028
        try:
            records.append(kind.model_validate_json(line))
        except ValidationError as error:
            raise EvidenceError(
                f"{path}, line {number} is damaged: {error.errors()[0]['msg']}.",
                f"one {kind.__name__} as JSON",
                "remove the line, or start a new run with another --out",
            ) from None
    for run in {line.run for line in records if isinstance(line, RunRecord)}:
        check_run(path, run, nonce)
    return records


def drop_cut_line(path: Path) -> None:
    """Remove a last line that a killed run left unfinished, so that the next record starts on a new line."""
    if path.exists():
        regular_file(path)  # opening a pipe for reading and writing would wait forever
        with path.open("rb+") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
            os.fsync(file.fileno())
