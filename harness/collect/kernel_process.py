"""The candidate's kernel outside of a server, as part of a run: a process computes, and this one watches it.

Two jobs: the calls that the layer diff recorded are compared with the oracle, and the bug gets a name; and the op-level matrix of
the shape of the run's model. A server sees the conditions that an engine makes; the matrix has all pairs of lengths, batches, data
and page sizes up to the policy's envelope, on synthetic data, with float64 as the truth.

A kernel that ends its process, crashes it or hangs leaves a run without this result, but with a report, which is no pass.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from assay.harness.collect.plan import Plan
from assay.harness.engines.model import ModelShape, model_shape
from assay.harness.engines.process import ServerProcess
from assay.harness.engines.sglang.launch import kernel_settings
from assay.harness.errors import EngineError, EvidenceError
from assay.harness.evidence import cause, op_matrix
from assay.harness.evidence.cause import ReplayResult
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.kernel_jobs import CAUSE, COMPUTES, DRAFT, FIRST, MATRIX, CauseJob, Jobs, MatrixJob
from assay.harness.evidence.layer_diff_record import pack_of
from assay.harness.evidence.op_matrix import MatrixRecord
from assay.harness.evidence.pack import replay_command
from assay.harness.offline.containment import TOO_MANY
from assay.harness.offline.own_process import how_ended
from assay.harness.progress import ProgressDisplay
from assay.harness.text import one_line
from assay.harness.verdict import serious

LOG = "kernel.log"
"""The output of the process, in the run's folder."""
_POLL_INTERVAL_S = 0.1
_BLOCK = 2**20
_DTYPES = ("float16", "bfloat16", "float32")


def examine_kernel(
    plan: Plan, folder: RunFolder, display: ProgressDisplay, stop: threading.Event | None = None
) -> None:
    """Examine the recorded calls and run the op-level matrix, as far as it is not done.

    Args:
        plan: a run with a layer diff.
        folder: the run's.
        display: shows the results.
        stop: ends this at once when it is set, without a result.

    Raises:
        EvidenceError: the folder cannot be written, or the recorded calls are damaged.
    """
    stop = stop or threading.Event()
    while not stop.is_set():
        jobs = Jobs(candidate=plan.candidate.name, cause=_cause_job(plan, folder), matrix=_matrix_job(plan, folder))
        if jobs.cause and not plan.candidate.is_kernel:
            _keep_cause(folder, _examine_here(jobs.cause, plan), display)
        elif jobs.matrix and (why := _impossible(jobs.matrix)):
            _keep_matrix(folder, jobs.matrix.record.model_copy(update={"error": why}), display)
        elif jobs.cause or jobs.matrix:
            _attempt(jobs, plan, folder, display, stop)
        else:
            return


def try_kernel(plan: Plan, folder: RunFolder) -> None:
    """Call the candidate's kernel before servers are started, which takes minutes: on the smallest calls of each of its phases.

    Raises:
        EngineError: it raises on all of a phase, ends its process, crashes it or hangs.
        EvidenceError: the folder cannot be written.
    """
    if not plan.candidate.is_kernel or _impossible(job := _job_of(plan, folder)):
        return
    said: list[str] = []

    def take(lines: Sequence[str]) -> bool:
        said.extend(line.removeprefix(FIRST) for line in lines if line.startswith(FIRST))
        return bool(said)

    why = _watched(Jobs(candidate=plan.candidate.name, first=job), plan, folder, take, threading.Event())
    if why or any(said):
        raise EngineError(
            f"No server was started: {why or f'the kernel {said[0]}'}.",
            "an output of at least one of the smallest calls of each phase",
            f"fix the kernel; assay check {plan.candidate.name} calls it without a server (its output is in {LOG})",
        )


def _cause_job(plan: Plan, folder: RunFolder) -> CauseJob | None:
    """Return the recorded calls that are still to be examined; None if that is done, or if nothing was recorded.

    Raises:
        EvidenceError: the pack is damaged.
    """
    pack = pack_of(folder)
    if pack is None or folder.read(cause.CAUSE) is not None:
        return None
    served = pack.is_relative_to(folder.server_folder("candidate"))
    # The kernel's process has a working directory of its own.
    return CauseJob(pack=pack.resolve(), served=served, reproduce=replay_command(pack, plan.candidate.name))


def _examine_here(job: CauseJob, plan: Plan, not_run: str = "") -> ReplayResult:
    """Diagnose outputs without a call of the kernel: one of the engine's own backends, or one that is not to be run, and why."""
    from assay.harness.offline.replay import replay_recorded  # torch, which only a layer diff needs

    return replay_recorded(job.pack, plan.candidate, job.reproduce, job.served, not_run)


