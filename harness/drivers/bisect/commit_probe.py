"""A probe of a checkout for ``git bisect run``: build it, and run its kernel in separate processes, until the outcome is clear."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import Field

from assay.harness.attention.interpreter import interpret_without_gpu
from assay.harness.backend import Backend
from assay.harness.drivers.bisect.majority import Outcome, majority
from assay.harness.errors import GIT_ABORT, AssayError, UsageError
from assay.harness.schema import Record
from assay.harness.sides import hide
from assay.harness.text import percent
from assay.worker import Done, Job, Limits, TimedOut, run, run_command

# Seconds that a kernel may take for all calls together.
_LIMIT_S = 300.0


class BrokenEnvironment(AssayError):
    """The machine is at fault, not a commit. Exit code 3, or 128 under ``git bisect run``."""


class ProbeSpec(Record):
    """What is probed, and how an outcome is classified.

    Attributes:
        tree: the checkout.
        kernel: as module:function, imported from the checkout.
        build: shell command that builds it, run at its top, or empty if nothing has to be built.
        pack: folder of a replay pack, or empty to use the op-level matrix.
        calls: maximum number of calls; 0 for all.
        raises: how to classify a commit whose kernel raises, dies or hangs.
    """

    tree: str
    kernel: str
    build: str = ""
    pack: str = ""
    calls: int = Field(0, ge=0)
    raises: Literal["skip", "bad"] = "skip"


class Measurement(Record):
    """The measurement of a commit: the largest own error of its kernel, or the reason why it is missing."""

    status: Literal["measured", "no call", "build", "import", "raised", "died"] = Field(
        "measured", description="what happened; died: the process was killed, crashed or timed out"
    )
    reason: str = Field("", description="why it was not measured")
    origin: str = Field("", description="file of the kernel's module, relative to the top of the checkout")
    worst: float | None = Field(None, description="largest error, as a multiple of its bound")
    own: float | None = Field(None, description="that error, relative L1")
    where: str = Field("", description="its call and head")

    def outcome(self, raises: Literal["skip", "bad"]) -> Outcome:
        """Classify the commit; `raises` is the class of a kernel that raises, dies or hangs."""
        if self.worst is not None:
            return "good" if self.worst <= 1 else "bad"
        return raises if self.status in ("raised", "died") else "skip"

    @property
    def said(self) -> str:
        """The worst error, or the reason why it is missing, in a few words."""
        if self.worst is None:
            return f"{self.status}: {self.reason}" if self.reason else self.status
        times = f"{self.worst:.3g} times its bound" if math.isfinite(self.worst) else "not finite"
        return f"{self.where}: error {percent(self.own or 0.0)}, {times}"


def probe_checkout(spec: ProbeSpec, say: Callable[[str], None]) -> Outcome:
    """Build and measure the kernel of a checkout until one outcome leads clearly: a racy kernel comes out both ways.

    Args:
        say: receives a line for each measurement.

    Raises:
        AssayError: the kernel is not named as module:function, or the environment is broken.
    """
    if not Backend.parse(spec.kernel).path:
        problem = f"--kernel {spec.kernel} is not of the form module:function."
        raise UsageError(problem, "a function of the repository", "name it as module:function")
    interpret_without_gpu()  # the processes of the measurements inherit it
    seen: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="assay-probe-") as made:
        while (outcome := majority(seen)) is None:
            built = spec.model_copy(update={"build": ""}) if seen else spec
            measured = measure(built, Path(made) / "log")
            seen.append(measured.outcome(spec.raises))
            say(f"{seen[-1]}: {measured.said} ({measured.origin or 'not imported'})")
    return outcome


def measure(spec: ProbeSpec, log: Path) -> Measurement:
    """Build the kernel of a checkout, and measure it in a fresh process.

    Raises:
        BrokenEnvironment: the build exited with 128 or more (git's convention for a broken environment), or the measuring
            process raised an error that is not the kernel's.
    """
    tree = Path(spec.tree)
    if spec.build and (why := _build(spec.build, tree, log)):
        return Measurement(status="build", reason=why)
    try:
        with log.open("ab") as output:
            job = Job("assay.harness.drivers.bisect.commit_process:measure", {"spec": spec})
            outcome = run(job, limits=Limits(total_s=_LIMIT_S), output=output)
    except UsageError:
        raise
    except Exception as error:
        raise BrokenEnvironment(
            f"a probe failed before it had measured anything: {str(error).splitlines()[0]}",
            "a machine on which the kernel can be measured",
            f"see {log}, and run git bisect again",
        ) from error
    if isinstance(outcome, Done):
        return Measurement(**outcome.result)
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
            "fix the environment, and run git bisect again",
        )
    return f"the build exited with {code}: {_tail(log)}" if code else ""


def _tail(log: Path, most: int = 200) -> str:
    """Return the end of a log on one line, without secrets: a build may print its own command."""
    with suppress(OSError):
        said = " ".join(log.read_text(errors="replace")[-4 * most :].split())
        return hide("log", said)[-most:] or "it printed nothing"
    return "it printed nothing"
