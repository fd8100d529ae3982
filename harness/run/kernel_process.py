"""The candidate's kernel outside a server, as part of a run: one process computes, and this one watches it.

Two jobs: compare the calls that the layer diff recorded with the oracle, and name the bug; and run the op-level matrix of the
shape of the run's model. A server sees the conditions that an engine makes; the matrix has all pairs of lengths, batches, data
and page sizes up to the policy's envelope, on synthetic data, with float64 as the truth.

Where the sides differ in their Python, its packages or a variable that can change numbers, the candidate's own environment computes
the recorded calls: a shadow in the reference's server shows the reference's version of a kernel.

If a kernel ends its process, crashes it or hangs, the run lacks this result; its report still appears, but is not a pass.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from assay import worker
from assay.harness.engines.arguments import numerics
from assay.harness.engines.environments import python_of, python_path
from assay.harness.engines.launch import kernel_settings
from assay.harness.engines.model import ModelShape, model_shape
from assay.harness.errors import AssayError, EngineError, EvidenceError
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.kernel_result import CAUSE, MATRIX, KernelResult
from assay.harness.evidence.layer_diff_record import pack_of
from assay.harness.evidence.pack import replay_command
from assay.harness.fingerprint.facts import own_environment
from assay.harness.progress import ProgressDisplay
from assay.harness.run.plan import Plan
from assay.harness.text import one_line
from assay.harness.verdict import serious, with_evidence

# The process's output, in the run's folder.
LOG = "kernel.log"
_NO_HEADS = "the model's configuration does not state how many heads it has"
_DTYPES = ("float16", "bfloat16", "float32")
# Each event that carries a result, with the result's file and title.
_RESULTS = {"cause": (CAUSE, "Recorded calls"), "matrix": (MATRIX, "Op-level matrix")}


def examine_kernel(
    plan: Plan, folder: RunFolder, display: ProgressDisplay, stop: threading.Event | None = None
) -> None:
    """Examine the recorded calls and run the op-level matrix, unless they are done.

    Args:
        stop: ends this at once when set, without a result.

    Raises:
        EvidenceError: the folder cannot be written, or the recorded calls are damaged.
    """
    stop = stop or threading.Event()
    while not stop.is_set():
        pack = pack_of(folder) if folder.read(CAUSE) is None else None
        due = plan.candidate.is_kernel and plan.has_layer_diff and folder.read(MATRIX) is None
        if pack and not (plan.candidate.is_kernel or _again(pack, plan, folder)):
            _keep("cause", _examine_here(pack, plan, folder), folder, display)
        elif due and not _has_heads(_shape(plan, folder)):
            _keep("matrix", _no_matrix(plan, folder, _NO_HEADS), folder, display)
        elif pack or due:
            _attempt(pack, due, plan, folder, display, stop)
        else:
            return


def try_kernel(plan: Plan, folder: RunFolder) -> None:
    """Before starting servers, which takes minutes, call the candidate's kernel on the smallest calls of each of its phases.

    Raises:
        EngineError: it raises on all calls of a phase, ends its process, crashes it or hangs.
        EvidenceError: the folder cannot be written.
    """
    if not plan.candidate.is_kernel or not _has_heads(shape := _shape(plan, folder)):
        return
    given = {"candidate": plan.candidate.name, "matrix": shape}
    why, said = _done("try_first", given, plan, folder, lambda event: None, threading.Event())
    if why or said:
        raise EngineError(
            f"No server was started: {why or f'the kernel {said}'}.",
            "an output of at least one of the smallest calls of each phase",
            f"fix the kernel; assay check {plan.candidate.name} calls it without a server (its output is in {LOG})",
        )


def _examine_here(pack: Path, plan: Plan, folder: RunFolder, not_run: str = "") -> KernelResult:
    """Diagnose outputs without calling the kernel: it is an engine's own backend, or must not run for the reason `not_run`."""
    from assay.harness.checks.replay import replay_recorded  # imports torch, which only a layer diff needs

    given = _recorded(pack, plan, folder)
    return replay_recorded(Path(given["pack"]), plan.candidate, given["reproduce"], given["served"], not_run)


def _recorded(pack: Path, plan: Plan, folder: RunFolder) -> dict[str, Any]:
    """Name a run's recorded calls, and say whether the candidate served them itself."""
    again = _again(pack, plan, folder)
    return {
        "pack": str(pack.resolve()),
        "served": pack.is_relative_to(folder.server_folder("candidate")),
        "reproduce": folder.manifest().command if again else replay_command(pack, plan.candidate.name),
        "kernel": again,
    }


def _again(pack: Path, plan: Plan, folder: RunFolder) -> str:
    """Return the kernel that computes the recorded calls in the candidate's environment, or "" if their server ran it there."""
    if not own_environment(plan.spec.treatment) or pack.is_relative_to(folder.server_folder("candidate")):
        return ""
    return plan.candidate.name if plan.candidate.is_kernel else f"{plan.spec.candidate.engine}:{plan.candidate.name}"


def _keep(name: str, result: KernelResult, folder: RunFolder, display: ProgressDisplay) -> None:
    """Write a result, and show it."""
    file, title = _RESULTS[name]
    folder.write(file, result)
    if count := result.calls if name == "cause" else result.computed:
        named = "; ".join(finding.title for finding in result.findings) or "nothing"
        display.say(f"{title}: {count} calls in {result.seconds:.1f} s: found {named}.")
    if result.not_run:
        display.say(f"{title}: the kernel was not tested: {result.not_run}.")


