"""Reads a ``report.json``."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from assay.harness.errors import EvidenceError
from assay.harness.judge.decide import SCHEMA
from assay.harness.judge.report import Report
from assay.harness.reading import reading, whole_file


def read_report(path: Path) -> Report:
    """Read a ``report.json``.

    Raises:
        EvidenceError: the file is missing, is not JSON, or is not a report of this schema.
    """
    with reading(path, "report of a run"):
        return _read_report(path)


def _read_report(path: Path) -> Report:
    try:
        content = whole_file(path)
    except OSError as error:
        raise EvidenceError(f"{path} cannot be read: {error}.", "a report.json of a run", "check the path") from None
    return parse_report(content, str(path))


def parse_report(content: bytes, path: str) -> Report:
    """Read the content of a ``report.json``.

    Args:
        content: of the file.
        path: its path or URL, for an error.

    Raises:
        EvidenceError: it is not JSON, or is not a report of this schema.
    """
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{path} cannot be read: {error}.", "a report.json of a run", "check the path") from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(schema, str) or not schema.startswith(f"{SCHEMA.partition('/')[0]}/"):
        raise EvidenceError(
            f"{path} is no report: it has no schema of one.", "a report.json of a run", "check the path"
        )
    if schema != SCHEMA:
        raise EvidenceError(
            f"{path} has the schema {schema!r}.",
            f"{SCHEMA!r}, which this version of assay reads",
            "show it with the assay that wrote it, or rebuild it with this one: assay report RUN",
        )
    try:
        return Report.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise EvidenceError(
            f"{path} is damaged at {where}: {first['msg']}.", f"a report of {schema!r}", "run the comparison again"
        ) from None
