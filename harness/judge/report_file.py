"""Reads a ``report.json``: one of the current schema, or of version 1, which is upgraded."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from assay.harness.errors import EvidenceError
from assay.harness.judge.report import SCHEMA, Report
from assay.harness.judge.upgrade import upgrade
from assay.harness.reading import reading, whole_file

VERSION_1 = "assay.report/1"


def read_report(path: Path) -> Report:
    """Read a ``report.json`` of this version or of version 1, which is upgraded.

    Raises:
        EvidenceError: the file is missing, is not JSON, or is not a report of a known schema.
    """
    with reading(path, "report of a run"):
        return _read_report(path)


def _read_report(path: Path) -> Report:
    try:
        document = json.loads(whole_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise EvidenceError(f"{path} cannot be read: {error}.", "a report.json of a run", "check the path") from None
    found = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(found, str) or not found.startswith(f"{SCHEMA.partition('/')[0]}/"):
        raise EvidenceError(
            f"{path} is no report: it has no schema of one.", "a report.json of a run", "check the path"
        )
    if found not in (SCHEMA, VERSION_1):
        raise EvidenceError(
            f"{path} has the schema {found!r}.",
            f"{SCHEMA!r} or {VERSION_1!r}, which this version of assay reads",
            "show it with the assay that wrote it, or rebuild it with this one: assay report RUN",
        )
    try:
        return Report.model_validate(document if found == SCHEMA else upgrade(document))
    except (KeyError, TypeError) as error:
        raise EvidenceError(
            f"{path} is damaged: {error!r}.", f"a report of {found!r}", "run the comparison again"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise EvidenceError(
            f"{path} is damaged at {where}: {first['msg']}.", f"a report of {found!r}", "run the comparison again"
        ) from None
