"""The executor on Ray: a real Ray of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.harness import extras
from assay.harness.errors import EngineError, UsageError
from assay.harness.evidence.cell import LOG
from assay.harness.sweep import on_ray
from assay.harness.sweep.cell_process import CellWork
from assay.harness.sweep.executor import Task, Workplace
from assay.harness.sweep.executors import without_results
from assay.harness.sweep.on_ray import LOCAL, OnRay, attempt
from assay.harness.sweep.spec import Limits


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "missing_packages", lambda extra: ["ray"] if extra == "ray" else [])
    with pytest.raises(UsageError, match=r"--ray needs packages that are not installed: ray\.") as error, OnRay(LOCAL):
        pass
    assert "assay-harness[ray]" in error.value.do


@pytest.mark.parametrize("address", [LOCAL, "10.0.0.1:6379"])
def test_ray_is_told_where_and_does_not_look_for_a_cluster_of_this_machine(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    import ray

    asked: list[str | None] = []

    def init(address: str | None = None, **more: Any) -> None:
        asked.append(address)
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UsageError, match=f"--ray {address}: nobody answers"), OnRay(address):
        pass
    assert asked == [address], "without an address, Ray joins whatever cluster it finds here"


def test_a_working_folder_that_ray_cannot_send_is_wrong_use(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def init(address: str | None = None, **more: Any) -> None:
        raise ray.exceptions.RuntimeEnvSetupError("Package size (572.24MiB) exceeds the maximum size of 512.00MiB.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(UsageError, match=r"--ray local: .*exceeds the maximum size") as error, OnRay(LOCAL, {"working_dir": "."}):
        pass
    assert "excludes" in error.value.do


def test_results_stay_where_they_are_when_a_working_folder_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaging = pytest.importorskip("ray._private.runtime_env.packaging")
    here = tmp_path / "here"
    for name in ("kernels.py", "runs/a/big", "swept/cells/b/big", "package/runs/data.py"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(name)
    monkeypatch.chdir(here)
    sent = without_results({"working_dir": ".", "excludes": ["of-mine"]}, Path("runs"), Path("swept"), tmp_path / "elsewhere")
    assert sent == {"working_dir": ".", "excludes": ["of-mine", "/runs/", "/swept/"]}
    packaging.create_package(str(here), tmp_path / "sent.zip", excludes=sent["excludes"], include_gitignore=True)
    with zipfile.ZipFile(tmp_path / "sent.zip") as made:
        assert {name for name in made.namelist() if not name.endswith("/")} == {"kernels.py", "package/runs/data.py"}
    for untouched in ({}, {"working_dir": "s3://bucket/code.zip"}, {"pip": ["roman"]}):
        assert without_results(untouched, Path("runs")) is untouched
    assert without_results({"working_dir": "swept"}, Path("swept"))["excludes"] == []


def test_an_attempt_begins_with_what_was_kept_and_sends_the_rest() -> None:
    def work(place: Workplace) -> str:
        assert (place.folder / "kept").read_text() == "earlier"
        assert (place.inputs["pack"] / "q").read_text() == "numbers"
        (place.folder / "kept").write_text("now")
        (place.folder / "new").write_text("x")
        place.say("working")
        return f"attempt {place.attempt}"

    parcels = [*attempt(work, 2, {"kept": b"earlier", "same": b"s"}, ["pack"], {"q": b"numbers"})]
    assert parcels[-1].ended == ("attempt 2", None)
    assert {name: content for parcel in parcels for name, content in parcel.files.items()} == {"kept": b"now", "new": b"x"}
    assert [line for parcel in parcels for line in parcel.lines] == ["working"]


def test_an_attempt_that_is_given_up_ends_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "_SHIP_S", 0.1)
    ended = threading.Event()

    def work(place: Workplace) -> None:
        assert place.cancelled.wait(60)
        ended.set()

    running = attempt(work, 1, {}, [])
    assert next(running).ended is None
    running.close()  # type: ignore[attr-defined]
    assert ended.is_set()


@pytest.fixture(scope="module")
def machine() -> Iterator[OnRay]:
    pytest.importorskip("ray")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with OnRay(LOCAL) as executor:
        yield executor


def run(executor: OnRay, *tasks: Task[Any]) -> dict[str, Any]:
    for task in tasks:
        executor.submit(task)
    return {ended.task.key: ended for ended in executor.ended()}


def test_a_lost_worker_is_replaced_and_goes_on(machine: OnRay, tmp_path: Path) -> None:
    """The first attempt is killed once its evidence has come back."""

    def work(place: Workplace) -> tuple[int, list[str]]:
        numbers = sorted(path.name for path in place.folder.iterdir())
        (place.folder / f"{len(numbers)}").write_text(f"{os.getpid()}")
        if place.attempt == 1:
            time.sleep(600)
        return place.attempt, numbers

    def fails(place: Workplace) -> None:
        raise EngineError("It was to fail.", "nothing", "nothing")

    killed: list[str] = []
    killer = threading.Thread(target=_kill_once, args=(tmp_path / "lost" / "0", killed))
    killer.start()
    ended = run(machine, Task("lost", work, tmp_path / "lost"), Task("fails", fails), Task("works", lambda place: 1))
    killer.join()
    assert (ended["lost"].value, ended["lost"].attempts) == ((2, ["0"]), 2)
    assert [(tmp_path / "lost" / "0").read_text()] == killed
    assert ended["works"].value == 1
    assert isinstance(ended["fails"].error, EngineError)
    assert ended["fails"].error.found == "It was to fail."


def _kill_once(sent: Path, killed: list[str]) -> None:
    """Kill the worker whose process a file names, once it has come."""
    until = time.monotonic() + 90
    while not sent.exists() and time.monotonic() < until:
        time.sleep(0.1)
    killed.append(sent.read_text())
    os.kill(int(killed[0]), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_a_cell_on_ray_leaves_its_evidence_here_and_no_process(machine: OnRay, tmp_path: Path) -> None:
    mark = f"mark{time.time_ns()}"
    folder = Path.cwd()

    class There(CellWork):
        def __call__(self, place: Workplace) -> Any:
            os.chdir(folder)
            return super().__call__(place)

    passes = There("p", ("run", "counts=3"), {}, Limits())
    passed = run(machine, Task("p", passes, tmp_path / "p"))["p"].value
    assert passed.verdict == "pass"
    assert {path.name for path in (tmp_path / "p" / "out").iterdir()} == {"0.json", "1.json", "2.json"}
    # On a busy machine, six seconds may pass before there is anything to leave.
    limits = Limits(minutes=round(max(0.1, 3 * passed.seconds / 60), 3))
    forks = There("f", ("check", f"forks={mark}"), {}, limits)
    ended = run(machine, Task("f", forks, tmp_path / "f"))["f"].value
    assert ended.problem == f"It was ended: it did not end within {limits.minutes:g} min."
    assert "forked" in (tmp_path / "f" / LOG).read_text()
    assert not subprocess.run(["pgrep", "-f", f"# {mark}$"], capture_output=True, text=True, check=False).stdout
