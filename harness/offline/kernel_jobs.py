"""Jobs of a run's kernel outside of a server, in a process of its own: a kernel may end its process, crash it, or hang.

    python -m assay.harness.offline.kernel_jobs NOTES JOBS

JOBS is a `Jobs` as JSON. What `assay.harness.evidence.kernel_jobs` defines is appended to the file NOTES; output is the kernel's.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable

import torch
from assay.harness.evidence.op_matrix import MatrixRecord
from assay.harness.offline.check_result import CheckResult
from assay.harness.offline.containment import keep
from assay.harness.offline.own_process import end_with
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused, tensor_of
from assay.harness.attention.kernels import declaration
from assay.harness.attention.matrix import Case, model_cases
from assay.harness.backend import Backend
from assay.harness.errors import UsageError
from assay.harness.evidence.kernel_jobs import CAUSE, COMPUTES, DRAFT, FIRST, MATRIX, Jobs, MatrixJob
from assay.harness.localize.diagnose import describe
from assay.harness.localize.raised import raised
from assay.harness.localize.threads import few_threads
from assay.harness.offline.check import check
from assay.harness.offline.observed import Reader
from assay.harness.offline.replay import replay_recorded
from assay.harness.text import one_line

_REPEATED = 6
"""Calls of the matrix that are repeated, to see whether the kernel is deterministic: each is computed three times more."""
_TRIED = 3
"""Calls of a phase on all of which a kernel must raise before a run gives up without a server."""


def main() -> None:
    """Do the jobs, one after the other, in a process whose kernel can start only so many others, and none that outlives it."""
    keep(os.getppid())
    end_with(os.getppid())
    descriptor, jobs = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND), Jobs.model_validate_json(sys.argv[2])

    def note(line: str) -> None:
        os.write(descriptor, f"{line}\n".encode())

    candidate = Backend.parse(jobs.candidate)
    kernel = _watched(jobs.candidate, candidate.kernel(), note)
    note("")  # it is loaded
    if jobs.first:
        note(FIRST + one_line(_failing_first(jobs.first, kernel), 1_000))
    reader = Reader()
    if jobs.cause:
        cause = replay_recorded(
            jobs.cause.pack, candidate, jobs.cause.reproduce, jobs.cause.served, kernel=kernel, reader=reader,
            before_reading=lambda draft: note(DRAFT + CAUSE + draft.model_dump_json()),
        )  # fmt: skip
        note(CAUSE + cause.model_dump_json())
    if jobs.matrix:
        record = _matrix_record(
            jobs.matrix, kernel, reader, lambda draft: note(DRAFT + MATRIX + draft.model_dump_json())
        )
        note(MATRIX + record.model_dump_json())


def _watched(name: str, kernel: Kernel, note: Callable[[str], None]) -> Kernel:
    """Wrap the kernel to note each call before it, and after it; on a GPU, once it has computed the call."""

    def forward(call: AttentionCall) -> Tensor:
        note(COMPUTES + describe(call))
        try:
            out = tensor_of(kernel(call))
            if call.q.is_cuda:
                torch.cuda.synchronize()
            return out
        finally:
            note("")

    functools.update_wrapper(forward, kernel, updated=())
    forward.__module__, forward.__qualname__ = "", name  # what `check` calls it
    forward.assay = declaration(kernel)  # type: ignore[attr-defined]
    return forward


def _failing_first(job: MatrixJob, kernel: Kernel) -> str:
    """Explain why a kernel can serve nothing: what it raised on all of the smallest calls of a phase; empty if it did not."""
    with few_threads(()):
        calls = [case.make() for case in _cases(job, kernel)]
    for phase in dict.fromkeys(call.phase for call in calls):
        smallest = sorted((call for call in calls if call.phase == phase), key=lambda call: call.k.shape[0])[:_TRIED]
        with few_threads(smallest):
            said = [why for call in smallest if (why := _raised(kernel, call))]
        if len(said) == len(smallest):
            return said[0]
    return ""


def _raised(kernel: Kernel, call: AttentionCall) -> str:
    """Describe what a kernel raises on a call, with the call, in words that follow "the kernel"; empty if it answers or refuses."""
    try:
        kernel(call)
    except KernelRefused:
        return ""
    except Exception as error:
        return f"{raised(error)} on {describe(call)}"
    return ""


def _cases(job: MatrixJob, kernel: Kernel) -> list[Case]:
    heads = (job.q_heads, job.kv_heads)
    phases = declaration(kernel).phases
    return model_cases(phases, job.device, getattr(torch, job.dtype), heads, job.head_dim, job.tokens)


def _matrix_record(
    job: MatrixJob, kernel: Kernel, reader: Reader, before_reading: Callable[[MatrixRecord], None]
) -> MatrixRecord:
    """Run a kernel on the matrix. `before_reading` receives the result before a wrong kernel is read."""
    cases = _cases(job, kernel)
    again = f"assay check {job.record.kernel} --dtype {job.dtype} --head-dim {job.head_dim}"

    def draft(result: CheckResult) -> None:
        before_reading(_filled(job.record, result))

    try:
        result = check(
            kernel,
            cases=cases,
            device=job.device,
            again=again,
            repeats=_REPEATED,
            read_out=reader,
            before_reading=draft,
        )
    except UsageError as error:
        return job.record.model_copy(update={"error": error.found})
    return _filled(job.record, result)


def _filled(record: MatrixRecord, result: CheckResult) -> MatrixRecord:
    """Fill a record with a result. It keeps its own name of the kernel, which is wrapped where it runs."""
    return record.model_copy(update=dict(result.record()) | {"kernel": record.kernel})


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    os._exit(code)  # threads that the kernel started, and what it left for the end, must not keep the process
