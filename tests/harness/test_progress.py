from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from assay.harness import progress
from assay.harness.progress import ProgressDisplay


def test_plain_lines_where_there_is_no_terminal() -> None:
    out = StringIO()
    with ProgressDisplay(Console(file=out, width=100)) as display:
        display.say("Starting [both].")
        for done in range(1, 4):
            display.count("candidate: questions", done, 3)
    lines = out.getvalue().splitlines()
    assert [line.split("] ", 1)[1] for line in lines] == ["Starting [both].", "candidate: questions: 3 of 3"]
    assert "\x1b" not in out.getvalue()


def test_a_long_stage_reports_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    out, clock = StringIO(), iter(range(0, 1000, 6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with ProgressDisplay(Console(file=out, width=100)) as display:
        for done in range(1, 5):
            display.count("questions", done, 100)
    assert "questions: 4 of 100" in out.getvalue()
    assert "questions: 1 of 100" not in out.getvalue(), "not before it is long"


def test_bars_on_a_terminal() -> None:
    out = StringIO()
    with ProgressDisplay(Console(file=out, width=100, force_terminal=True)) as display:
        display.count("candidate: questions", 3, 3)
        display.say("done")
    text = out.getvalue()
    assert "candidate: questions" in text
    assert "3/3" in text
    assert "━" in text
