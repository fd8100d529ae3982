"""Two traces compared: an excerpt of a real engine trace with itself, edited."""

from __future__ import annotations

from pathlib import Path

import pytest

from assay.harness.errors import UsageError
from assay.harness.ingest import trace_diff as module
from assay.harness.ingest.comparison import Comparison
from assay.harness.ingest.recognise import compare
from assay.harness.ingest.tensor_diff import TensorRule

TRACES = Path(__file__).parents[2] / "data" / "traces"
ENGINE = TRACES / "mlc_engine.txt"
LINES = ENGINE.read_text().splitlines()
FORK = next(i for i, line in enumerate(LINES) if "fork" in line)


def diff_files(a: Path, b: Path) -> Comparison:
    return compare(a, b, 0.02, TensorRule())


def differences(result: Comparison) -> int:
    assert result.trace is not None
    return result.trace.differences


def edited(tmp_path: Path, lines: list[str]) -> Comparison:
    path = tmp_path / "b.txt"
    path.write_text("\n".join(lines))
    return diff_files(ENGINE, path)


def test_two_equal_traces_pass(tmp_path: Path) -> None:
    result = edited(tmp_path, LINES)
    assert (result.verdict, result.exit_code, differences(result)) == ("pass", 0, 0)
    assert result.headline == "Both traces take the same steps: 2 requests, 10 segments, 120 steps."


def test_a_fork_in_place_of_an_addition_is_named_with_both_lines(tmp_path: Path) -> None:
    lines = ["[debug] one more line", *LINES]
    lines[FORK + 1] = lines[FORK + 1].replace("fork", "add")
    result = edited(tmp_path, lines)
    assert result.headline == f"Request 2 forks its sequence (line {FORK + 1}) where the other adds one (line {FORK + 2})."
    assert result.exit_code == 1
    assert [(one.first, one.text) for one in (result.trace.cites if result.trace else ())] == [
        (FORK + 1, "first trace: forks its sequence"),
        (FORK + 2, "second trace: adds one"),
    ]


def test_a_step_that_only_one_trace_has(tmp_path: Path) -> None:
    lines = list(LINES)
    del lines[31]
    headline = edited(tmp_path, lines).headline
    assert headline == "Request 1 polls Batch decode in the first trace (line 32) and not in the second (after line 31)."
    lines = list(LINES)
    lines.insert(32, "[engine debug] kv_cache_popn_func_")
    headline = edited(tmp_path, lines).headline
    assert headline == "Request 1 calls kv_cache_popn_func_ in the second trace (line 33) and not in the first (after line 32)."


def test_a_request_that_only_one_trace_has(tmp_path: Path) -> None:
    second = next(i for i, line in enumerate(LINES) if "SECOND" in line)
    result = edited(tmp_path, LINES[:second])
    assert result.headline == f"Request 2 is there in the first trace (line {second + 2}) and not in the second."


def test_another_answer(tmp_path: Path) -> None:
    result = edited(tmp_path, [line.replace("friendly and respectful", "rude") for line in LINES])
    assert result.headline.startswith("Request 1 answers ")
    assert "(line 77)" in result.headline
    assert differences(result) == 1


def test_equal_as_far_as_it_was_understood_is_not_equal(tmp_path: Path) -> None:
    lines = list(LINES)
    lines.insert(30, "[engine debug] teleport_func_")
    result = edited(tmp_path, lines)
    assert (result.verdict, result.exit_code) == ("inconclusive", 3)
    assert "not understood" in result.headline


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("[engine debug] EngineReloadImpl\n")
    result = diff_files(ENGINE, empty)
    assert result.exit_code == 3
    assert "no request" in result.headline
    for other in (tmp_path / "nowhere", Path(__file__)):
        with pytest.raises(UsageError):
            diff_files(ENGINE, other)


def test_sequences_that_are_too_long_to_align_are_compared_by_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_MOST_COMPARED", 0)
    result = edited(tmp_path, LINES[:30] + LINES[31:36] + LINES[37:60] + LINES[61:])
    assert result.verdict == "regression"
    assert "differ too much to align" in " ".join(result.notes)
    assert "compared by their order alone" in " ".join(result.notes)


def test_a_trace_that_is_named_twice_is_refused_and_the_spelling_of_marks_makes_no_difference(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="was named twice"):
        diff_files(ENGINE, ENGINE)
    assert edited(tmp_path, [line.replace("_SEGMENT", " SEGMENT") for line in LINES]).verdict == "pass"


def test_a_segment_that_only_one_trace_has(tmp_path: Path) -> None:
    result = edited(tmp_path, LINES[:40] + LINES[54:])
    assert differences(result) == 1
    assert "has one more segment, decode with 14 steps in the first trace (line " in result.headline
