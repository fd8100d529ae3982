"""Two traces compared: an excerpt of a real engine trace with itself, edited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from assay.harness.errors import UsageError
from assay.harness.ingest import trace_diff as module
from assay.harness.ingest.comparison import Comparison
from assay.harness.ingest.recognise import compare
from assay.harness.ingest.tensor_diff import TensorRule
from assay.harness.statement import Statement, state

TRACES = Path(__file__).parents[2] / "data" / "traces"
ENGINE = TRACES / "mlc_engine.txt"
LINES = ENGINE.read_text().splitlines()
FORK = next(i for i, line in enumerate(LINES) if "fork" in line)


def diff_files(a: Path, b: Path) -> Comparison:
    return compare(a, b, 0.02, TensorRule())


def differences(result: Comparison) -> int:
    assert result.trace is not None
    return result.trace.differences


def does(what: str, name: str = "") -> Statement:
    return state("trace-does", does=what, name=name)


FORKS, ADDS = (does("call", f"kv_cache_{name}_sequence_func_") for name in ("fork", "add"))


def first(result: Comparison) -> tuple[Any, ...]:
    """The subject of the first difference, what each trace does, and the lines."""
    (why,) = result.why
    assert why.id == "traces-differ"
    return tuple(why.values[name] for name in ("subject", "a", "b", "lines"))


def edited(tmp_path: Path, lines: list[str]) -> Comparison:
    path = tmp_path / "b.txt"
    path.write_text("\n".join(lines))
    return diff_files(ENGINE, path)


def test_two_equal_traces_pass(tmp_path: Path) -> None:
    result = edited(tmp_path, LINES)
    assert (result.verdict, result.exit_code, differences(result)) == ("pass", 0, 0)
    assert result.why == (state("traces-equal", requests=2, segments=10, steps=120),)


def test_a_fork_in_place_of_an_addition_is_named_with_both_lines(tmp_path: Path) -> None:
    lines = ["[debug] one more line", *LINES]
    lines[FORK + 1] = lines[FORK + 1].replace("fork", "add")
    result = edited(tmp_path, lines)
    assert first(result) == ("request 2", FORKS, ADDS, [FORK + 1, FORK + 2])
    assert result.exit_code == 1
    (kind,) = result.trace.kinds if result.trace else ()
    assert (kind.a, kind.b, kind.count, kind.lines) == (FORKS, ADDS, 1, (FORK + 1, FORK + 2))


def test_a_step_that_only_one_trace_has(tmp_path: Path) -> None:
    lines = list(LINES)
    del lines[31]
    assert first(edited(tmp_path, lines)) == ("request 1", does("action", "Batch decode"), None, [32, 31])
    lines = list(LINES)
    lines.insert(32, "[engine debug] kv_cache_popn_func_")
    assert first(edited(tmp_path, lines)) == ("request 1", None, does("call", "kv_cache_popn_func_"), [32, 33])


def test_a_request_that_only_one_trace_has(tmp_path: Path) -> None:
    second = next(i for i, line in enumerate(LINES) if "SECOND" in line)
    result = edited(tmp_path, LINES[:second])
    assert first(result) == ("request 2", does("is"), None, [second + 2, 0])


def test_another_answer(tmp_path: Path) -> None:
    result = edited(tmp_path, [line.replace("friendly and respectful", "rude") for line in LINES])
    subject, a, b, lines = first(result)
    assert (subject, lines) == ("request 1", [77, 77])
    assert "friendly" in a.values["name"]
    assert "rude" in b.values["name"]
    assert differences(result) == 1


def test_equal_as_far_as_it_was_understood_is_not_equal(tmp_path: Path) -> None:
    lines = list(LINES)
    lines.insert(30, "[engine debug] teleport")
    result = edited(tmp_path, lines)
    assert (result.verdict, result.exit_code) == ("inconclusive", 3)
    assert result.why == (state("traces-not-understood", unread=[(str(tmp_path / "b.txt"), 1)]),)


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("[engine debug] EngineReloadImpl\n")
    result = diff_files(ENGINE, empty)
    assert result.exit_code == 3
    assert result.why == (state("trace-without-steps", path=str(empty)),)
    for other in (tmp_path / "nowhere", Path(__file__)):
        with pytest.raises(UsageError):
            diff_files(ENGINE, other)


def test_sequences_that_are_too_long_to_align_are_compared_by_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_MOST_COMPARED", 0)
    result = edited(tmp_path, LINES[:30] + LINES[31:36] + LINES[37:60] + LINES[61:])
    assert (result.verdict, first(result)[3]) == ("regression", [31, 31])
    assert 3 < differences(result) < 60


def test_a_trace_that_is_named_twice_is_refused_and_the_spelling_of_marks_makes_no_difference(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was named twice"):
        diff_files(ENGINE, ENGINE)
    assert edited(tmp_path, [line.replace("_SEGMENT", " SEGMENT") for line in LINES]).verdict == "pass"


def test_a_segment_that_only_one_trace_has(tmp_path: Path) -> None:
    result = edited(tmp_path, LINES[:40] + LINES[54:])
    assert differences(result) == 1
    assert first(result)[1:3] == (state("one-more-segment", kind="decode", steps=14), None)
