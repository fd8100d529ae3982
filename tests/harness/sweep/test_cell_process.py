"""A cell's process: verdicts, limits, and what is left of it."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.harness.evidence.cell import LOG, read_cell
from assay.harness.sweep.cell_process import CellWork, _Cancelled, finished
from assay.harness.sweep.executor import Workplace
from assay.harness.sweep.spec import Limits
from assay.harness.verdict import Verdict

pytestmark = pytest.mark.usefixtures("stand_in")
MakePlace = Callable[..., Workplace]


def work(does: str, command: str = "check", **limits: float) -> CellWork:
    return CellWork("key", (command, does), {"candidate": does}, Limits.model_validate(limits))


@pytest.mark.parametrize(
    ("does", "verdict", "told"),
    [
        ("pass", "pass", "it is a pass"),
        ("regression", "regression", "it is a regression"),
        ("inconclusive", "inconclusive", "it is a inconclusive"),
        ("misused", "error", "Exit code 2: There is no such thing."),
        ("killed", "error", "Its process was killed by SIGKILL: working"),
        ("says-nothing", "error", "It exited with 0, and its result does not say that it passed"),
        ("claims=regression", "error", "It exited with 0, and its result does not say that it passed"),
    ],
)
def test_a_verdict_is_what_exit_code_and_result_say_both(place: MakePlace, does: str, verdict: Verdict, told: str) -> None:
    record = work(does)(place())
    assert record.verdict == verdict
    assert told in (record.headline if verdict in ("pass", "regression", "inconclusive") else record.problem)
    assert read_cell(place().folder) == record


def test_an_ended_cell_is_not_run_again_unless_its_evidence_changed(place: MakePlace) -> None:
    first = work("pass")(place())
    assert work("pass")(place(attempt=2)) == first
    result = place().folder / "result.json"
    result.write_text(result.read_text() + " ")
    assert finished(place().folder, "key") is None
    assert work("pass")(place(attempt=2)).attempts == 2
    assert finished(place().folder, "another key") is None


def test_a_cell_that_failed_runs_again(place: MakePlace) -> None:
    assert work("misused")(place()).verdict == "error"
    assert finished(place().folder, "key") is None


@pytest.mark.parametrize(
    ("does", "limits", "told"),
    [
        ("sleeps=600", {"minutes": 0.03}, "it did not end within 0.03 min"),
        ("eats=60", {"memory_gb": 0.2, "minutes": 1}, "its processes took more than 0.2 GB of memory"),
        ("writes", {"disk_gb": 0.05, "minutes": 1}, "its files took more than 0.05 GB"),
    ],
)
def test_a_cell_that_takes_too_much_ends_alone(place: MakePlace, does: str, limits: dict[str, float], told: str) -> None:
    begun = time.monotonic()
    record = work(does, **limits)(place())
    assert (record.verdict, record.problem) == ("error", f"It was ended: {told}.")
    assert time.monotonic() - begun < 60
    assert {path.name for path in place().folder.iterdir()} == {"cell.json", LOG}


def test_no_file_of_a_cell_is_larger_than_all_of_them_may_be(place: MakePlace, tmp_path: Path) -> None:
    record = work(f"writes-one={tmp_path / 'elsewhere'}", disk_gb=0.01)(place())
    assert record.verdict == "error"
    assert "SIGXFSZ" in record.problem or "File too large" in record.problem
    assert (tmp_path / "elsewhere").stat().st_size <= 10**7


def test_nothing_outlives_a_cell(place: MakePlace) -> None:
    mark = f"mark{time.time_ns()}"
    assert work(f"forks={mark}", minutes=0.05)(place()).verdict == "error"
    assert not subprocess.run(["pgrep", "-f", f"# {mark}$"], capture_output=True, text=True, check=False).stdout


def test_a_cancelled_cell_goes_on_where_it_was(place: MakePlace) -> None:
    cancelled = threading.Event()
    threading.Timer(1.5, cancelled.set).start()
    with pytest.raises(_Cancelled):
        work("counts=10000", "run")(place(cancelled=cancelled))
    out = place().folder / "out"
    before = {path.name: path.read_text() for path in out.iterdir()}
    assert before
    assert work(f"counts={len(before) + 2}", "run")(place(attempt=2)).verdict == "pass"
    after = {path.name: path.read_text() for path in out.iterdir()}
    assert len(after) >= len(before) + 2
    assert before.items() <= after.items()


def test_a_command_that_cannot_resume_begins_anew(place: MakePlace) -> None:
    place().folder.joinpath("out").mkdir()
    place().folder.joinpath("out", "0.json").write_text("of another attempt")
    assert work("counts=1", "bench")(place(attempt=2)).verdict == "pass"
    assert place().folder.joinpath("out", "0.json").read_text() != "of another attempt"
