"""Sets the number of threads that PyTorch and NumPy use on a CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from assay.harness.attention.call import AttentionCall

# Up to this many attention scores (queries x keys x heads) in a call, threads cost more than they gain.
_SMALL_SCORES = 2**23
# Threads for a kernel inside `few_threads`, or None for the current number.
_of_kernels: ContextVar[int | None] = ContextVar("_of_kernels", default=None)


@contextmanager
def few_threads(calls: Sequence[AttentionCall]) -> Iterator[None]:
    """Run PyTorch and NumPy's BLAS on one thread if all calls are small and on a CPU.

    Two threads wait for each other in every operation: on two busy cores, checking a kernel on the small matrix took 15 s of CPU
    with two, 0.8 s with one. The threads of NumPy's BLAS, which Triton's interpreter multiplies with, spin meanwhile: they took
    219 of the 306 CPU seconds of a check of SageAttention. With ``OMP_NUM_THREADS`` set, code in `kernel_threads` keeps its
    PyTorch threads, since a CPU kernel's own threads might race.
    """
    before = torch.get_num_threads()
    small = all(
        call.q.device.type == "cpu" and call.q.shape[0] * call.q.shape[1] * call.k.shape[0] <= _SMALL_SCORES
        for call in calls
    )
    if not small:
        yield
        return
    token = _of_kernels.set(_of_kernels.get() or (before if "OMP_NUM_THREADS" in os.environ else None))
    torch.set_num_threads(1)
    try:
        with _one_blas_thread():
            yield
    finally:
        torch.set_num_threads(before)
        _of_kernels.reset(token)


def _one_blas_thread() -> AbstractContextManager[object]:
    try:
        from threadpoolctl import threadpool_limits
    except (
        ImportError
    ):  # an engine's own environment may lack it: kernels there compute the same, and Triton's interpreter longer
        return nullcontext()
    limits: AbstractContextManager[object] = threadpool_limits(1, "blas")
    return limits


@contextmanager
def kernel_threads() -> Iterator[None]:
    """Run the kernel under test on as many threads as ``OMP_NUM_THREADS`` gives it, inside `few_threads` too."""
    before, wanted = torch.get_num_threads(), _of_kernels.get()
    if wanted is None or wanted == before:
        yield
        return
    torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Seconds of waiting that count as one second of CPU time.
_WAITS = 5.0


def budget_clock(device: str) -> Callable[[], float]:
    """Return the clock of a budget, in seconds from zero.

    On a CPU it shows the CPU time of this process, so that a busy machine gets as much done as an idle one. A waiting kernel
    would never use up the budget, so a second of waiting counts a fifth. On other devices it shows wall-clock time.
    """
    wall, cpu = time.monotonic(), time.process_time()
    if device != "cpu":
        return lambda: time.monotonic() - wall
    return lambda: max(time.process_time() - cpu, (time.monotonic() - wall) / _WAITS)
