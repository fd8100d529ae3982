"""Cells in processes of their own: verdicts, limits, resume, and what is left of them."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from assay.harness import extras
from assay.harness.drivers.sweep import run as module
from assay.harness.drivers.sweep.run import ended_in, run_cell, run_sweep
from assay.harness.drivers.sweep.spec import CELL, SweepResult, SweepSpec, SweptCell
from assay.harness.errors import UsageError
from assay.harness.progress import ProgressDisplay
from assay.harness.verdict import Verdict

STAND_IN = Path(__file__).parents[3] / "stand_ins" / "cells"


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have cells run the stand-in of ``assay``, which lies in their working folder."""
    monkeypatch.chdir(STAND_IN)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


def cell(does: str, command: str = "check") -> SweptCell:
    return SweptCell(key=does, command=(command, does), given=(command, does), axes={"candidate": does})


def run(made: SweptCell, folder: Path, minutes: float = 5) -> SweptCell:
    return run_cell(made, folder / "cells" / made.key, minutes, {}, threading.Event())


def swept(folder: Path, *does: str, jobs: int = 0, ray: str = "", **more: object) -> SweepResult:
    spec = SweepSpec.model_validate({"command": "check", "axes": {"candidate": does}, **more})
    with ProgressDisplay(Console(quiet=True)) as display:
        return run_sweep(spec, [cell(one) for one in does], folder, "assay sweep", jobs, ray, display)


@pytest.mark.parametrize(
    ("does", "verdict", "told"),
    [
        ("pass", "pass", "it is a pass"),
        ("regression", "regression", "it is a regression"),
        ("inconclusive", "inconclusive", "it is a inconclusive"),
        ("misused", "error", "Exit code 2: There is no such thing."),
        ("killed", "error", "Its process was killed by SIGKILL: working"),
        ("says-nothing", "error", "It exited with 0, but its result does not say that it passed"),
        ("claims=regression", "error", "It exited with 0, but its result does not say that it passed"),
    ],
)
def test_a_verdict_is_what_exit_code_and_result_say_both(tmp_path: Path, does: str, verdict: Verdict, told: str) -> None:
    ended = run(cell(does), tmp_path)
    assert ended.verdict == verdict
    assert told in (ended.problem if verdict == "error" else ended.headline)
    again = ended_in(tmp_path, does)
    kept = ended.model_copy(update={"given": ()})
    assert again == (None if verdict == "error" else kept), "what failed runs again"


