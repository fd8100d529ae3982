"""Measuring a commit: build it, and run its kernel in a separate process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from assay.harness.drivers.bisect.commits.state import BisectSpec, Measurement
from assay.harness.errors import GIT_ABORT, AssayError, UsageError
from assay.harness.sides import hide
from assay.worker import Done, Job, Limits, TimedOut, run, run_command

# Seconds that a kernel may take for all calls together.
_LIMIT_S = 300.0


class BrokenEnvironment(AssayError):
    """The machine is at fault, not a commit. Exit code 3, or 128 under ``git bisect run``."""


def measure(spec: BisectSpec, tree: Path, log: Path, *, name_bug: bool = False, reproduce: str = "") -> Measurement:
    """Build the kernel of a worktree, and measure it in a fresh process.

    Args:
        name_bug: look for a hypothesis that fits, and probe what the kernel computes; takes seconds.

    Raises:
        BrokenEnvironment: the build exited with 128 or more (git's convention for a broken environment), or the measuring
            process raised an error that is not the kernel's.
    """
    if spec.build and (why := _build(spec.build, tree, log)):
        return Measurement(status="build", reason=why)
    given = {"tree": str(tree.resolve()), "spec": spec, "name_bug": name_bug, "reproduce": reproduce}
    try:
        with log.open("ab") as output:
            job = Job("assay.harness.drivers.bisect.commits.probe:measure", given)
            outcome = run(job, limits=Limits(total_s=_LIMIT_S), output=output)
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
    if outcome.events:  # a wrong kernel is measured before it is probed further
        return Measurement(**outcome.events[-1]["measurement"])
    if isinstance(outcome, TimedOut):
        return Measurement(status="died", reason=f"it did not finish within {_LIMIT_S:.0f} s")
    return Measurement(status="died", reason=f"the process {outcome.how}: {_tail(log)}")


def _build(command: str, folder: Path, log: Path, timeout: float = 7200.0) -> str:
    """Run a build command in a folder; return the reason if it failed, or an empty string."""
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


def _tail(log: Path, most: int = 200) -> str:
    """Return the end of a log on one line, without secrets: a build may print its own command."""
    with suppress(OSError):
        said = " ".join(log.read_text(errors="replace")[-4 * most :].split())
        return hide("log", said)[-most:] or "it printed nothing"
    return "it printed nothing"
