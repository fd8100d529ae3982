"""Measuring a commit: build it, and run its kernel in a process of its own or an ``assay run``."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from assay.harness.drivers.bisect.commits.probe import ProbeTask
from assay.harness.drivers.bisect.commits.state import BisectSpec, Measurement
from assay.harness.engines.process import ServerProcess
from assay.harness.errors import GIT_ABORT, AssayError, EvidenceError, ExitCode, UsageError
from assay.harness.judge.report import read_report
from assay.harness.schema import read_json

_PROBE = [sys.executable, "-P", "-m", "assay.harness.drivers.bisect.commits.probe"]
_COMMAND_NOT_FOUND = (126, 127)
_BUILD_S, _POLL_S = 7200.0, 0.02


class BrokenEnvironment(AssayError):
    """The machine is at fault, not a commit. Exit code 3; 128 under ``git bisect run``."""


def build(command: str, folder: Path, log: Path, timeout: float = _BUILD_S) -> str:
    """Run a build command in a folder; return why it failed, or an empty string.

    Raises:
        BrokenEnvironment: the exit code was 128 or more, by git's convention a broken environment.
    """
    code = _run(["/bin/sh", "-c", command], folder, os.environ, timeout, log) if command else 0
    if code is None:
        return f"the build did not finish within {timeout:.0f} s"
    if code < 0 or code >= GIT_ABORT:
        raise BrokenEnvironment(
            f"the build command exited with {code}: {_tail(log)}",
            "exit code 0 if it built, 1 to 127 if the commit does not build",
            "fix the environment; the same command then resumes",
        )
    if code in _COMMAND_NOT_FOUND:
        return f"the build command was not found (exit code {code}): {_tail(log)}"
    return f"the build exited with {code}: {_tail(log)}" if code else ""


def run_kernel(task: ProbeTask, log: Path) -> Measurement:
    """Run a task in a fresh process.

    Raises:
        BrokenEnvironment: the process ended normally without writing its result.
    """
    task.result.unlink(missing_ok=True)
    asked = task.result.with_suffix(".task")
    asked.write_text(task.model_dump_json())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = _run([*_PROBE, str(asked)], task.tree, environment, task.spec.limit, log)
    if task.result.exists() and (code == 0 or task.name_bug):  # a wrong kernel was measured before it was read
        return read_json(task.result, Measurement, "run the same command again")
    if code is None:
        return Measurement(status="died", reason=f"it did not finish within {task.spec.limit:.0f} s")
    if code < 0:
        name = signal.Signals(-code).name
        return Measurement(status="died", reason=f"the process was killed by {name}: {_tail(log)}")
    raise BrokenEnvironment(
        f"a probe ended with exit code {code} and without a result: {_tail(log)}",
        f"its result in {task.result}",
        f"see {log}; the same command then resumes",
    )


def run_accuracy(spec: BisectSpec, tree: Path, folder: Path, log: Path) -> dict[str, object]:
    """Run ``assay run`` with a commit's kernel as the candidate.

    Returns:
        The fields that it changes in the commit's `Measurement`.

    Raises:
        UsageError: ``assay run`` rejected its arguments.
    """
    paths = [*map(str, spec.roots(tree)), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "assay", "run", "--candidate", spec.kernel, "--out", str(folder.resolve())]
    code = _run([*command, *spec.run_args], folder.parent, environment, spec.limit, log)
    if code in (ExitCode.PASS, ExitCode.REGRESSION):
        return {"regression": code == ExitCode.REGRESSION}
    if code == ExitCode.USAGE:
        said = f"assay run rejected its arguments: {_tail(log, 400)}"
        raise UsageError(said, "arguments that it accepts", "check --run-arg")
    reason = "assay run timed out" if code is None else f"assay run exited with {code}: {_tail(log)}"
    if code is not None:
        with suppress(EvidenceError):
            report = read_report(folder / "report.json")
            reason = f"{report.verdict}: {report.headline}"
    return {"status": "undecided" if code == ExitCode.NO_VERDICT else "died", "reason": reason}


def _run(command: list[str], folder: Path, environment: Mapping[str, str], timeout: float, log: Path) -> int | None:
    """Run a command under a guardian, append its output to a log, and leave none of its processes running.

    Returns:
        Its exit code, -n for a signal n; None if it timed out.
    """
    process, until = ServerProcess(command, environment, folder, log), time.monotonic() + timeout
    try:
        while (code := process.exit_status) is None and time.monotonic() < until:
            time.sleep(_POLL_S)
    finally:
        process.stop()
    return code


def _tail(log: Path, most: int = 200) -> str:
    """Return the end of a log, on one line."""
    with suppress(OSError):
        return " ".join(log.read_text(errors="replace")[-4 * most :].split())[-most:] or "it printed nothing"
    return "it printed nothing"
