"""A kernel that may do anything, run on many calls: what it does against the contract is told, and stops nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused
from assay.harness.attention.kernels import Declaration
from assay.harness.localize.examine import Examination, Observation, look, run_again

RUN_AGAIN = 32
"""Calls that are run twice more after all others: enough for a kernel that keeps state or is not deterministic to show it, without
an interpreted kernel taking three times as long."""


class Guard:
    """A kernel of which all that is no output of the contract is a refusal, remembered as broken.

    Attributes:
        assay: the kernel's declaration.
        broken: what it did against the contract, in words.
        unsteady: calls that it computed once and could not compute again, and why.
    """

    def __init__(self, kernel: Kernel, declared: Declaration) -> None:
        self.assay = declared
        self.broken: set[str] = set()
        self.unsteady: list[tuple[AttentionCall, str]] = []
        self._kernel = kernel

    def __call__(self, call: AttentionCall) -> Tensor:
        try:
            out = self._kernel(call)
        except KernelRefused:
            raise  # its right, and no output of the contract's is missing
        except Exception as error:  # a kernel may raise anything, and the other calls are still to be told
            first = next(iter(str(error).splitlines()), "")
            raise self._breaks(f"raised {type(error).__name__}: {first[:200]}") from error
        expected = _told(call.q.new_empty(*call.q.shape[:2], call.v.shape[2]))
        gave = _told(out)
        if gave != expected:
            raise self._breaks(f"returned: {gave}, expected {expected}")
        return out

    def _breaks(self, how: str) -> KernelRefused:
        self.broken.add(how)
        return KernelRefused(how)


def _told(out: object) -> str:
    return f"{out.dtype} {list(out.shape)} on {out.device}" if isinstance(out, Tensor) else type(out).__name__


def examine_some(guard: Guard, calls: Sequence[AttentionCall]) -> Examination:
    """Each call once, and then some of those that were computed again, spread over the matrix."""
    seen = look(guard, calls)
    step = -(-len(seen.observations) // RUN_AGAIN) or 1
    return replace(
        seen, observations=tuple(_again(guard, o) if n % step == 0 else o for n, o in enumerate(seen.observations))
    )


def _again(guard: Guard, seen: Observation) -> Observation:
    try:
        return run_again(guard, seen)
    except KernelRefused as error:
        guard.unsteady.append((seen.call, str(error)))
        return seen
