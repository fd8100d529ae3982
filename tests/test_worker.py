"""Work in a process of its own: what comes of it, however that process ends, and nothing that it leaves."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from assay import worker
from assay.harness.errors import UsageError
from assay.worker import Crashed, Done, Event, Job, Journal, Limits, TimedOut, run


def job(name: str, **arguments: Any) -> Job:
    return Job(f"{__name__}:{name}", arguments)


# Jobs, each of which runs in a process of its own.


def answers(journal: Journal, value: float) -> dict[str, Any]:
    journal.write("seen", value=value)
    return {"process": os.getpid(), "value": value}


def ends(journal: Journal, how: str) -> None:
    journal.write("known", fact=1)
    journal.begin("call 1")
    journal.end()
    journal.begin("call 2")
    if how == "forks":  # the copy keeps all files open
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    {
        "exits": lambda: os._exit(0),
        "crashes": lambda: ctypes.string_at(0),
        "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "raises an outcome": lambda: pytest.skip("not a result"),
        "calls sys.exit": lambda: sys.exit(0),
    }[how]()


def raises(journal: Journal, what: str) -> None:
    if what == "usage":
        raise UsageError("found", "expected", "do")
    raise {"known": AssertionError("wrong"), "unknown": OSError(2, "no file")}[what]


def hangs(journal: Journal, step: str = "") -> None:
    if step:
        journal.begin(step)
    sum(iter(int, 1))  # native code, which never looks for signals


def leaves(journal: Journal, detached: bool = True) -> int:
    child = os.fork()
    if child == 0:
        if detached:
            os.setsid()
        time.sleep(600)
    journal.write("left", pid=child)
    return child


def forks(journal: Journal) -> None:
    for _ in range(300):
        if os.fork() == 0:
            time.sleep(600)
    time.sleep(600)


def waits(journal: Journal) -> None:
    leaves(journal)
    time.sleep(600)


def remembers(journal: Journal) -> dict[str, Any]:
    """Return what this process has from others, and change it."""
    had = {"draws": np.random.random(), "marks": list(vars(worker).get("marks", ())), "waited": False}
    vars(worker).setdefault("marks", []).append("one")
    try:
        os.wait()
    except ChildProcessError:
        had["waited"] = True
    return {**had, "environment": os.environ.get("PYTEST_CURRENT_TEST", "")}


def nests(journal: Journal) -> dict[str, Any]:
    vars(worker).setdefault("marks", []).append("outer")
    inner = run(Job(f"{__name__}:remembers"))
    assert isinstance(inner, Done)
    return dict(inner.result)


def test_a_job_is_as_new_whatever_jobs_before_it_did() -> None:
    first, second = (run(job("remembers")) for _ in range(2))
    assert isinstance(first, Done)
    assert isinstance(second, Done)
    assert first.result["marks"] == second.result["marks"] == []
    assert first.result["draws"] != second.result["draws"]
    assert first.result["waited"], "a kernel that waits for all its children waits for none of ours"
    assert "test_a_job_is_as_new" in first.result["environment"]


def test_a_job_in_a_job_is_as_new() -> None:
    outcome = run(job("nests"))
    assert isinstance(outcome, Done)
    assert outcome.result["marks"] == []


def test_a_template_that_was_killed_is_replaced_and_another_environment_gets_its_own() -> None:
    assert isinstance(run(job("answers", value=1)), Done)
    killed = worker._template
    assert killed is not None
    assert killed.process is not None
    killed.process.kill()
    killed.process.wait()
    assert isinstance(run(job("answers", value=2)), Done)
    other = worker._template
    assert other is not killed
    assert isinstance(run(job("answers", value=3), environment={**os.environ, "OMP_NUM_THREADS": "3"}), Done)
    assert worker._template is not other, "OpenMP reads that when it is imported"


def test_what_a_job_returns_and_writes_comes_back() -> None:
    seen: list[Event] = []
    outcome = run(job("answers", value=float("inf")), on_event=seen.append)
    assert isinstance(outcome, Done)
    assert (outcome.result["value"], seen) == (float("inf"), [{"event": "seen", "value": float("inf")}])
    assert outcome.result["process"] != os.getpid()


def test_another_python_does_a_job_with_the_modules_of_its_own_path(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nANOTHER=yes exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "there.py").write_text(
        "import os, sys\ndef where(journal): return [os.environ.get('ANOTHER'), sys.path[0], 'only_here' in sys.path]\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    sys.path.append("only_here")
    try:
        outcome = run(Job("there:where"), python=str(python), environment=environment)
    finally:
        sys.path.remove("only_here")
    assert isinstance(outcome, Done)
    assert outcome.result == ["yes", str(tmp_path), False]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exits", "exited with status 0"),
        ("crashes", "was killed by SIGSEGV"),
        ("is killed", "was killed by SIGKILL"),
        ("raises an outcome", "raised Skipped: not a result"),
        ("calls sys.exit", "raised SystemExit: 0"),
        ("forks", "exited with status 0"),
    ],
)
def test_a_process_that_ends_early_has_crashed_and_its_journal_stays(how: str, said: str) -> None:
    outcome = run(job("ends", how=how))
    assert isinstance(outcome, Crashed)
    assert (outcome.how, outcome.during, outcome.events[0]) == (said, "call 2", {"event": "known", "fact": 1})


def test_what_a_job_raises_is_raised() -> None:
    with pytest.raises(UsageError) as usage:
        run(job("raises", what="usage"))
    assert (usage.value.found, usage.value.do) == ("found", "do")
    with pytest.raises(AssertionError, match="wrong"):
        run(job("raises", what="known"))
    with pytest.raises(RuntimeError, match="in raises"):
        run(job("raises", what="unknown"))


@pytest.mark.parametrize(
    ("step", "limits", "how"),
    [
        ("call 1", Limits(step_s=0.5), "did not return within 0.5 s"),
        ("", Limits(start_s=0.5), "did not start within 0.5 s"),
        ("", Limits(total_s=0.5), "was not done within 0.5 s"),
    ],
)
def test_a_job_that_exceeds_a_limit_is_ended(step: str, limits: Limits, how: str) -> None:
    outcome = run(job("hangs", step=step), limits=limits)
    assert isinstance(outcome, TimedOut)
    assert (outcome.how, outcome.during) == (how, step)


def test_nothing_that_a_job_starts_outlives_it() -> None:
    outcome = run(job("leaves"))
    assert isinstance(outcome, Done)
    assert not psutil.pid_exists(outcome.result)


def test_a_job_that_starts_too_many_processes_is_ended_with_them(left_processes: Callable[[], list[psutil.Process]]) -> None:
    outcome = run(job("forks"))
    assert isinstance(outcome, Crashed)
    assert outcome.how == "was ended because it had started more than 256 processes at a time,"
    assert left_processes() == []


@pytest.mark.parametrize("whom", [os.kill, os.killpg])
def test_nothing_outlives_a_caller_that_is_killed(whom: Any) -> None:
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from assay.worker import Job, run
run(Job("{__name__}:waits"), on_event=lambda event: print(event["pid"], flush=True))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True) as caller:
        assert caller.stdout is not None
        left = psutil.Process(int(caller.stdout.readline()))
        family = [left, *left.parents()[:2]]
        whom(caller.pid, signal.SIGKILL)
        assert psutil.wait_procs([one for one in family if one.pid != caller.pid], timeout=10)[1] == []
