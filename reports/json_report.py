"""``report.json`` and the JSON Schema that it must satisfy.

``python -m assay.reports.json_report`` regenerates ``reports/report.schema.json``, after a change of `assay.harness.judge.report`.
The schema's description states what may change within a version; `assay.harness.judge.report` reads these files.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from assay.harness.judge.report import NOT_FINITE, Report
from assay.harness.statement import WORDS
from assay.reports.wording.written import with_words

_SCHEMA_FILE = Path(__file__).parent / "report.schema.json"
_NUMBER = rf'(?:-?\d[-+.\deE]*|null|"{NOT_FINITE}")'
_NUMBERS = re.compile(rf"\[\n\s+{_NUMBER}(?:,\n\s+{_NUMBER})*\n\s+\]")


def to_json(report: Report) -> str:
    """Return the report as indented JSON, which the committed schema describes.

    If JSON cannot hold a value, it is replaced: a lone surrogate by U+FFFD, and a number that is not finite by null.

    Raises:
        pydantic.ValidationError: a value is not of its type, or a required number is not finite.
    """
    document = _writable(report.model_dump(by_alias=True, context={WORDS: with_words}))
    # Not jsonschema, which takes 0.2 s to import: tests check that the model, the committed schema and the output agree.
    Report.model_validate(document)
    return _one_line_rows(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)) + "\n"


def _one_line_rows(text: str) -> str:
    """Put each array of bare numbers on one line: a heat map of 128 x 128 is then 128 lines, not 16,384."""
    # A line end in a JSON text is never inside a string, so this cannot touch one.
    return _NUMBERS.sub(lambda match: " ".join(match[0].split()).replace("[ ", "[").replace(" ]", "]"), text)


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_writable(part) for part in value]
    if isinstance(value, dict):
        return {_writable(key): _writable(part) for key, part in value.items()}
    return value


def _json_schema() -> dict[str, Any]:
    """Generate the JSON Schema (draft 2020-12) of a written report from `Report`."""
    schema = Report.model_json_schema(by_alias=True, mode="serialization")
    id_ = f"urn:{Report.model_fields['schema_id'].default}"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": id_, **schema}


def _schema_text() -> str:
    """Return the correct content of `_SCHEMA_FILE`."""
    return json.dumps(_json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    _SCHEMA_FILE.write_text(_schema_text(), encoding="utf-8")
