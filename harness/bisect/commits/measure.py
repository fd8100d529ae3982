"""Probing a commit: check it out, build it, and measure it in a process of its own or with an ``assay run``.

A probe is a task of an executor, on this machine or another one.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import MappingProxyType

from pydantic import ValidationError

from assay.harness.bisect.commits import probe
from assay.harness.bisect.commits.state import ACCURACY_DEFAULTS, LOG, BisectSpec, Measurement
from assay.harness.bisect.commits.worktrees import Worktree, Worktrees
from assay.harness.errors import GIT_ABORT, AssayError, EvidenceError, ExitCode, UsageError
from assay.harness.judge.report_file import read_report
from assay.harness.sweep.executor import Workplace

_PRELOADED_MODULES = ["torch", "assay.harness.bisect.commits.probe", "triton", "triton.language"]
"""Imported by the process that probes are forked from; modules that are not installed are skipped."""
_COMMAND_NOT_FOUND = (126, 127)
CALLS, COPY = "calls", "copy"
"""Inputs of a probe: the file of the calls, of a replay; and for machines without the repository, a copy of the range."""
_GRACE_S = 30.0
_FLAGS = {"sources": "source", "conditions": "condition", "measure_with": "with", "run_args": "run-arg"}
"""Flags of ``assay bisect commits`` that are not named after their field of `BisectSpec`."""


class BrokenEnvironment(AssayError):
    """The machine is at fault, not a commit. Exit code 3; 128 under ``git bisect run``."""


Cancelled = Callable[[], bool]
"""Tells whether what runs is to end early."""
_LOOK_S = 0.5
"""Seconds between two looks at `Cancelled`."""


def run_build(
    command: str, folder: Path, timeout: float, log: Path, environment: Mapping[str, str] = MappingProxyType({}),
    cancelled: Cancelled = lambda: False,
) -> tuple[str, float]:  # fmt: skip
    """Run a build command in a folder; return the reason for a failure (empty if none) and the build time in seconds.

    Raises:
        BrokenEnvironment: the exit code was 128 or more, by git's convention a broken environment.
    """
    if not command:
        return "", 0.0
    begun = time.monotonic()
    code = _run_command(["/bin/sh", "-c", command], folder, environment, timeout, log, cancelled=cancelled)
    seconds = time.monotonic() - begun
    if code is None:
        return f"the build did not finish within {timeout:.0f} s", seconds
    if code >= GIT_ABORT:
        raise BrokenEnvironment(
            f"the build command exited with {code}: {_tail(log)}",
            "exit code 0 if it built, 1 to 127 if the commit does not build",
            "fix the environment; the same command then resumes",
        )
    if code in _COMMAND_NOT_FOUND:
        return f"the build command was not found (exit code {code}): {_tail(log)}", seconds
    return (f"the build exited with {code}: {_tail(log)}" if code else ""), seconds


def _run_command(
    command: list[str], folder: Path, environment: Mapping[str, str], timeout: float, log: Path, gently: bool = False,
    cancelled: Cancelled = lambda: False,
) -> int | None:  # fmt: skip
    """Run a command in its own session, append its output to a log, and leave none of its processes running.

    Returns:
        Its exit code, 128 + n for a signal n; None if it timed out.
    """
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            ended = _waited(lambda seconds: _ended_within(process, seconds), timeout, cancelled)
        finally:
            if gently and process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    return None if not ended else code if code >= 0 else 128 - code


def _ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return True
    return False


def _waited(ended_within: Callable[[float], object], timeout: float, cancelled: Cancelled) -> bool:
    """Wait until something has ended, at most so many seconds; return whether it has.

    Raises:
        AssayError: it is to end early.
    """
    until = time.monotonic() + timeout
    while not ended_within(max(0.0, min(_LOOK_S, until - time.monotonic()))):
        if cancelled():
            raise AssayError("The probe was stopped.", do="run the same command again")
        if time.monotonic() >= until:
            return False
    return True


def _tail(log: Path, most: int = 200) -> str:
    """Return the end of a log, on one line."""
    with suppress(OSError):
        return " ".join(log.read_text(errors="replace")[-4 * most :].split())[-most:] or "it printed nothing"
    return "it printed nothing"


class Forks:
    """Fresh processes, forked from one that has imported torch and assay but no kernel. Several threads may ask for some."""

    _asking = (
        threading.Lock()
    )  # reading the exit code of a process is not safe among threads, and starting one reads that of others

    def __init__(self) -> None:
        # Ask NVML whether there is a GPU: initialising CUDA here would keep forked processes from using it.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED_MODULES)
        before = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"  # never import from the working directory
        try:
            forkserver.ensure_running()
        finally:
            os.environ.pop("PYTHONSAFEPATH") if before is None else os.environ.update(PYTHONSAFEPATH=before)

    def run(self, task: probe.ProbeTask, timeout: float, cancelled: Cancelled = lambda: False) -> Measurement:
        """Run a task in a fresh process.

        Raises:
            BrokenEnvironment: no process can be started, or it ended normally without writing its result.
            AssayError: it is to end early.
        """
        task.result.unlink(missing_ok=True)
        process = self._context.Process(target=probe.main, args=(task,))
        try:
            with self._asking:
                process.start()
        except (OSError, EOFError, RuntimeError) as error:
            raise BrokenEnvironment(
                f"no process can be started: {error}.", "enough memory and free process ids", "free some"
            ) from error
        try:
            late = not _waited(lambda seconds: wait([process.sentinel], seconds), timeout, cancelled)
        finally:
            with self._asking:
                _end(process)
        if late and not (task.name_bug and task.result.exists()):  # else it was measured before it was read
            return Measurement(status="died", reason=f"it did not finish within {timeout:.0f} s")
        try:
            return Measurement.model_validate_json(task.result.read_text())
        except (OSError, ValidationError):
            code = process.exitcode or 0
        if code < 0:
            name = signal.Signals(-code).name
            return Measurement(status="died", reason=f"the process was killed by {name}: {_tail(task.log)}")
        raise BrokenEnvironment(
            f"a probe ended with exit code {code} and without a result: {_tail(task.log)}",
            f"its result in {task.result}",
            f"see {task.log}; the same command then resumes",
        )


def _end(process: ForkServerProcess) -> None:
    if process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


@dataclass(frozen=True)
class CommitProbing:
    """The work of probing a commit, wherever there is a worker: as of an executor's task.

    Attributes:
        spec: the question.
        commit: what is probed.
        folder: of worktrees, see `worktrees.worktrees`.
        name_bug: look for a hypothesis that fits, and read a wrong kernel.
    """

    spec: BisectSpec
    commit: str
    folder: Path
    name_bug: bool = False

    def __call__(self, place: Workplace) -> Measurement:
        """Check the commit out, build it and measure it.

        Raises:
            BrokenEnvironment: that is not possible, through no fault of the commit.
            UsageError: ``assay run`` rejected its arguments.
        """
        begun, spec = time.monotonic(), self.spec
        log = place.folder / LOG
        log.unlink(missing_ok=True)
        trees = Worktrees.at(self.folder, Path(spec.repo), place.inputs.get(COPY))
        with trees.lend(self.commit) as tree:
            why, build_seconds = self._built(tree, place, log)
            if why:
                measured = Measurement(status="build", reason=why)
            else:
                measured = self._replayed(tree.path, place, log)
                if measured.status == "measured" and spec.measure_with == "accuracy":
                    measured = measured.model_copy(update=_accuracy(spec, tree.path, place, log))
        return measured.model_copy(update={"seconds": time.monotonic() - begun, "build_seconds": build_seconds})

    def _built(self, tree: Worktree, place: Workplace, log: Path) -> tuple[str, float]:
        """Build the commit, unless it was built here before; return why that failed, and the seconds it took."""
        spec = self.spec
        if tree.built:
            return "", 0.0
        tree.check_out(spec.keep_build)
        why, seconds = run_build(
            spec.build, tree.path, spec.build_timeout, log, place.environment, place.cancelled.is_set
        )
        if spec.build and not spec.keep_build and not why:
            tree.keep()
        return why, seconds

    def _replayed(self, tree: Path, place: Workplace, log: Path) -> Measurement:
        """Run the kernel on the calls; import it and nothing else if there are none."""
        with tempfile.TemporaryDirectory(dir=tree.parent) as scratch:  # removed with the worktree after a kill
            task = probe.ProbeTask(
                tree=tree, sources=self.spec.sources, kernel=self.spec.kernel, calls=place.inputs.get(CALLS),
                result=Path(scratch) / "result.json", log=log.resolve(), name_bug=self.name_bug,
                reproduce=reproduce(self.spec, self.commit), environment=dict(place.environment),
            )  # fmt: skip
            return Forks().run(task, self.spec.timeout, place.cancelled.is_set)


def _accuracy(spec: BisectSpec, tree: Path, place: Workplace, log: Path) -> dict[str, object]:
    """Run ``assay run`` with a commit's kernel as the candidate, in a new process: one imports a kernel only once.

    Returns:
        What it adds to the commit's `Measurement`.

    Raises:
        UsageError: it rejected its arguments.
    """
    folder = place.folder / "run"
    paths = [str(tree / source) for source in spec.sources if (tree / source).is_dir()]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**place.environment, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "assay", "run", "--candidate", spec.kernel, "--out", str(folder.resolve())]
    command += spec.run_args
    code = _run_command(
        command, place.folder, environment, spec.timeout, log, gently=True, cancelled=place.cancelled.is_set
    )
    if code in (ExitCode.PASS, ExitCode.REGRESSION):
        return {"regression": code == ExitCode.REGRESSION}
    if code == ExitCode.USAGE:
        said = f"assay run rejected its arguments: {_tail(log, 400)}"
        raise UsageError(said, "arguments that it accepts", "check --run-arg")
    status = "undecided" if code == ExitCode.NO_VERDICT else "died"
    return {"status": status, "reason": _reason(code, folder, log)}


def _reason(code: int | None, folder: Path, log: Path) -> str:
    if code is None:
        return "assay run timed out"
    with suppress(EvidenceError):
        report = read_report(folder / "report.json")
        return f"{report.verdict}: {report.headline}"
    return f"assay run exited with {code}: {_tail(log)}"


def reproduce(spec: BisectSpec, bad: str) -> str:
    """Return the command that asks the same question with another bad revision."""
    given = {"good": spec.good[:12], "bad": bad[:12]}
    defaults = ACCURACY_DEFAULTS if spec.measure_with == "accuracy" else {}
    flags: list[str] = []
    for name, field in BisectSpec.model_fields.items():
        value = given.get(name, getattr(spec, name))
        if value == defaults.get(name, field.default):
            continue
        flag = f"--{_FLAGS.get(name, name.replace('_', '-'))}"
        flags += [
            flag if part is True else f"{flag}={part}" for part in (value if isinstance(value, tuple) else (value,))
        ]
    return shlex.join(["assay", "bisect", "commits", *flags])
