"""A wrapper of a kernel that writes its calls to a journal: a kernel may end its process at any of them."""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from assay.harness.attention.call import AttentionCall, Kernel, Outputs
from assay.harness.attention.kernels import declaration
from assay.harness.localize.diagnose import describe
from assay.worker import Journal

if TYPE_CHECKING:
    from torch import Tensor


class _CopiedError(Exception):
    """A kernel forked its process, and a call returned in the copy too."""


def noting_runs(journal: Journal, total: int) -> Callable[[int], None]:
    """Return what notes after each of the first `total` runs of a kernel how many there were."""
    return lambda done: journal.write("runs", done=done, total=total) if done <= total else None


def watched(kernel: Kernel, journal: Journal) -> Kernel:
    """Wrap the kernel to note each call as a step of the journal; on a GPU, a call ends once it is computed.

    A copy of the process that the kernel forks ends where its call returns: it would go on with the check, and fork again. Each
    further call raises `_CopiedError` then, and the kernel does not get it.
    """
    process, copied = os.getpid(), mmap.mmap(-1, 1)  # memory that copies of the process share

    def forward(call: AttentionCall) -> Tensor | Outputs:
        if copied[0]:
            raise _CopiedError("it forked its process, and its call returned in the copy too")
        journal.begin(describe(call))
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
            journal.end()

    functools.update_wrapper(forward, kernel, updated=())
    vars(forward).update(assay=declaration(kernel), watched=kernel)
    return forward


def unwatched(kernel: Kernel) -> Kernel:
    """Return the kernel that `watched` was given; one that is not its result is returned as it is."""
    inner: Kernel = getattr(kernel, "watched", kernel)
    return inner