def test_nothing_outlives_a_cell_that_takes_too_long(tmp_path: Path) -> None:
    mark = f"mark{time.time_ns()}"
    ended = run(cell(f"forks={mark}"), tmp_path, minutes=0.05)
    assert (ended.verdict, ended.problem) == ("error", "It was ended: it did not finish within 0.05 min.")
    assert not subprocess.run(["pgrep", "-f", f"# {mark}$"], capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("command", ["run", "bench"])
def test_a_run_goes_on_with_what_an_earlier_attempt_left(tmp_path: Path, command: str) -> None:
    left = tmp_path / "cells" / "counts=1" / "out" / "0.json"
    left.parent.mkdir(parents=True)
    left.write_text("of an earlier attempt")
    assert run(cell("counts=1", command), tmp_path).verdict == "pass"
    assert left.read_text() == "of an earlier attempt"


@pytest.mark.parametrize(
    ("does", "worst", "code"),
    [
        (["pass"], "pass", 0),
        (["pass", "inconclusive"], "inconclusive", 3),
        (["misused", "inconclusive", "pass"], "error", 3),
        (["misused", "pass", "regression"], "regression", 1),
    ],
)
def test_the_verdict_is_that_of_the_worst_cell(tmp_path: Path, does: list[str], worst: str, code: int) -> None:
    result = swept(tmp_path, *does, jobs=2)
    assert (result.verdict, result.exit_code) == (worst, code)
    assert [one.key for one in result.cells] == does


def test_what_has_ended_is_not_run_again_and_what_failed_is(tmp_path: Path) -> None:
    swept(tmp_path, "pass", "misused", "regression")
    first = {key: (tmp_path / "cells" / key / CELL).stat().st_mtime_ns for key in ("pass", "misused", "regression")}
    result = swept(tmp_path, "pass", "misused", "regression")
    assert [one.verdict for one in result.cells] == ["pass", "error", "regression"]
    changed = [key for key, time in first.items() if (tmp_path / "cells" / key / CELL).stat().st_mtime_ns != time]
    assert changed == ["misused"]
    (tmp_path / "cells" / "pass" / CELL).write_text("{}")
    assert swept(tmp_path, "pass").cells[0].verdict == "pass", "a damaged record is written again"
    assert (tmp_path / "cells" / "pass" / CELL).stat().st_size > 2


def test_an_interrupted_sweep_has_a_result_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupts(self: ProgressDisplay, text: str, stays: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ProgressDisplay, "say", interrupts)
    begun = time.monotonic()
    result = swept(tmp_path, "pass", "sleeps=600", jobs=2)
    assert time.monotonic() - begun < 60
    assert (result.verdict, result.interrupted) == ("inconclusive", True)
    assert [one.verdict for one in result.cells] == ["pass", None]


def test_each_cell_has_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpus_here", lambda: {str(i): "H100" for i in range(5)})
    seen: list[str] = []
    held: set[str] = set()

    def runs(made: SweptCell, folder: Path, minutes: float, variables: dict[str, str], stop: threading.Event) -> SweptCell:
        gpus = variables["CUDA_VISIBLE_DEVICES"]
        assert gpus not in held
        held.add(gpus)
        seen.append(gpus)
        time.sleep(0.05)
        held.remove(gpus)
        return made.model_copy(update={"verdict": "pass"})

    monkeypatch.setattr(module, "run_cell", runs)
    assert swept(tmp_path, *"abcde", limits={"gpus": 2}).verdict == "pass"
    assert set(seen) == {"0,1", "2,3"}
    with pytest.raises(UsageError, match="A cell needs 6 GPUs, and this machine has 5"):
        swept(tmp_path, "a", "b", limits={"gpus": 6})


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="is not the folder of a sweep"):
        swept(tmp_path, "pass")


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "missing_packages", lambda extra="": ["ray"] if extra == "ray" else [])
    with pytest.raises(UsageError, match=r"--ray needs packages that are not installed: ray\.") as error:
        swept(tmp_path, "pass", ray="local")
    assert "assay-harness[ray]" in error.value.do


def test_an_address_where_nobody_answers_is_wrong_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    given: list[object] = []

    def init(address: str, runtime_env: dict[str, object], **more: object) -> None:
        given.extend([address, runtime_env])
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UsageError, match=r"--ray 10\.0\.0\.1:6379: nobody answers"):
        swept(tmp_path / "out", "pass", ray="10.0.0.1:6379", runtime_env={"working_dir": "."})
    assert given == ["10.0.0.1:6379", {"working_dir": ".", "excludes": ["/runs/", "/out/"]}]


def test_the_folder_of_a_cell_comes_back_from_a_worker(tmp_path: Path) -> None:
    folder = tmp_path / "cells" / "pass"
    folder.mkdir(parents=True)
    (folder / "left").write_text("of an earlier attempt")
    back = module._kept(module._away(cell("pass"), 5), folder)
    assert back.verdict == "pass"
    assert {path.name for path in folder.iterdir()} == {"cell.json", "result.json", "log.txt"}
    assert ended_in(tmp_path, "pass") is not None


@pytest.mark.slow
def test_cells_on_ray_are_commands_of_assay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)  # a worker imports from its working folder first, and the stand-in is no assay
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", str(Path(module.__file__).parents[4]))
    result = swept(tmp_path / "out", "nowhere:kernel", "elsewhere:kernel", ray="local")
    assert [one.verdict for one in result.cells] == ["error", "error"]
    assert all(one.problem.startswith("Exit code 2: ") for one in result.cells), result.cells
    assert (tmp_path / "out" / "cells" / "nowhere:kernel" / "log.txt").stat().st_size
