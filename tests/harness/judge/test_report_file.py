from __future__ import annotations

from pathlib import Path

import pytest

from assay.harness.errors import EvidenceError
from assay.harness.judge.report import read_report


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("not json", "cannot be read"),
        ("[]", "is no report"),
        ('{"schema": "assay.report/9"}', "assay.report/9"),
        ('{"schema": "assay.report/2"}', "damaged at verdict"),
    ],
)
def test_the_reader_says_what_is_wrong(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EvidenceError, match=says):
        read_report(path)
