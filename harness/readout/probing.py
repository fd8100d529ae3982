"""A kernel that is asked within a budget."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused, tensor_of
from assay.harness.attention.declaration import declaration
from assay.harness.attention.kernels import output_fault
from assay.harness.localize.threads import kernel_threads

REFUSED = "refused"
"""The reason of a call that a kernel raised `KernelRefused` for, in `Prober.raised`."""


class BudgetSpentError(Exception):
    """As many calls were made, or as much time was taken, as was allowed."""


@dataclass
class Prober:
    """A kernel that is asked within a budget. It gets copies of all inputs.

    Attributes:
        kernel: the kernel.
        calls_left: calls that it may still get.
        until: when asking ends, on the clock.
        device: where calls are made.
        shapes: (head_dim, head_dim_v) that it is asked for, besides what it declares; None for any. A kernel that was written for
            one head_dim may write beyond its output with another, which ends the process.
        asked: calls that it got.
        raised: calls that it did not answer, by the reason.
        clock: seconds; see `budget_clock`.
    """

    kernel: Kernel
    calls_left: int = 4000
    until: float = field(default_factory=lambda: time.monotonic() + 60.0)
    device: str = "cpu"
    shapes: frozenset[tuple[int, int]] | None = None
    asked: int = 0
    raised: dict[str, int] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    _shapes_seen: set[tuple[object, ...]] = field(default_factory=set)

    def __call__(self, call: AttentionCall) -> Tensor | None:
        """The output, float64 [total_q, num_q_heads, head_dim_v] on the CPU.

        None if the kernel raised or broke the contract, or does not declare to compute such calls: then it is not asked.

        Raises:
            BudgetSpentError: nothing is left of the budget.
        """
        if self.calls_left <= 0:
            raise BudgetSpentError
        self.check_time()
        if not self._may_ask(call):
            return None
        self.calls_left -= 1
        self.asked += 1
        given = call.clone()
        begun = self.clock()
        try:
            with kernel_threads():
                out = tensor_of(self.kernel(given))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as in `assay.harness.localize.guard`
            kind = REFUSED if isinstance(error, KernelRefused) else type(error).__name__
            self.raised[kind] = self.raised.get(kind, 0) + 1
            return None
        finally:
            self._leave_out_compilation(call, self.clock() - begun)
        if fault := output_fault(call, out):
            self.raised[fault] = self.raised.get(fault, 0) + 1
            return None
        return out.detach().to("cpu", torch.float64, copy=True)

    def _leave_out_compilation(self, call: AttentionCall, seconds: float) -> None:
        """Give the time of a first call of its shape on a GPU back: a compiler specialises on dtype, heads and head dims."""
        shape = (call.phase, call.q.dtype, call.q.shape[1:], call.k.shape[1:], call.v.shape[1:], call.causal)
        if self.device != "cpu" and shape not in self._shapes_seen:
            self._shapes_seen.add(shape)
            self.until += seconds

    def _may_ask(self, call: AttentionCall) -> bool:
        """Return True if the kernel computes such calls, as far as it is known or declared."""
        declared, dims = declaration(self.kernel), (call.q.shape[2], call.v.shape[2])
        if call.phase not in declared.phases or declared.excludes(call):
            return False
        stated = declared.head_dims is not None and dims[0] == dims[1]  # and `excludes` did not name it
        return stated or self.shapes is None or dims in self.shapes

    def check_time(self) -> None:
        """Stop if the time is over.

        Raises:
            BudgetSpentError: it is.
        """
        if self.clock() > self.until:
            raise BudgetSpentError
