"""`check` and `replay` in a separate process, for the commands, tests and notebooks.

A kernel can end its process, crash it, or compute forever. Its process writes these events to its journal, so that earlier
results count:

- "asked": kernel, cases (their number), again. The check knows its calls.
- "runs": done, total. The number of runs so far, and in total.
- "computed": case, condition, fails, own, bound. A case of the matrix was computed.
- "stands": result, reading. The result if nothing followed, and whether a read-out begins now.
- "case": name, result. One of several cases was checked separately.
"""

from __future__ import annotations

import importlib
import importlib.machinery
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
    """Run a kernel on the op-level matrix in a separate process, and compare every output with the oracle.

    If there are serious findings, a read-out probes the kernel with further calls, and the first finding describes its operator.
    If the kernel ends its process, the results before that decide. A function that exists only in this process, such as one
    within a test, runs here, and can end this process.

    Args:
        kernel: a published name, ``module:function``, or the kernel itself.
        noise: the quantisation whose noise is allowed, such as "int8_qk", or None for the kernel's declaration.
        case: run only cases whose name contains this, or None for all.
        again: a command that repeats the check, for the findings; by default built from the arguments.
        calls: total runs of the kernel, including the matrix; the rest repeat one cheap call of each phase. None means 1,000, or
            2,000 with the full matrix, or only the matrix if `case` is given.
        read_out: most seconds for the read-out of a wrong kernel, or 0 to skip it. None means 30 s.
        on_event: called with each event of the journal; see `assay.harness.checks.jobs`.
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
    """Run a kernel on recorded calls in a separate process, and diagnose it.

    If there are serious findings, a read-out follows: the first finding shows the weights of the smallest failing call, and the
    operator inferred from further calls if that explains the wrong outputs of the recorded ones too.

    Args:
        pack: folder of a replay pack.
        candidate: a published kernel, or ``module:function``.
        reproduce: a command that reproduces the findings; by default ``assay replay`` with these arguments.
        read_out: most seconds for the read-out of a wrong kernel, or 0 to skip it. None means 30 s.
        on_event: called with each event of the journal; see `assay.harness.checks.jobs`.

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
    """Do a job of this package with a kernel: in a separate process if that can import it, otherwise here."""
    __tracebackhide__ = True
    if not isinstance(kernel, str):
        from assay.harness.attention.kernels import exits_raised
        from assay.harness.checks.kernel_matrix import named

        name, _ = named(kernel)
        if not _importable(name):
            with exits_raised():  # an exit with status 0 would look like a pass
                module, _, function = job.partition(":")
                run = getattr(importlib.import_module(f"{__package__}.{module}"), function)
                done = run(kernel, **given, journal=worker.Journal(on_event))
            return worker.Done(done and done.model_dump())
        kernel = name
    return worker.run(worker.Job(f"{__package__}.{job}", {"kernel": kernel, **given}), on_event=on_event)


def _importable(name: str) -> bool:
    """Return True if a fresh process finds the module of ``module:function``."""
    module, colon, function = name.partition(":")
    spec = importlib.machinery.PathFinder.find_spec(module.partition(".")[0], sys.path) if colon else None
    return spec is not None and "<" not in function


def _as_json(options: MatrixOptions) -> dict[str, Any]:
    """Return the options as JSON, with dtypes as names."""
    dtypes = options.get("dtypes")
    return {**options, "dtypes": None if dtypes is None else [str(dtype).removeprefix("torch.") for dtype in dtypes]}


def ended_early(how: str, so: str) -> AssayError:
    """Make the error that a kernel ended its process, with the way it ended and the consequence."""
    return AssayError(
        f"The process that ran the kernel {how} before its work was done; {so}.",
        "a kernel that returns an output or raises an exception",
        "see its output. If it crashed, the output has its stack; if it was killed by SIGKILL, memory may have run out",
    )


def interrupted(outcome: worker.Crashed) -> KernelResult:
    """Make the result of a check or a replay whose process the kernel ended.

    If a result stood, its verdict stands. Otherwise the cases before the end count: the kernel is wrong if any of them is, and
    has no verdict if none is.

    Raises:
        AssayError: it ended before the kernel was asked for anything; or it was a replay, whose calls do not count separately.
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
                diagnosis="the output is out of bounds; the process ended before the cause was known",
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
