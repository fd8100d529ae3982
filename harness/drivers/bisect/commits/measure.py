"""Measuring a commit: build it, and run its kernel in a process of its own or an ``assay run``."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from assay.harness.drivers.bisect.commits.state import BisectSpec, Measurement
from assay.harness.errors import GIT_ABORT, AssayError, EvidenceError, ExitCode, UsageError
from assay.harness.reading import whole_file
from assay.harness.sides import hide
from assay.worker import Done, Job, Limits, TimedOut, run, run_command


class BrokenEnvironment(AssayError):
    """The machine is at fault, not a commit. Exit code 3; 128 under ``git bisect run``."""


def measure(spec: BisectSpec, tree: Path, log: Path, *, name_bug: bool = False, reproduce: str = "") -> Measurement:
    """Build the kernel of a worktree, and measure it in a fresh process or by an ``assay run``.

    Args:
        spec: the question, with its build command.
        tree: top of the worktree.
        log: gets what all processes print; an accuracy run is put next to it.
        name_bug: look for a hypothesis that fits, and read the kernel; takes seconds.
        reproduce: the command that findings cite.

    Raises:
        BrokenEnvironment: the build exited with 128 or more, by git's convention a broken environment, or the process that
            measures raised what is not the kernel's.
        UsageError: ``assay run`` rejected its arguments.
    """
    if spec.build and (why := _build(spec.build, tree, log)):
        return Measurement(status="build", reason=why)
    measured = _run_kernel(spec, tree, log, name_bug, reproduce)
    if measured.status == "measured" and spec.measure_with == "accuracy":
        return measured.model_copy(update=_run_accuracy(spec, tree, log.parent / "run", log))
    return measured


def _build(command: str, folder: Path, log: Path, timeout: float = 7200.0) -> str:
    """Run a build command in a folder; return why it failed, or an empty string."""
    code = run_command(["/bin/sh", "-c", command], folder, log=log, seconds=timeout)
    if code is None:
        return f"the build did not finish within {timeout:.0f} s"
    if code < 0 or code >= GIT_ABORT:
        raise BrokenEnvironment(
            f"the build command exited with {code}: {_tail(log)}",
            "exit code 0 if it built, 1 to 127 if the commit does not build",
            "fix the environment; the same command then resumes",
        )
    return f"the build exited with {code}: {_tail(log)}" if code else ""


def _run_kernel(spec: BisectSpec, tree: Path, log: Path, name_bug: bool, reproduce: str) -> Measurement:
    given = {"tree": str(tree.resolve()), "spec": spec, "name_bug": name_bug, "reproduce": reproduce}
    try:
        with log.open("ab") as output:
            job = Job("assay.harness.drivers.bisect.commits.probe:measure", given)
            outcome = run(job, limits=Limits(total_s=spec.limit), output=output)
    except UsageError:
        raise
    except Exception as error:
        raise BrokenEnvironment(
            f"a probe failed before it had measured anything: {str(error).splitlines()[0]}",
            "a machine on which the kernel can be measured",
            f"see {log}; the same command then resumes",
        ) from error
    if isinstance(outcome, Done):
        return Measurement(**outcome.result)
    if outcome.events:  # a wrong kernel was measured before it was read
        return Measurement(**outcome.events[-1]["measurement"])
    if isinstance(outcome, TimedOut):
        return Measurement(status="died", reason=f"it did not finish within {spec.limit:.0f} s")
    return Measurement(status="died", reason=f"the process {outcome.how}: {_tail(log)}")


def _run_accuracy(spec: BisectSpec, tree: Path, folder: Path, log: Path) -> dict[str, object]:
    """Run ``assay run`` with a commit's kernel as the candidate; return the fields that it changes in its `Measurement`."""
    paths = [*map(str, spec.roots(tree)), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "assay", "run", "--candidate", spec.kernel, "--out", str(folder.resolve())]
    code = run_command([*command, *spec.run_args], folder.parent, log=log, seconds=spec.limit, environment=environment)
    if code in (ExitCode.PASS, ExitCode.REGRESSION):
        return {"regression": code == ExitCode.REGRESSION}
    if code == ExitCode.USAGE:
        said = f"assay run rejected its arguments: {_tail(log, 400)}"
        raise UsageError(said, "arguments that it accepts", "check --run-arg")
    reason = "assay run timed out" if code is None else f"assay run exited with {code}: {_tail(log)}"
    if code is not None:
        with suppress(EvidenceError, OSError, ValueError, KeyError):
            document = json.loads(whole_file(folder / "report.json"))
            reason = f"{document['verdict']}: {document['headline']}"
    return {"status": "undecided" if code == ExitCode.NO_VERDICT else "died", "reason": reason}


def _tail(log: Path, most: int = 200) -> str:
    """Return the end of a log, on one line, without secrets: a build may print its own command."""
    with suppress(OSError):
        said = " ".join(log.read_text(errors="replace")[-4 * most :].split())
        return hide("log", said)[-most:] or "it printed nothing"
    return "it printed nothing"
