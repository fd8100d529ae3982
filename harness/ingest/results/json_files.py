"""JSON that other tools wrote: whole files, and a row a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from assay.harness.errors import EvidenceError
from assay.harness.ingest.results.result_set import ReadResults
from assay.harness.ingest.source_file import SourceFile
from assay.harness.reading import whole_file


def json_object(data: bytes | str, where: str) -> dict[str, Any]:
    """Parse an object. NaN is admitted, which some tools write.

    Args:
        data: the text.
        where: its file, for the error.

    Raises:
        EvidenceError: it is damaged, or no object.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{where} is not JSON: {error}.", "an undamaged file", "copy it again") from None
    if not isinstance(found, dict):
        raise EvidenceError(f"{where} is not an object.", "an undamaged file", "copy it again")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a file; empty if there is no such file.

    Raises:
        EvidenceError: it is damaged, or no object.
    """
    return json_object(whole_file(path), str(path)) if path.is_file() else {}


def json_rows(source: SourceFile, keys: Sequence[str], reading: ReadResults) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file with one a line, with their lines; what is no object with these keys is counted as unread."""
    for line in source.lines():
        try:
            row = json.loads(line.text)
        except (ValueError, RecursionError) as error:
            reading.refuse(line.number, f"{error}: {line.text}")
            continue
        if not isinstance(row, dict) or not all(key in row for key in keys):
            reading.refuse(line.number, line.text)
            continue
        reading.read += 1
        yield line.number, row
