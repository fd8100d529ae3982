from __future__ import annotations

import threading
import time
from io import StringIO

import pytest
from rich.console import Console

from assay.harness import progress
from assay.harness.progress import ProgressDisplay, duration


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


def test_what_is_left_is_estimated_from_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    out, now = StringIO(), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    display = ProgressDisplay(Console(file=out, width=60), interval_s=0.0)
    for done in range(11, 15):  # ten were done by an earlier run: they tell nothing of the rate
        now[0] += 5.0
        display.count("reference: questions", done, 100)
        display.count("candidate: questions", done, 100, may_stop=True)
    lines = out.getvalue().splitlines()
    assert lines[-2].endswith("reference: questions: 14 of 100, about 7 min 10 s left")
    assert lines[-1].endswith("candidate: questions: 14 of 100, at most 7 min 10 s left")
    now[0] += 1.0
    display.count("reference: questions", 100, 100)
    assert out.getvalue().splitlines()[-1].endswith("reference: questions: 100 of 100")


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.4, 59, 60, 213, 7500)] == ["0 s", "59 s", "1 min 0 s", "3 min 33 s", "2 h 5 min"]


def test_a_wait_says_for_how_long_and_the_last_words() -> None:
    out, asked = StringIO(), threading.Event()

    def last_words() -> str:
        if asked.is_set():
            return "reference: Loading\x1b[2J weights\n"
        asked.set()
        return ""

    with (
        ProgressDisplay(Console(file=out, width=40), interval_s=0.01) as display,
        display.waiting("starting reference and candidate", last_words),
    ):
        while out.getvalue().count("\n") < 2:
            time.sleep(0.01)
    first, second = out.getvalue().splitlines()[:2]
    assert first.endswith("] starting reference and candidate: 0 s")
    assert second.endswith("starting reference and candidate: 0 s: reference: Loading␛[2J weights")
    assert "\x1b" not in out.getvalue()


def test_a_wait_on_a_terminal_leaves_no_bar_behind() -> None:
    out = StringIO()
    with ProgressDisplay(Console(file=out, width=100, force_terminal=True)) as display:
        with display.waiting("starting reference"):
            assert [task.description for task in display._bars.tasks] == ["starting reference"]
        assert not display._bars.tasks