def _shape(plan: Plan, folder: RunFolder) -> dict[str, Any]:
    """Return what all calls of the matrix share: the shape of the run's model, up to the policy's envelope."""
    model = model_shape(plan.model)
    return {
        "device": plan.spec.device,
        "dtype": _dtype(folder, plan.spec.device, model),
        "heads": (model.q_heads, model.kv_heads),
        "head_dim": model.head_dim,
        "tokens": min(plan.spec.policy.envelope_tokens, model.context),
        "asked": model.asked,
    }


def _has_heads(shape: dict[str, Any]) -> bool:
    return all((*shape["heads"], shape["head_dim"]))


def _words(shape: dict[str, Any]) -> str:
    """Describe a shape as a report shows it."""
    q_heads, kv_heads = shape["heads"]
    heads = f"{q_heads} q heads on {kv_heads} kv heads"
    return f"{shape['dtype']}, head_dim {shape['head_dim']}, {heads}, to {shape['tokens']:,} tokens"


def _no_matrix(plan: Plan, folder: RunFolder, why: str) -> KernelResult:
    return KernelResult(kernel=plan.candidate.name, shapes=_words(_shape(plan, folder)), not_run=why)


def _dtype(folder: RunFolder, device: str, model: ModelShape) -> str:
    """Return the dtype in which the candidate's server computed; by default float32 on the CPU, or else the model's."""
    servers = {server.role: server for server in folder.progress().servers}
    served = [numerics(servers[role]).get("dtype", "") for role in ("candidate", "reference") if role in servers]
    usual = "float32" if device == "cpu" else model.dtype if model.dtype in _DTYPES else "bfloat16"
    return next((name for name in served if name in _DTYPES), usual)


def _attempt(
    pack: Path | None, matrix: bool, plan: Plan, folder: RunFolder, display: ProgressDisplay, stop: threading.Event
) -> None:
    """Have a process do both jobs, and keep each result; if it fails, the first job without a result fails.

    A result that stood before the kernel was asked for more is kept if it is wrong, with the reason why it says no more.
    """
    due = [*["cause"] * bool(pack), *["matrix"] * matrix]
    stands: KernelResult | None = None
    shape = _shape(plan, folder)

    def take(event: worker.Event) -> None:
        nonlocal stands
        if (name := event["event"]) in _RESULTS:
            due.remove(name)
            stands = None
            _keep(name, KernelResult.model_validate(event["result"]), folder, display)
        elif name == "stands":
            stands = KernelResult.model_validate(event["result"])

    given = {
        "candidate": plan.candidate.name,
        "cause": _recorded(pack, plan, folder) if pack else None,
        "matrix": shape if matrix else None,
        "shapes": _words(shape),
    }
    why, _ = _done("examine", given, plan, folder, take, stop)
    if not why or stop.is_set() or not due:
        return
    expected = f"{why}; expected an output or an exception (see {LOG}, and run assay check {plan.candidate.name})"
    if stands is not None and serious(stands.findings):
        findings = tuple(with_evidence(stands.findings, f"asked for more, {why}"))
        shapes = _words(shape) if due[0] == "matrix" else ""
        result = stands.model_copy(update={"findings": findings, "shapes": shapes})
    elif due[0] == "cause" and pack:
        result = _examine_here(pack, plan, folder, expected)
    else:
        result = _no_matrix(plan, folder, expected)
    _keep(due[0], result, folder, display)


def _done(
    job: str, given: dict[str, Any], plan: Plan, folder: RunFolder, take: worker.OnEvent, stop: threading.Event
) -> tuple[str, Any]:
    """Have a process do a job of `assay.harness.checks.kernel_jobs`; assay's own computing between two calls has no time limit.

    Returns:
        The reason why it did not finish, or an empty string; and the job's return value.
    """
    call_s, load_s = plan.spec.request_timeout, plan.spec.startup_timeout
    side = plan.spec.candidate
    python, environment = python_of(side), {**os.environ, **side.environment}
    environment |= kernel_settings(environment)
    if python:  # its environment may have no assay, or another one
        environment["PYTHONPATH"] = python_path(python, environment["PYTHONPATH"])
    try:
        with (folder.path / LOG).open("ab") as log:
            outcome = worker.run(
                worker.Job(f"assay.harness.checks.kernel_jobs:{job}", given), on_event=take, output=log, stop=stop,
                limits=worker.Limits(start_s=load_s, step_s=call_s), environment=environment, python=python,
            )  # fmt: skip
    except OSError as error:
        problem = f"The kernel's process cannot be launched: {error}."
        raise EvidenceError(problem, "a writable folder", "give another --out") from error
    except AssayError:
        raise
    except Exception as error:  # from the kernel's module, for example
        return f"the kernel's process raised {type(error).__name__}: {one_line(str(error), 300)}", None
    if isinstance(outcome, worker.Done):
        return "", outcome.result
    call = one_line(outcome.during, 120)
    if isinstance(outcome, worker.TimedOut):
        late = f"return from a call within {call_s:g} s ({call})" if call else f"load within {load_s:g} s"
        return f"the kernel did not {late}", None
    place = f"in a call ({call})" if call else "outside a call"
    return f"the kernel's process {outcome.how} {place}", None
