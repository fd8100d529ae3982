"""Who is told what a check does: of a kernel that ends its process, somebody then knows what was found before."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.kernels import declaration

if TYPE_CHECKING:
    from torch import Tensor

    from assay.harness.attention.matrix import Case
    from assay.harness.evidence.cause import ReplayResult
    from assay.harness.offline.check import CheckResult


class Watcher:
    """Is told what a check does. This one does nothing with it."""

    def begins(self, call: AttentionCall) -> None:
        """The kernel gets a call."""

    def ends(self) -> None:
        """It has returned, or raised."""

    def computed(self, case: Case, fails: bool, own: float, bound: float) -> None:
        """A case was computed: whether it is out of bounds, own error and bound of its worst cell and head."""

    def stands(self, result: CheckResult | ReplayResult) -> None:
        """What is known so far. The kernel is about to get calls beyond the matrix."""


def watched(kernel: Kernel, watcher: Watcher) -> Kernel:
    """The kernel, which tells the watcher of each call; on a GPU, a call ends once it is computed."""

    def forward(call: AttentionCall) -> Tensor:
        watcher.begins(call)
        try:
            out = kernel(call)
            if call.q.is_cuda:
                import torch

                torch.cuda.synchronize()
            return out
        finally:
            watcher.ends()

    functools.update_wrapper(forward, kernel, updated=())
    forward.assay = declaration(kernel)  # type: ignore[attr-defined]
    return forward
