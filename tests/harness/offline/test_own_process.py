"""Work in a process of its own: what comes of it, however that process ends, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from assay.harness.errors import AssayError
from assay.harness.offline import containment, own_process
from assay.harness.offline.interrupted import Known
from assay.harness.offline.own_process import in_own_process
from assay.harness.offline.supervised import _bound
from assay.harness.offline.watcher import Watcher


def told(known: Known) -> str:
    return known.how


def apart(work: Callable[[], Any], **more: Any) -> Any:
    return in_own_process(lambda watcher, callbacks: work(), told, **more)


def test_what_the_work_returns_comes_back_and_what_both_hold_stays_itself() -> None:
    mine, here = object(), []

    def work() -> Any:
        here.append(1)
        return os.getpid(), [mine]

    process, [same] = apart(work, shared=[mine])
    assert process != os.getpid()
    assert same is mine
    assert here == []


def test_what_the_work_raises_is_raised_with_its_traceback() -> None:
    def work() -> None:
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing") as error:
        apart(work)
    assert "in work" in error.value.__notes__[0]


def test_what_cannot_be_pickled_is_said() -> None:
    with pytest.raises(RuntimeError, match="lambda"):
        apart(lambda: lambda: None)


ENDS: list[tuple[Callable[[], object], str]] = [
    (lambda: os._exit(0), "exited with status 0"),
    (lambda: os._exit(121), "exited with status 121"),
    (lambda: os.kill(os.getpid(), 40), "was killed by signal 40"),  # it has no name
    (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
    (lambda: sys.exit(0), "raised SystemExit: 0"),
    (lambda: pytest.skip("not today"), "raised Skipped: not today"),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("work", "how"), ENDS, ids=[how for _, how in ENDS])
def test_a_process_that_ends_before_its_work_is_done(work: Callable[[], object], how: str) -> None:
    def begun(watcher: Watcher, callbacks: Mapping[str, Callable[..., None]]) -> Any:
        watcher("ends")
        return work()

    assert in_own_process(begun, told) == how
    with pytest.raises(AssayError, match=f"The process that ran the kernel {how}"):
        apart(work)  # of which nothing is known


@pytest.mark.parametrize("how", ["exits", "returns"])
def test_a_process_that_is_left_over_keeps_nobody_waiting_and_is_ended(tmp_path: Path, how: str) -> None:
    def work() -> None:
        if left := os.fork():
            (tmp_path / "left").write_text(str(left))
            if how == "exits":
                os._exit(0)
            return
        os.setsid()
        time.sleep(600)

    begun = time.monotonic()
    if how == "exits":
        with pytest.raises(AssayError, match="exited with status 0"):
            apart(work)
    else:
        apart(work)
    assert time.monotonic() - begun < 60
    assert not psutil.pid_exists(int((tmp_path / "left").read_text()))


def test_an_orphan_in_another_session_is_ended(tmp_path: Path) -> None:
    def work() -> None:
        if os.fork():
            os.wait()
        elif os.fork():
            os._exit(0)
        else:
            os.setsid()
            (tmp_path / "left").write_text(str(os.getpid()))
            time.sleep(600)
        while not (tmp_path / "left").exists():
            time.sleep(0.01)

    apart(work)
    assert not psutil.pid_exists(int((tmp_path / "left").read_text() or 0))


def test_work_that_starts_too_many_processes_is_ended_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containment, "PROCESSES", 8)
    begun = time.time()

    def work() -> None:
        for _ in range(30):
            if os.fork() == 0:
                time.sleep(600)
        time.sleep(600)

    with pytest.raises(AssayError, match="since the kernel had started more than"):
        apart(work)
    ours = {one.pid for one in psutil.process_iter(["ppid"]) if one.info["ppid"] in (1, os.getpid())}
    assert not [pid for pid in ours if psutil.Process(pid).create_time() > begun - 0.01]


def test_callbacks_are_called_here() -> None:
    heard: list[tuple[int, ...]] = []

    def work(watcher: Watcher, callbacks: Mapping[str, Callable[..., None]]) -> None:
        callbacks["progress"](1, 2)
        callbacks["progress"](2, 2)

    in_own_process(work, told, callbacks={"progress": lambda *done: heard.append(done)})
    assert heard == [(1, 2), (2, 2)]


def test_whoever_stops_waiting_leaves_no_process(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children()}
    begun = tmp_path / "begun"

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        begun.touch()
        time.sleep(600)

    def interrupt() -> None:
        while not begun.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        apart(work)
    left = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    assert {child.pid for child in left} <= before


def test_threads_of_openmp_do_not_hang_a_forked_process() -> None:
    """They do not survive the fork, and whoever asks for them waits forever."""
    code = """
import torch
from assay.harness.offline.own_process import in_own_process
def work(*_):
    return torch.ones(2_000_000).exp().sum().item()
torch.set_num_threads(2)
work()
print(in_own_process(work, str))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("5436")


KERNELS = """
import os

def exits():
    os._exit(0)

def process():
    return os.getpid()
"""


def ask(function: Callable[[], Any], watcher: Watcher) -> Any:
    watcher("ends")
    return function()


@pytest.fixture
def after_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of kernels, in a process that has used a GPU."""
    (tmp_path / "kernels_after_cuda.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(own_process, "_cuda_is_initialised", lambda: True)
    yield __import__("kernels_after_cuda")
    if own_process._process is not None:
        own_process._process.stop()
        own_process._process = None


def test_after_cuda_a_fresh_process_does_the_work(after_cuda: Any) -> None:
    def asked(function: Callable[[], Any]) -> Any:
        return in_own_process(_bound(ask, function), told)

    first = asked(after_cuda.process)
    assert first != os.getpid()
    assert asked(after_cuda.process) == first, "it is started once"
    assert asked(after_cuda.exits) == "exited with status 0"
    assert asked(after_cuda.process) not in (first, os.getpid())


def test_after_cuda_what_cannot_be_imported_runs_here(after_cuda: Any) -> None:
    assert apart(os.getpid) == os.getpid()
    with pytest.raises(AssayError, match="raised Skipped: not today"):
        apart(lambda: pytest.skip("not today"))
