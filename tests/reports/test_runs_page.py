"""The document of ``assay runs``: dates, own errors, and the newest run."""

from __future__ import annotations

from typing import Any

import pytest

from assay.harness.judge.history import RunLine, RunList
from assay.reports.runs import _worst_text, runs_document
from assay.reports.summary import when


@pytest.mark.parametrize(
    ("created", "shown"),
    [
        ("2026-11-22T20:43:19+00:00", "2026-11-22 20:43 UTC"),
        ("2026-11-22T20:43:19Z", "2026-11-22 20:43 UTC"),
        ("2026-11-22T20:43:19", "2026-11-22 20:43"),
        ("Nov 22\n20:43", "Nov 22 20:43"),
    ],
)
def test_a_time_is_shown_to_the_minute(created: str, shown: str) -> None:
    assert when(created) == shown


def test_the_newest_run_is_the_headline() -> None:
    runs = [
        RunLine(folder=f"runs/{n}", verdict=verdict, created=f"2026-11-2{n}") for n, verdict in ((3, "pass"), (2, "regression"))
    ]
    document = runs_document(RunList(folder="runs", runs=tuple(runs)))
    assert (document.verdict, document.headline, document.code) == ("pass", "The newest: pass.", 0)
    assert runs_document(RunList(folder="runs", runs=())).verdict is None


@pytest.mark.parametrize(
    ("multiple", "text"), [(138.0, "140 ×"), (9.9e6, "9,900,000 ×"), (None, "–"), ("not finite", "not finite")]
)
def test_a_multiple_of_a_bound_is_a_number_or_words(multiple: Any, text: str) -> None:
    assert _worst_text(multiple) == text
