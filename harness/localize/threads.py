"""The number of threads that PyTorch and NumPy use on a CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from threadpoolctl import threadpool_limits

from assay.harness.attention.call import AttentionCall

# Attention scores (queries x keys x heads) of a call up to which threads cost more than they gain.
_SMALL_SCORES = 2**23
# Threads that a kernel gets inside `few_threads`; None for those that there are.
_of_kernels: ContextVar[int | None] = ContextVar("_of_kernels", default=None)


@contextmanager
def few_threads(calls: Sequence[AttentionCall]) -> Iterator[None]:
    """Run PyTorch, and NumPy's BLAS, on one thread where all calls are small and on a CPU.

    Two threads wait for each other in every operation: on two busy cores, checking a kernel on the small matrix took 15 s of CPU
    with two, 0.8 s with one. Those of NumPy's BLAS, in which Triton's interpreter multiplies, spin meanwhile: they took 219 of the
    306 CPU seconds of a check of SageAttention. With ``OMP_NUM_THREADS`` set, what runs in `kernel_threads` keeps its threads of
    PyTorch: a CPU kernel's own threads might race.
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
        with threadpool_limits(1, "blas"):
            yield
    finally:
        torch.set_num_threads(before)
        _of_kernels.reset(token)


@contextmanager
def kernel_threads() -> Iterator[None]:
    """Run the kernel under test on as many threads as ``OMP_NUM_THREADS`` had given it, inside `few_threads` too."""
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
    """The clock of a budget, in seconds, from zero.

    On a CPU it shows the CPU time of this process, so that a busy machine reads as much as an idle one. A kernel that waits would
    never end it: a second of waiting counts a fifth. On other devices it shows the time that passes.
    """
    wall, cpu = time.monotonic(), time.process_time()
    if device != "cpu":
        return lambda: time.monotonic() - wall
    return lambda: max(time.process_time() - cpu, (time.monotonic() - wall) / _WAITS)
