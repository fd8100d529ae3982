"""A sweep from its plan to its result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from assay.harness.errors import EngineError, UsageError
from assay.harness.evidence.cell import RESULT, CellRecord, read_cell, write_cell
from assay.harness.files import timestamp
from assay.harness.progress import ProgressDisplay
from assay.harness.sweep.cell_process import PACK, hashes
from assay.harness.sweep.cells import Option, plan
from assay.harness.sweep.executor import Ended, Task
from assay.harness.sweep.result import SweepResult
from assay.harness.sweep.session import Sweep, SweepState, _cell_folder, estimate, read_state
from assay.harness.sweep.spec import SweepSpec
from assay.harness.verdict import Verdict

OPTIONS: dict[str, dict[str, Option]] = {
    "check": {"candidate": Option("", required=True)},
    "replay": {"pack": Option("", required=True), "candidate": Option("--candidate")},
    "run": {"candidate": Option("--candidate"), "model": Option("--model")},
    "record": {"pack": Option(""), "candidate": Option("--candidate"), "model": Option("--model")},
}


def made(folder: Path, stop_after: int = 0, code: Mapping[str, str] | None = None, **given: Any) -> Sweep:
    spec = SweepSpec(**{"command": "check", **given})
    planned = plan(spec, OPTIONS, lambda taken, kind: {"code": (code or {}).get(str(taken.get("candidate")), "")})
    return Sweep(SweepState(spec=spec, command="assay sweep"), planned, folder, stop_after)


class Given:
    """An executor whose cells end as given, by their command line."""

    slots = 1

    def __init__(self, verdict: Callable[[str], Verdict | Exception | None]) -> None:
        self._verdict = verdict
        self._waiting: list[Task[CellRecord]] = []
        self.ran: list[str] = []

    def __enter__(self) -> Given:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._waiting.clear()

    def submit(self, task: Task[CellRecord]) -> None:
        self._waiting.append(task)

    def ended(self) -> Iterator[Ended[CellRecord]]:
        while self._waiting:
            task = self._waiting.pop(0)
            command = task.work.command  # type: ignore[attr-defined]
            words = " ".join(command)
            self.ran.append(words)
            verdict = self._verdict(words)
            if verdict is None:
                raise KeyboardInterrupt
            if isinstance(verdict, Exception):
                yield Ended(task, None, verdict, 8, "there")
                continue
            assert task.folder is not None
            task.folder.mkdir(parents=True, exist_ok=True)
            if command[0] == "record":
                (task.folder / PACK).mkdir()
            if PACK in task.inputs:
                assert task.inputs[PACK].is_dir()
            (task.folder / RESULT).write_text(json.dumps({"of": words}))
            record = CellRecord(
                key=task.key, command=command, axes={}, verdict=verdict, headline=words, seconds=2.0, created=timestamp(),
                evidence=hashes(task.folder),
            )  # fmt: skip
            write_cell(task.folder, record)
            yield Ended(task, record, None, 1, "there")


def run(sweep: Sweep, verdict: Callable[[str], Verdict | Exception | None]) -> tuple[SweepResult, list[str]]:
    executor = Given(verdict)
    return sweep.run(executor, ProgressDisplay(Console(quiet=True))), executor.ran


def passes(words: str) -> Verdict:
    return "pass"


THREE = {"candidate": ["a:f", "b:f", "c:f"]}


@pytest.mark.parametrize(
    ("verdicts", "worst", "code"),
    [
        (["pass", "pass", "pass"], "pass", 0),
        (["pass", "inconclusive", "pass"], "inconclusive", 3),
        (["error", "inconclusive", "pass"], "error", 3),
        (["error", "pass", "regression"], "regression", 1),
    ],
)
def test_the_verdict_is_that_of_the_worst_cell(tmp_path: Path, verdicts: list[Verdict], worst: str, code: int) -> None:
    left = iter(verdicts)
    result, ran = run(made(tmp_path, axes=THREE), lambda words: next(left))
    assert (result.verdict, result.exit_code) == (worst, code)
    assert ran == ["check a:f", "check b:f", "check c:f"]
    assert [cell.verdict for cell in result.cells] == verdicts


def test_a_finished_cell_is_not_run_again_and_one_that_failed_is(tmp_path: Path) -> None:
    run(made(tmp_path, axes=THREE), lambda words: "error" if "b:f" in words else "pass")
    result, ran = run(made(tmp_path, axes=THREE), passes)
    assert ran == ["check b:f"]
    assert [cell.earlier for cell in result.cells] == [True, False, True]
    assert run(made(tmp_path, axes=THREE), passes)[1] == []


def test_a_cell_whose_code_changed_runs(tmp_path: Path) -> None:
    run(made(tmp_path, axes=THREE), passes)
    assert run(made(tmp_path, axes=THREE, code={"b:f": "changed"}), passes)[1] == ["check b:f"]


def test_a_cell_whose_evidence_changed_runs(tmp_path: Path) -> None:
    sweep = made(tmp_path, axes=THREE)
    run(sweep, passes)
    key = next(cell.key for cell in sweep.plan.cells.values() if "c:f" in cell.command)
    (_cell_folder(tmp_path, key) / RESULT).unlink()
    assert run(made(tmp_path, axes=THREE), passes)[1] == ["check c:f"]


def test_a_cell_that_was_lost_is_an_error_in_its_place(tmp_path: Path) -> None:
    lost = EngineError("Its workers were lost 8 times: NodeDiedError")
    result, _ = run(made(tmp_path, axes=THREE), lambda words: lost if "b:f" in words else "pass")
    assert [cell.verdict for cell in result.cells] == ["pass", "error", "pass"]
    assert (result.cells[1].problem, result.cells[1].attempts) == (lost.found, 8)
    record = read_cell(_cell_folder(tmp_path, result.cells[1].key))
    assert record is not None
    assert record.problem == lost.found


def test_a_pass_without_its_evidence_is_an_error(tmp_path: Path) -> None:
    class Forgets(Given):
        def ended(self) -> Iterator[Ended[CellRecord]]:
            for ended in super().ended():
                assert ended.task.folder is not None
                (ended.task.folder / RESULT).unlink()
                yield ended

    executor = Forgets(passes)
    result = made(tmp_path, axes={"candidate": ["a:f"]}).run(executor, ProgressDisplay(Console(quiet=True)))
    assert result.verdict == "error"
    assert result.cells[0].problem == "Its evidence is not that of which its record was made: result.json."


def test_an_interrupted_sweep_has_a_result_and_goes_on(tmp_path: Path) -> None:
    result, _ = run(made(tmp_path, axes=THREE), lambda words: None if "b:f" in words else "pass")
    assert (result.verdict, result.ended_early) == ("inconclusive", "it was interrupted")
    assert [cell.verdict for cell in result.cells] == ["pass", None, None]
    assert run(made(tmp_path, axes=THREE), passes)[1] == ["check b:f", "check c:f"]


def test_a_sweep_stops_after_so_many_regressions(tmp_path: Path) -> None:
    result, ran = run(made(tmp_path, stop_after=2, axes=THREE), lambda words: "regression")
    assert ran == ["check a:f", "check b:f"]
    assert (result.verdict, result.ended_early) == ("regression", "2 regressions were found")
    assert result.cells[2].verdict is None
    result, ran = run(made(tmp_path, stop_after=2, axes=THREE), passes)
    assert ran == [], "those of an earlier sweep count"


def staged(folder: Path) -> Sweep:
    spec = {"stages": ["check", "replay", "run"], "axes": {"model": ["m1", "m2"], "candidate": ["good:f", "bad:f", "worse:f"]}}
    built = SweepSpec(**spec)  # type: ignore[arg-type]
    planned = plan(built, OPTIONS, lambda taken, kind: {})
    return Sweep(SweepState(spec=built, command="assay sweep"), planned, folder)


def test_only_survivors_get_servers(tmp_path: Path) -> None:
    def verdict(words: str) -> Verdict:
        if words == "check worse:f" or words == "replay --candidate=bad:f":
            return "regression"
        return "inconclusive" if words == "check good:f" else "pass"

    result, ran = run(staged(tmp_path), verdict)
    records = [words for words in ran if words.startswith("record")]
    assert len(records) == 2
    assert ran[:2] == records
    assert ran[2:] == [
        "check good:f", "check bad:f", "check worse:f",
        "replay --candidate=good:f", "replay --candidate=bad:f", "replay --candidate=good:f", "replay --candidate=bad:f",
        "run --candidate=good:f --model=m1", "run --candidate=good:f --model=m2",
    ]  # fmt: skip
    assert {(one.axes["candidate"], one.stopped, len(one.cells)) for one in result.combinations} == {
        ("good:f", "", 3), ("bad:f", "replay", 2), ("worse:f", "check", 1),
    }  # fmt: skip
    assert all(cell.verdict for cell in result.cells), "a cell that an earlier stage spared is no gap"
    assert (result.verdict, len(result.cells)) == ("regression", len(ran))


def test_what_passes_all_stages_passes(tmp_path: Path) -> None:
    assert run(staged(tmp_path), passes)[0].verdict == "pass"


def test_a_pack_that_cannot_be_recorded_leaves_a_gap(tmp_path: Path) -> None:
    result, ran = run(staged(tmp_path), lambda words: "error" if words.startswith("record") and "m1" in words else "pass")
    assert result.verdict == "error"
    assert sum(words.startswith("replay") for words in ran) == 3
    assert {cell.problem for cell in result.cells if cell.stage == "replay" and not cell.verdict} == {"its pack was not recorded"}
    assert not any("m1" in words for words in ran if words.startswith("run")), "no server for what was not replayed"


def test_a_sweep_can_be_read_back(tmp_path: Path) -> None:
    sweep = made(tmp_path, axes=THREE)
    run(sweep, passes)
    assert read_state(tmp_path) == sweep.state
    with pytest.raises(UsageError, match="holds no sweep"):
        read_state(tmp_path / "elsewhere")


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="is not the folder of a sweep"):
        run(made(tmp_path, axes=THREE), passes)


def test_an_estimate_comes_from_earlier_durations(tmp_path: Path) -> None:
    assert estimate(made(tmp_path, axes=THREE), 1) == (0.0, 0)
    run(made(tmp_path, axes={"candidate": ["a:f"]}), passes)
    assert estimate(made(tmp_path, axes=THREE), 1) == (4.0, 2)
    assert estimate(made(tmp_path, axes=THREE), 2) == (2.0, 2)


def test_ten_thousand_cells_are_planned_in_seconds(tmp_path: Path) -> None:
    axes = {"candidate": [f"k{number}:f" for number in range(100)], "model": [f"m{number}" for number in range(100)]}
    spec = SweepSpec(stages=("run",), axes=axes)  # type: ignore[arg-type]
    begun = time.process_time()
    planned = plan(spec, OPTIONS, lambda taken, kind: {})
    sweep = Sweep(SweepState(spec=spec, command="assay sweep"), planned, tmp_path)
    assert len(sweep.load()) == len(sweep.result().cells) == 10_000
    assert time.process_time() - begun < 10
