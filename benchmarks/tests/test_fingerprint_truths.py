"""The ground truths of fingerprints are judged."""

from __future__ import annotations

import pytest

from benchmarks.fingerprint_truths import as_expected


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("B: rope_theta is 10,000 (exit code 1)", "yes"),
        ("B: rope_theta is 10,000 (exit code 0)", "no: B: rope_theta is .*"),
        ("no difference", "no: B: rope_theta is .*"),
        ("not run: needs --server", "not run"),
    ],
)
def test_another_line_or_exit_code_is_not_as_expected(line: str, says: str) -> None:
    assert as_expected(line, "B: rope_theta is .*") == says
