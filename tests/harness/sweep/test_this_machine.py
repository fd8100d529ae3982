"""The executor of this machine."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from assay.harness.errors import UsageError
from assay.harness.sweep import this_machine
from assay.harness.sweep.executor import Needs, Task, Workplace
from assay.harness.sweep.this_machine import ThisMachine


def test_so_many_tasks_run_at_once(tmp_path: Path) -> None:
    now, most, lock = 0, 0, threading.Lock()

    def work(place: Workplace) -> str:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.05)
        with lock:
            now -= 1
        (place.folder / "kept").write_text("x")
        return place.folder.name

    with ThisMachine(Needs(), jobs=3) as machine:
        for number in range(7):
            machine.submit(Task(f"{number}", work, tmp_path / f"{number}"))
        ended = [*machine.ended()]
    assert (machine.slots, most) == (3, 3)
    assert sorted(end.value for end in ended) == [f"{number}" for number in range(7)]
    assert all((tmp_path / f"{number}" / "kept").exists() for number in range(7))


def test_a_task_that_fails_hides_no_other() -> None:
    def fails(place: Workplace) -> None:
        raise RuntimeError("as it was to")

    with ThisMachine(Needs()) as machine:
        machine.submit(Task("fails", fails))
        machine.submit(Task("works", lambda place: 1))
        ended = {end.task.key: end for end in machine.ended()}
    assert str(ended["fails"].error) == "as it was to"
    assert ended["works"].value == 1


def test_tasks_may_be_submitted_as_others_end() -> None:
    seen = []
    with ThisMachine(Needs()) as machine:
        machine.submit(Task("3", lambda place: 3))
        for end in machine.ended():
            seen.append(end.value)
            if end.value:
                machine.submit(Task(f"{end.value - 1}", lambda place, left=end.value - 1: left))
    assert seen == [3, 2, 1, 0]


def test_what_runs_is_cancelled_when_the_context_is_left() -> None:
    ended = threading.Event()

    def waits(place: Workplace) -> None:
        assert place.cancelled.wait(30)
        ended.set()

    def begin() -> None:
        with ThisMachine(Needs()) as machine:
            machine.submit(Task("waits", waits))
            machine.submit(Task("never", lambda place: pytest.fail("it was to wait")))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begin()
    assert ended.is_set()


def test_each_task_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"0": "NVIDIA H100", "1": "NVIDIA H100", "2": "NVIDIA L4", "3": "NVIDIA H100"}
    monkeypatch.setattr(this_machine, "gpus_here", lambda: here)
    seen, both = [], threading.Barrier(3, timeout=30)

    def work(place: Workplace) -> None:
        seen.append(place.environment["CUDA_VISIBLE_DEVICES"])
        both.wait()

    with ThisMachine(Needs(gpus=1, accelerator="H100")) as machine:
        for number in range(3):
            machine.submit(Task(f"{number}", work))
        assert [end.error for end in machine.ended()] == [None] * 3
    assert sorted(seen) == ["0", "1", "3"]
    assert ThisMachine(Needs(gpus=2)).slots == 2
    with pytest.raises(UsageError, match=r"needs 2 GPUs of the kind L4, and this machine has 1\.") as error:
        ThisMachine(Needs(gpus=2, accelerator="L4"))
    assert "--ray ADDRESS" in error.value.do


def test_a_task_without_gpus_sees_none() -> None:
    with ThisMachine(Needs()) as machine:
        machine.submit(Task("sees", lambda place: place.environment["CUDA_VISIBLE_DEVICES"]))
        assert [end.value for end in machine.ended()] == [""]


def test_the_gpus_that_a_process_may_use_are_those_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = tmp_path / "nvidia-smi"
    listed.write_text("#!/bin/sh\necho '0, NVIDIA H100'\necho '1, NVIDIA L4'\n")
    listed.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert this_machine.gpus_here() == {"0": "NVIDIA H100", "1": "NVIDIA L4"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert this_machine.gpus_here() == {"1": "NVIDIA L4"}
