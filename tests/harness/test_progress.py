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
    out, clock = StringIO(), iter(range(0, 1000, 11))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with ProgressDisplay(Console(file=out, width=100)) as display:
        for done in range(1, 5):
            display.count("questions", done, 100)
    assert "questions: 4 of 100" in out.getvalue()
    assert "questions: 1 of 100" not in out.getvalue(), "not before it is long"


def test_a_terminal_has_one_line_that_is_gone_in_the_end() -> None:
    out = StringIO()
    with ProgressDisplay(Console(file=out, width=100, force_terminal=True)) as display:
        display.count("reference: questions", 1, 3)
        display.count("candidate: questions", 2, 3)
        display.say("starting")
        display.say("the candidate does not compute it", stays=True)
        display.count("candidate: questions", 3, 3)
        assert display._line is not None
        [task] = display._line.tasks
        assert (task.description, task.completed, task.total) == ("candidate: questions", 3, 3)
        display._line.refresh()
        assert "candidate: questions" in out.getvalue()
    kept = [line for line in out.getvalue().replace("\r", "\n").splitlines() if "the candidate does not compute it" in line]
    assert kept
    assert out.getvalue().endswith("\x1b[2K"), "the line is erased"


def test_what_had_run_is_said_at_an_interruption() -> None:
    out = StringIO()
    display = ProgressDisplay(Console(file=out, width=200))
    display.count("runs of the kernel", 312, 738)
    display.__exit__(KeyboardInterrupt, None, None)
    assert out.getvalue().endswith("Interrupted after runs of the kernel: 312 of 738.\n")


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
        while out.getvalue().count("\n") < 3:
            time.sleep(0.01)
    first, second, third = out.getvalue().splitlines()[:3]
    assert first.endswith("] starting reference and candidate: 0 s")
    assert second.endswith("starting reference and candidate: 0 s: reference: Loading␛[2J weights")
    assert third.endswith("starting reference and candidate: 0 s"), "old words are not said again"
    assert "\x1b" not in out.getvalue()
