"""Probing a commit: check it out, build it, and measure it in a process of its own or with an ``assay run``."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from pydantic import ValidationError

from assay.harness.bisect.commits import probe
from assay.harness.bisect.commits.repo import Repository
from assay.harness.bisect.commits.state import ACCURACY_DEFAULTS, BisectSpec, Measurement
from assay.harness.errors import GIT_ABORT, AssayError, EvidenceError, ExitCode, UsageError
from assay.harness.judge.report_file import read_report

_PRELOADED_MODULES = ["torch", "assay.harness.bisect.commits.probe", "triton", "triton.language"]
"""Imported by the process that probes are forked from; modules that are not installed are skipped."""
_COMMAND_NOT_FOUND = (126, 127)
GRACE_S = 30.0
_FLAGS = {"sources": "source", "conditions": "condition", "measure_with": "with", "run_args": "run-arg"}
"""Flags of ``assay bisect commits`` that are not named after their field of `BisectSpec`."""


class BrokenEnvironment(AssayError):
    """The machine is at fault, not a commit. Exit code 3; 128 under ``git bisect run``."""


Prober = Callable[[str, Path, bool], Measurement]
"""Measures a commit: receives its hash, the file that output is appended to, and whether to look for a hypothesis that fits and to
read a wrong kernel. Raises BrokenEnvironment if the commit cannot be probed through no fault of its own."""


def run_build(command: str, folder: Path, timeout: float, log: Path) -> tuple[str, float]:
    """Run a build command in a folder; return the reason for a failure (empty if none) and the build time in seconds.

    Raises:
        BrokenEnvironment: the exit code was 128 or more, by git's convention a broken environment.
    """
    if not command:
        return "", 0.0
    begun = time.monotonic()
    code = run_command(["/bin/sh", "-c", command], folder, {}, timeout, log)
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


def run_command(
    command: list[str], folder: Path, environment: dict[str, str], timeout: float, log: Path, gently: bool = False
) -> int | None:
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
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if gently and process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code if code >= 0 else 128 - code


def _tail(log: Path, most: int = 200) -> str:
    """Return the end of a log, on one line."""
    with suppress(OSError):
        return " ".join(log.read_text(errors="replace")[-4 * most :].split())[-most:] or "it printed nothing"
    return "it printed nothing"


class Forks:
    """Fresh processes, forked from one that has imported torch and assay but no kernel."""

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

    def run(self, task: probe.ProbeTask, timeout: float) -> Measurement:
        """Run a task in a fresh process.

        Raises:
            BrokenEnvironment: no process can be started, or it ended normally without writing its result.
        """
        task.result.unlink(missing_ok=True)
        process = self._context.Process(target=probe.main, args=(task,))
        try:
            process.start()
        except (OSError, EOFError, RuntimeError) as error:
            raise BrokenEnvironment(
                f"no process can be started: {error}.", "enough memory and free process ids", "free some"
            ) from error
        try:
            process.join(timeout)
            late = process.is_alive()
        finally:
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


def replay_prober(spec: BisectSpec, repository: Repository, tree: Path, calls: Path | None, forks: Forks) -> Prober:
    """Make what measures layer error: the kernel computes the calls, without a server or a model.

    Args:
        spec: the question.
        repository: of the kernel.
        tree: its worktree.
        calls: file of the calls; None to import the kernel and nothing else.
        forks: runs the kernel.
    """

    def probe_commit(commit: str, log: Path, name_bug: bool = False) -> Measurement:
        begun = time.monotonic()
        repository.checkout(tree, commit, spec.keep_build)
        why, build_seconds = run_build(spec.build, tree, spec.build_timeout, log)
        if why:
            measured = Measurement(status="build", reason=why)
        else:
            with tempfile.TemporaryDirectory(dir=tree.parent) as scratch:  # removed with the worktree after a kill
                task = probe.ProbeTask(
                    tree=tree, sources=spec.sources, kernel=spec.kernel, calls=calls, result=Path(scratch) / "result.json",
                    log=log.resolve(), name_bug=name_bug, reproduce=reproduce(spec, commit),
                )  # fmt: skip
                measured = forks.run(task, spec.timeout)
        return measured.model_copy(update={"seconds": time.monotonic() - begun, "build_seconds": build_seconds})

    return probe_commit


def accuracy_prober(spec: BisectSpec, imports: Prober, tree: Path) -> Prober:
    """Make what runs ``assay run`` with the commit's kernel as the candidate, in a new process: one imports a kernel only once.

    Args:
        spec: the question.
        imports: checks the commit out, builds it and imports its kernel.
        tree: the worktree.

    The prober also raises UsageError: ``assay run`` rejected its arguments.
    """

    def probe_commit(commit: str, log: Path, name_bug: bool = False) -> Measurement:
        begun = time.monotonic()
        imported = imports(commit, log, False)
        if imported.status != "measured":
            return imported
        folder = log.parent.parent / "runs" / log.stem
        paths = [str(tree / source) for source in spec.sources if (tree / source).is_dir()]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        environment = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "assay", "run", "--candidate", spec.kernel, "--out", str(folder.resolve())]
        command += spec.run_args
        code = run_command(command, log.parent, environment, spec.timeout, log, gently=True)
        update: dict[str, object] = {"seconds": time.monotonic() - begun}
        if code in (ExitCode.PASS, ExitCode.REGRESSION):
            update["regression"] = code == ExitCode.REGRESSION
        elif code == ExitCode.USAGE:
            said = f"assay run rejected its arguments: {_tail(log, 400)}"
            raise UsageError(said, "arguments that it accepts", "check --run-arg")
        else:
            status = "undecided" if code == ExitCode.NO_VERDICT else "died"
            update |= {"status": status, "reason": _reason(code, folder, log)}
        return imported.model_copy(update=update)

    return probe_commit


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
