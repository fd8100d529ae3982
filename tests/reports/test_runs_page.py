"""The document of ``assay runs``: dates, own errors, and the worst verdict of the newest runs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from assay.harness.judge.history import RunList, list_runs
from assay.reports.runs import _worst_text, runs_document
from assay.reports.summary import when
from assay.reports.write import write_reports


@pytest.fixture
def listed(tmp_path: Path, examples: ModuleType) -> RunList:
    """A run of each verdict."""
    for number, name in enumerate(("passing", "regression", "inconclusive", "error")):
        report = getattr(examples, name)().model_copy(update={"created": f"2026-11-2{number}T10:00:00+00:00"})
        write_reports(report, tmp_path / "runs" / name)
    return list_runs(tmp_path / "runs")


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


def test_the_document_has_the_worst_verdict_of_the_newest_runs(listed: RunList) -> None:
    passed, *_ = (run for run in listed.runs if run.verdict == "pass")
    others = [
        passed.model_copy(update={"treatment": {"backend": ("a", "other")} | more, "verdict": verdict, "created": at})
        for more, verdict, at in (
            ({}, "regression", "2026-11-01"),
            ({}, "pass", "2026-11-02"),
            ({"--page-size": ("1", "16")}, "inconclusive", "2026-11-03"),
        )
    ]
    document = runs_document(RunList(folder="runs", runs=(passed, *reversed(others))))
    assert document.verdict == "inconclusive", "an earlier regression is history, and the newest run of all passed"
    assert runs_document(listed.model_copy(update={"runs": ()})).verdict is None


@pytest.mark.parametrize(
    ("multiple", "text"), [(138.0, "140x"), (9.9e6, "9.9 million x"), (None, "–"), ("not finite", "not finite")]
)
def test_a_multiple_of_a_bound_is_a_number_or_words(multiple: Any, text: str) -> None:
    assert _worst_text(multiple) == text
