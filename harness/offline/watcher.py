"""Watchers of a check: if a kernel ends its process, they know what was found before."""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from assay.harness.attention.call import AttentionCall, Kernel, Outputs
from assay.harness.attention.kernels import declaration
from assay.harness.localize.diagnose import describe

if TYPE_CHECKING:
    from torch import Tensor


_COPY_S = 2.0
"""Seconds that a call waits for a copy of its process to return too."""
_forks = [0]
"""How often this process has called `os.fork`."""
os.register_at_fork(after_in_parent=lambda: _forks.__setitem__(0, _forks[0] + 1))


class _CopiedError(Exception):
    """A kernel forked its process, and a call returned in the copy too."""


Watcher = Callable[..., None]
"""Receives what a check does, as records: the name of one, and what belongs to it.

    "asked": the kernel's name, the cases that it is about to compute, and a command that repeats the check.
    "begins": a call in words, which the kernel gets.
    "ends": it has returned, or raised.
    "computed": the name of a case that was computed, whether it is out of bounds, own error and bound of its worst cell and head.
        Of a case that is less close to its bound than an earlier one, the bound may be a lower limit of its own.
    "stands": the result as far as it is known. The kernel is about to get calls beyond the matrix.
"""


def count_runs(kernel: Kernel, total: int, progress: Callable[[int, int], None]) -> Kernel:
    """Wrap the kernel to report after each of its first `total` runs how many there were. It declares what it declared."""
    runs = itertools.count(1)

    def counted(call: AttentionCall) -> Tensor | Outputs:
        try:
            return kernel(call)
        finally:
            if (done := next(runs)) <= total:
                progress(done, total)

    vars(counted)["assay"] = declaration(kernel)
    return counted


def watched(kernel: Kernel, watcher: Watcher) -> Kernel:
    """Wrap the kernel to report each call to the watcher; on a GPU, a call ends once it is computed.

    A copy of the process that the kernel forks ends where its call returns: it would go on with the check, and fork again. That
    call raises `_CopiedError` then, and so does each further one, which the kernel does not get. Where the kernel forks with
    `os.fork`, its call waits for the copy up to `_COPY_S`, once: what else is forked does not return from the call.
    """
    process, copied = os.getpid(), mmap.mmap(-1, 1)  # memory that copies of the process share
    waited = False

    def refuse_copied() -> None:
        if copied[0]:
            raise _CopiedError("it forked its process, and its call returned in the copy too")

    def forward(call: AttentionCall) -> Tensor | Outputs:
        nonlocal waited
        refuse_copied()
        forks = _forks[0]
        watcher("begins", describe(call))
        try:
            out = kernel(call)
            if call.q.is_cuda:
                import torch

                torch.cuda.synchronize()
            return out
        finally:
            if os.getpid() != process:
                copied[0] = 1
                os._exit(0)
            watcher("ends")
            if _forks[0] > forks and not waited:
                waited, end = True, time.monotonic() + _COPY_S
                while not copied[0] and time.monotonic() < end:
                    time.sleep(0.01)
            refuse_copied()

    functools.update_wrapper(forward, kernel, updated=())
    vars(forward).update(assay=declaration(kernel), watched=kernel)
    return forward


def unwatched(kernel: Kernel) -> Kernel:
    """Return the kernel that `watched` was given; one that is not its result is returned as it is."""
    inner: Kernel = getattr(kernel, "watched", kernel)
    return inner