def _keep_cause(folder: RunFolder, result: ReplayResult, display: ProgressDisplay) -> None:
    """Write the result, and show it.

    Raises:
        EvidenceError: the folder cannot be written.
    """
    folder.write(cause.CAUSE, result)
    named = "; ".join(finding.title for finding in result.findings) or "nothing"
    display.say(f"Examined {result.calls} recorded calls in {result.seconds:.1f} s: found {named}.")
    if result.not_run:
        display.say(f"The kernel was not tested on them: {result.not_run}.")


def _matrix_job(plan: Plan, folder: RunFolder) -> MatrixJob | None:
    """Return the matrix that is still to be run; None if that is done, or if the candidate is no kernel of the contract."""
    if not plan.candidate.is_kernel or not plan.has_layer_diff or folder.read(op_matrix.MATRIX) is not None:
        return None
    return _job_of(plan, folder)


def _job_of(plan: Plan, folder: RunFolder) -> MatrixJob:
    """Make the job of a run's candidate: the matrix of the shape of the run's model, up to the policy's envelope."""
    model = model_shape(plan.model)
    dtype = _dtype(folder, plan.spec.device, model)
    tokens = min(plan.spec.policy.envelope_tokens, model.context)
    heads = f"{model.q_heads} q heads on {model.kv_heads} kv heads"
    return MatrixJob(
        record=MatrixRecord(
            kernel=plan.candidate.name, shapes=f"{dtype}, head_dim {model.head_dim}, {heads}, to {tokens:,} tokens"
        ),
        device=plan.spec.device,
        dtype=dtype,
        q_heads=model.q_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        tokens=tokens,
    )


def _impossible(job: MatrixJob) -> str:
    """Explain why a matrix cannot be made; empty if it can."""
    known = job.q_heads and job.kv_heads and job.head_dim
    return "" if known else "the model's configuration does not state how many heads it has"


def _keep_matrix(folder: RunFolder, record: MatrixRecord, display: ProgressDisplay) -> None:
    """Write the result, and show it.

    Raises:
        EvidenceError: the folder cannot be written.
    """
    folder.write(op_matrix.MATRIX, record)
    if record.error:
        display.say(f"Op-level matrix: not tested: {record.error}.")
        return
    named = "; ".join(finding.title for finding in record.findings) or "nothing"
    display.say(f"Op-level matrix: {record.computed} calls in {record.seconds:.1f} s: found {named}.")


def _dtype(folder: RunFolder, device: str, model: ModelShape) -> str:
    """Return the dtype in which the candidate's server computed; by default float32 on the CPU, else the model's."""
    servers = {server.role: server for server in folder.progress().servers}
    served = [str(servers[role].arguments.get("dtype", "")) for role in ("candidate", "reference") if role in servers]
    usual = "float32" if device == "cpu" else model.dtype if model.dtype in _DTYPES else "bfloat16"
    return next((name for name in served if name in _DTYPES), usual)


def _attempt(jobs: Jobs, plan: Plan, folder: RunFolder, display: ProgressDisplay, stop: threading.Event) -> None:
    """Have a process do the jobs, and keep each result; if it fails, the first job without a result fails.

    A result that was there before the kernel was read is kept as it was, with the reason why it states no more.
    """
    drafts: dict[str, str] = {}

    def take(lines: Sequence[str]) -> bool:
        nonlocal jobs
        drafts.update(_draft(line) for line in lines if line.startswith(DRAFT))
        jobs = _kept(jobs, lines, folder, display)
        return not (jobs.cause or jobs.matrix)

    why = _watched(jobs, plan, folder, take, stop)
    if not why:
        return
    if late := [drafts[kind] for kind, job in ((CAUSE, jobs.cause), (MATRIX, jobs.matrix)) if job and kind in drafts]:
        _kept(jobs, [_unread(line, why) for line in late[:1]], folder, display)
        return
    why = f"{why}; expected an output or an exception (see {LOG}, and run assay check {plan.candidate.name})"
    if jobs.cause:
        _keep_cause(folder, _examine_here(jobs.cause, plan, why), display)
    elif jobs.matrix:
        _keep_matrix(folder, jobs.matrix.record.model_copy(update={"error": why}), display)


