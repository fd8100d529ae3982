from __future__ import annotations

import math

import pytest

from assay.harness.tracebacks import HEADER, Frame, Traceback, Tracebacks

FRAME, SOURCE, RAISED = '  File "/x/a.py", line 3, in run', "    return fn()", "mod.OddError: what now"


def read(*lines: str, patience: float = 1) -> tuple[list[Traceback], list[bool]]:
    ended: list[Traceback] = []
    tracebacks = Tracebacks(ended.append, patience)
    parts = [tracebacks.line(number, line) for number, line in enumerate(lines, 1)]
    tracebacks.end()
    return ended, parts


@pytest.mark.parametrize("prefix", ["", "[2026-01-24 18:15:48 TP0] worker: "])
def test_a_traceback_is_read_behind_the_same_prefix(prefix: str) -> None:
    (trace,), parts = read(*(prefix + line for line in (HEADER, FRAME, SOURCE, RAISED)), "next")
    assert trace == Traceback(1, 4, prefix, [Frame("/x/a.py", 3, "run")], RAISED, 4)
    assert parts == [True] * 4 + [False]


@pytest.mark.parametrize(("patience", "exception"), [(1, ""), (math.inf, RAISED)])
def test_a_traceback_survives_as_many_lines_of_others_as_it_may(patience: float, exception: str) -> None:
    (trace,), _ = read(HEADER, FRAME, "INFO", SOURCE, "[0] ready", RAISED, patience=patience)
    assert trace.exception == exception


def test_a_level_is_no_exception() -> None:
    (trace,), _ = read(HEADER, FRAME, "ERROR: stopped")
    assert (trace.last, trace.exception) == (2, "")


def test_a_second_header_ends_the_first_traceback() -> None:
    traces, _ = read(HEADER, FRAME, "it hit an exception: " + HEADER, FRAME, "KeyError: 'x'")
    assert [(trace.first, trace.before, trace.exception) for trace in traces] == [
        (1, "", ""),
        (3, "it hit an exception: ", "KeyError: 'x'"),
    ]


def test_the_innermost_frame_of_very_many_is_kept() -> None:
    frames = (f'  File "a.py", line {number}, in f' for number in range(1, 1_001))
    (trace,), _ = read(HEADER, *frames, "RecursionError")
    assert (len(trace.frames), trace.frames[0].line, trace.frames[-1].line) == (200, 1, 1_000)
