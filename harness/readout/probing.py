"""Asks a kernel within a budget."""

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
"""The key in `Prober.raised` for calls that the kernel refused with `KernelRefused`."""


class BudgetSpentError(Exception):
    """The budget of calls or time is used up."""


@dataclass
class Prober:
    """A kernel that is asked within a budget. It gets copies of all inputs.

    Attributes:
        kernel: the kernel.
        calls_left: the number of calls left in the budget.
        until: the end of the budget, on the clock.
        device: the device of the calls.
        shapes: the (head_dim, head_dim_v) to ask for in addition to those it declares, or None for any. A kernel that was written
            for one head_dim may write beyond its output with another, which crashes the process.
        asked: the number of calls so far.
        raised: the number of calls that it did not answer, by reason.
        clock: the clock, in seconds; see `budget_clock`.
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
        """Return the kernel's output, float64 [total_q, num_q_heads, head_dim_v] on the CPU.

        Return None if the kernel raised or broke the contract, or (without running it) if it does not declare such calls.

        Raises:
            BudgetSpentError: the budget is used up.
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
        """Refund the time of the first call of a shape on a GPU: a compiler specialises on dtype, heads and head dims."""
        shape = (call.phase, call.q.dtype, call.q.shape[1:], call.k.shape[1:], call.v.shape[1:], call.causal)
        if self.device != "cpu" and shape not in self._shapes_seen:
            self._shapes_seen.add(shape)
            self.until += seconds

    def _may_ask(self, call: AttentionCall) -> bool:
        """Return True if the kernel is known, or declares, to compute such calls."""
        declared, dims = declaration(self.kernel), (call.q.shape[2], call.v.shape[2])
        if call.phase not in declared.phases or declared.excludes(call):
            return False
        stated = declared.head_dims is not None and dims[0] == dims[1]  # and `excludes` did not name it
        return stated or self.shapes is None or dims in self.shapes

    def check_time(self) -> None:
        """Stop if the time is up.

        Raises:
            BudgetSpentError: the time is up.
        """
        if self.clock() > self.until:
            raise BudgetSpentError