def _watched(
    jobs: Jobs, plan: Plan, folder: RunFolder, take: Callable[[Sequence[str]], bool], stop: threading.Event
) -> str:
    """Have a process do the jobs until `take`, which receives its notes, returns that they are done. Returns why they were not, in
    words; empty if they were, or if `stop` was set.
    """
    with _Notes() as notes:
        command = [sys.executable, "-m", "assay.harness.offline.kernel_jobs", notes.path, jobs.model_dump_json()]
        try:
            environment = {**os.environ, **kernel_settings(os.environ)}
            process = ServerProcess(command, environment, folder.path, folder.path / LOG)
        except OSError as error:
            raise EvidenceError(
                f"The kernel's process cannot be launched: {error}.",
                "a folder that can be written",
                "give another --out",
            ) from error
        try:
            while True:
                ended = process.exit_status is not None  # asked first: what it notes until then is read
                if take(notes.read()):
                    return ""
                if why := _ended(process, notes) if ended else _hangs(plan, notes):
                    return why
                if stop.wait(_POLL_INTERVAL_S):
                    return ""
        finally:
            process.stop()


def _kept(jobs: Jobs, lines: Sequence[str], folder: RunFolder, display: ProgressDisplay) -> Jobs:
    """Keep the results among some notes. Returns the jobs that are left."""
    for line in lines:
        if line.startswith(CAUSE):
            _keep_cause(folder, ReplayResult.model_validate_json(line.removeprefix(CAUSE)), display)
            jobs = jobs.model_copy(update={"cause": None})
        elif line.startswith(MATRIX):
            _keep_matrix(folder, MatrixRecord.model_validate_json(line.removeprefix(MATRIX)), display)
            jobs = jobs.model_copy(update={"matrix": None})
    return jobs


def _draft(line: str) -> tuple[str, str]:
    """Return the kind of a result that was noted before the kernel was read, and the line that keeps it."""
    line = line.removeprefix(DRAFT)
    return next(kind for kind in (CAUSE, MATRIX) if line.startswith(kind)), line


def _unread(line: str, why: str) -> str:
    """Make a line that keeps a result whose first serious finding states why the kernel could not be read."""
    kind, text = _draft(line)
    result = (ReplayResult if kind == CAUSE else MatrixRecord).model_validate_json(text.removeprefix(kind))
    [first, *_] = serious(result.findings)
    said = first.model_copy(update={"evidence": (*first.evidence, f"the kernel could not be read: {why}")})
    findings = tuple(said if finding is first else finding for finding in result.findings)
    return kind + result.model_copy(update={"findings": findings}).model_dump_json()


def _ended(process: ServerProcess, notes: _Notes) -> str:
    """Describe how a process that left jobs unfinished ended."""
    place = f"in a call ({notes.call})" if notes.call else "outside of a call"
    if process.exit_status == TOO_MANY:
        return f"the kernel's process {how_ended(TOO_MANY)} {place}"
    if notes.call:
        return f"the kernel ended its process, which {process.how_it_ended}, {place}"
    return f"the kernel's process {process.how_it_ended} {place}"


def _hangs(plan: Plan, notes: _Notes) -> str:
    """Describe what takes too long; empty if nothing does. What assay computes between two calls has no limit."""
    limit_s, load_limit_s = plan.spec.request_timeout, plan.spec.startup_timeout
    if notes.call and notes.silent_s > limit_s:
        return f"the kernel did not return from a call within {limit_s:g} s ({notes.call})"
    if notes.empty and notes.silent_s > load_limit_s:
        return f"the kernel was not loaded within {load_limit_s:g} s"
    return ""


class _Notes(AbstractContextManager["_Notes"]):
    """Notes of the kernel's process, in memory: nothing is left on disk, and they can be read after the process has ended.

    Attributes:
        path: a file to which the process appends.
        call: the call that the kernel computes, in words; empty if it computes none.
        empty: whether nothing has been noted.
    """

    def __init__(self) -> None:
        self._memory = os.memfd_create("assay-notes")
        self.path, self.call, self.empty = f"/proc/{os.getpid()}/fd/{self._memory}", "", True
        self._at, self._since, self._begun = 0, time.monotonic(), b""

    def __exit__(self, *_: object) -> None:
        os.close(self._memory)

    def read(self) -> list[str]:
        """Read the lines since the last time."""
        new = b""
        while more := os.pread(self._memory, _BLOCK, self._at):
            new, self._at = new + more, self._at + len(more)
        *lines, self._begun = (self._begun + new).split(b"\n")
        if lines:
            last = lines[-1].decode(errors="replace")
            self.call = one_line(last.removeprefix(COMPUTES), 120) if last.startswith(COMPUTES) else ""
            self.empty, self._since = False, time.monotonic()
        return [line.decode(errors="replace") for line in lines]

    @property
    def silent_s(self) -> float:
        """Seconds since the last note was read."""
        return time.monotonic() - self._since
