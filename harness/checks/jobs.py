"""`check` and `replay` in a process of their own, as the commands, tests and notebooks have them.

A kernel can end its process, crash it, or compute forever. Its process writes these events to its journal, so that what it had
computed before counts:

- "asked": kernel, cases (how many), again. The check knows its calls.
- "runs": done, total. The kernel has run so often, of so often in all.
- "computed": case, condition, fails, own, bound. A case of the matrix was computed.
- "stands": result, reading. The result as it would be if nothing followed, and whether the kernel is now read.
- "case": name, result. One of several cases was checked by itself.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from assay import worker
from assay.harness.errors import AssayError
from assay.harness.evidence.kernel_result import KernelResult, MeasuredCall
from assay.harness.text import percent
from assay.harness.verdict import UNEXPLAINED, Finding, serious, with_evidence

if TYPE_CHECKING:  # the commands start before torch is imported
    from assay.harness.attention.call import Kernel
    from assay.harness.checks.kernel_matrix import MatrixOptions


def check(
    kernel: str | Kernel,
    *,
    noise: str | None = None,
    case: str | None = None,
    again: str = "",
    calls: int | None = None,
    read_out: float | None = None,
    on_event: worker.OnEvent = lambda event: None,
    **options: Unpack[MatrixOptions],
) -> KernelResult:
    """Run a kernel on the op-level matrix, in a process of its own, and compare every output with the oracle.

    A kernel with serious findings is then read: it is asked on further calls what it computes, and the first of them states it.
    If the kernel ends its process, what was computed before decides. A function that only this process has, as one within a test,
    runs here, and can end this process.

    Args:
        kernel: a published name, ``module:function``, or the kernel itself.
        noise: quantisation whose noise is allowed, for example "int8_qk"; None for what the kernel declares.
        case: run only cases whose name contains this; None for all.
        again: a command that repeats the check, for the findings; by default built from the arguments.
        calls: how often the kernel runs in all, the matrix included: the rest on one cheap call of each phase. None for 1,000, for
            2,000 with the full matrix, and for none but the matrix where `case` is given.
        read_out: most seconds that reading a wrong kernel takes, 0 not to read it. None for 30 s.
        on_event: is called with each event of the journal; see `assay.harness.checks.jobs`.
        options: `phases`, `dtypes`, `size`, `device`, `head_dims`, `like` and `seed` of the matrix; see `MatrixOptions`.

    Raises:
        TypeError: no such option.
        UsageError: no such kernel, phase, dtype, noise, size or device, no case, or a package that the kernel imports is not
            installed.
        AssayError: the kernel ended its process before anything was known.
    """
    __tracebackhide__ = True
    named = {"noise": noise, "case": case, "again": again, "calls": calls, "read_out": read_out}
    return _result(_run("check:check", kernel, {**named, **_as_json(options)}, on_event))


def replay(
    pack: Path,
    candidate: str,
    reproduce: str = "",
    read_out: float | None = None,
    on_event: worker.OnEvent = lambda event: None,
) -> KernelResult:
    """Run a kernel on recorded calls, in a process of its own, and name what is wrong with it.

    A kernel with serious findings is then read: the first of them shows the weights of the smallest failing call and what the
    kernel was observed to compute on further calls, if that gives the wrong outputs of the recorded ones too.

    Args:
        pack: folder of a replay pack.
        candidate: a published kernel, or ``module:function``.
        reproduce: a command that reproduces the findings; by default ``assay replay`` with these arguments.
        read_out: most seconds that reading a wrong kernel takes, 0 not to read it. None for 30 s.
        on_event: is called with each event of the journal; see `assay.harness.checks.jobs`.

    Raises:
        UsageError: there is no such kernel, or a package that it imports is not installed; `pack` is not a pack, or holds no call
            of a phase that the kernel computes.
        AssayError: the kernel ended its process before anything was known.
    """
    given = {"pack": str(pack), "reproduce": reproduce, "read_out": read_out}
    return _result(_run("replay:replay", candidate, given, on_event))


def _result(outcome: worker.Outcome) -> KernelResult:
    return KernelResult.model_validate(outcome.result) if isinstance(outcome, worker.Done) else interrupted(outcome)


def _run(job: str, kernel: str | Kernel, given: dict[str, Any], on_event: worker.OnEvent) -> worker.Outcome:
    """Do a job of this room with a kernel: in a process of its own if that can import it, else here."""
    __tracebackhide__ = True
    if not isinstance(kernel, str):
        from assay.harness.attention.kernels import exits_raised
        from assay.harness.checks.kernel_matrix import named

        name, _ = named(kernel)
        if not _importable(name):
            with exits_raised():  # with status 0, its exit would be a pass
                module, _, function = job.partition(":")
                run = getattr(importlib.import_module(f"{__package__}.{module}"), function)
                done = run(kernel, **given, journal=worker.Journal(on_event))
            return worker.Done(done and done.model_dump())
        kernel = name
    # Threads of OpenMP that wait burn a CPU: on two busy cores, a right kernel took 19 s of CPU, and takes 3 s.
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    return worker.run(
        worker.Job(f"{__package__}.{job}", {"kernel": kernel, **given}), on_event=on_event, environment=environment
    )


def _importable(name: str) -> bool:
    """Return True if a fresh process finds the module of ``module:function``."""
    module, colon, function = name.partition(":")
    spec = importlib.machinery.PathFinder.find_spec(module.partition(".")[0], sys.path) if colon else None
    return spec is not None and "<" not in function


def _as_json(options: MatrixOptions) -> dict[str, Any]:
    """Return the options as JSON: dtypes as their names."""
    dtypes = options.get("dtypes")
    return {**options, "dtypes": None if dtypes is None else [str(dtype).removeprefix("torch.") for dtype in dtypes]}


def ended_early(how: str, so: str) -> AssayError:
    """Make the error that a kernel ended its process: how it did so, and what follows."""
    return AssayError(
        f"The process that ran the kernel {how} before its work was done; {so}.",
        "a kernel that returns an output or raises an exception",
        "see what it wrote. If it crashed, its own stack is there; if it was killed by SIGKILL, memory may have run out",
    )


def interrupted(outcome: worker.Crashed) -> KernelResult:
    """Make the result of a check or a replay whose process the kernel ended.

    If a result stood, its verdict stands. If not, the cases before the end count: the kernel is wrong if one of them is, and has
    no verdict otherwise.

    Raises:
        AssayError: it ended before anything was asked of the kernel; or it was a replay, and none of its calls counts by itself.
    """
    end = f"{outcome.how} {f'in {outcome.during}' if outcome.during else 'outside of a call'}"
    for event in reversed(outcome.events):
        if event["event"] == "stands":
            result, more = (
                KernelResult.model_validate(event["result"]),
                f"asked for more, the process of the kernel {end}",
            )
            if not serious(result.findings):
                return result.model_copy(update={"missing": (*result.missing, more), "not_run": outcome.how})
            findings = tuple(with_evidence(result.findings, more))
            return result.model_copy(update={"findings": findings, "not_run": outcome.how})
    asked = next((event for event in outcome.events if event["event"] == "asked"), None)
    if asked is None:
        raise ended_early(outcome.how, "there is no verdict")
    return _of_those_before(
        asked, [event for event in outcome.events if event["event"] == "computed"], outcome.how, end
    )


def _of_those_before(asked: worker.Event, done: Sequence[worker.Event], how: str, end: str) -> KernelResult:
    """Make the result of the cases that were computed before the kernel ended its process."""
    wrong = [event for event in done if event["fails"]]
    worst = max(done, key=lambda event: float(event["own"] / event["bound"]), default=None)
    extent = f"{len(done)} of {asked['cases']} calls were computed before"
    findings = []
    if worst is not None and wrong:
        findings.append(
            Finding(
                id=UNEXPLAINED, title="unexplained error", severity="serious", where=f"{len(wrong)} of {len(done)} calls",
                diagnosis="the output is out of bounds; the process ended before it was known why",
                evidence=(
                    f"the worst error is {percent(worst['own'])} (rounding explains {percent(worst['bound'])}): {worst['case']}",
                    f"the process of the kernel {end}; {extent}",
                ),
                reproduce=asked["again"],
            )
        )  # fmt: skip
    return KernelResult(
        kernel=asked["kernel"], calls=len(done), failing=tuple(event["case"] for event in wrong),
        measured=tuple(
            MeasuredCall(
                case=event["case"], condition=event["condition"], error=event["own"], bound=event["bound"], wrong=event["fails"]
            )
            for event in done
        ),
        worst_own=worst and worst["own"], worst_bound=worst and worst["bound"], findings=tuple(findings),
        missing=(f"the process of the kernel {end}; {extent}",), not_run=how, again=asked["again"],
    )  # fmt: skip
