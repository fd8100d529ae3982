"""Faults of a call: the tests that experiments, and the search for the smallest call, apply to a call's outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.localize.diagnose import INPUT_WRITTEN
from assay.harness.localize.guard import Guard, attempt
from assay.harness.localize.kernel_runs import CallResult
from assay.harness.localize.lse import LSE_WRONG
from assay.harness.localize.raised import RAISED
from assay.harness.stats.query_bounds import least_error

Came = CallResult | str
"""The outcome of a call: a result, or the reason why the kernel gave none."""
Fault = Callable[[Came], tuple[bool, ...] | bool | None]
"""Decides whether each sequence of a call is wrong, or the call as a whole; returns None if it cannot decide."""

OUTPUT, OUTSIDE = "output", "outside"
"""Names of two faults: outputs are out of bounds, and the kernel writes outside of its tensors."""
# Own error above which a cell is wrong for any noise: absolute, and as a multiple of the largest bound in its dtype.
_CLEARLY, _TIMES_BOUND = 0.3, 30.0


def wrong_sequences(result: CallResult) -> tuple[bool, ...]:
    """Return, for each sequence of a call, whether one of its queries is out of bounds."""
    bad = {result.cells.sequence[int(cell)] for cell in result.failing.any(1).nonzero()} if result.fails else set()
    return tuple(b in bad for b in range(len(result.call.lens_q)))


class WrongOutputs:
    """Decides like `wrong_sequences`, without simulating noise where every error is far beyond it or within rounding."""

    def __init__(self) -> None:
        self._clearly: dict[torch.dtype, float] = {}

    def clearly(self, dtype: torch.dtype) -> float:
        """Return the own error above which a cell is known to be wrong."""
        return self._clearly.get(dtype, _CLEARLY)

    def __call__(self, came: Came) -> tuple[bool, ...] | None:
        """See `Fault`."""
        if isinstance(came, str):
            return None
        dtype = came.call.q.dtype
        far, within = (came.own > self.clearly(dtype)).any(1), (came.own <= least_error(dtype)).all(1)
        by_cell = list(zip(came.cells.sequence, far.tolist(), within.tolist(), strict=True))
        bad = {b for b, is_far, _ in by_cell if is_far}
        if all(b in bad or is_within for b, _, is_within in by_cell):
            return tuple(b in bad for b in range(len(came.call.lens_q)))
        if dtype not in self._clearly:
            self._clearly[dtype] = min(_CLEARLY, _TIMES_BOUND * float(came.fit_bounds.max()))
        return wrong_sequences(came)


class WrongLses:
    """Decides for each sequence whether a log-sum-exp is out of bounds; simulates noise as rarely as `WrongOutputs`."""

    def __init__(self) -> None:
        self._clearly: dict[torch.dtype, float] = {}

    def __call__(self, came: Came) -> tuple[bool, ...] | None:
        """See `Fault`."""
        if isinstance(came, str) or (errors := came.lse_errors) is None:
            return None
        times, clearly = errors.own / errors.least, self._clearly.get(dtype := came.call.q.dtype, math.inf)
        if (far := errors.sequences_with(times > clearly)) == errors.sequences_with(times > 1):
            return far
        if dtype not in self._clearly and not came.noise:
            noise = (errors.bounds / errors.least).nan_to_num(posinf=0.0)
            self._clearly[dtype] = _TIMES_BOUND * float(noise.max())
        return errors.wrong_sequences


def writes_inputs(came: Came) -> bool | None:
    """Return True if the kernel wrote to an input, or None if it gave no result."""
    return None if isinstance(came, str) else bool(came.mutated)


def writes_outside(came: Came) -> bool | None:
    """Return True if the kernel wrote outside of its tensors, or None if it gave no result."""
    return None if isinstance(came, str) else bool(came.outside)


def kind_of(why: str) -> str:
    """Return the common part of breaches of one kind: the exception and the line that raised it, or the wrong output."""
    kind, _, rest = why.partition(":")
    return f"{kind} {rest[rest.rfind('(') :]}" if why.startswith(RAISED) else kind


def came_of(guard: Guard, call: AttentionCall) -> Came | None:
    """Have a kernel compute a copy of a call; return the outcome, or None if the numbers overflow the dtype."""
    try:
        return attempt(guard, call)
    except KernelRefused as refusal:
        return str(refusal)
    except ValueError:
        return None


def shows(fault: Fault, came: Came) -> bool:
    """Return True if a sequence of a call, or the call as a whole, shows the fault."""
    answer = fault(came)
    return any(answer) if isinstance(answer, tuple) else bool(answer)


def breaks(kind: str) -> Fault:
    """Return the fault of breaking the contract in one way, identified by `kind_of`."""

    def broken(came: Came) -> bool | None:
        """See `Fault`."""
        return False if isinstance(came, CallResult) else True if kind_of(came) == kind else None

    return broken


def faults_of(breaches: Iterable[str]) -> dict[str, Fault]:
    """Return all faults by name, outputs first; breaches are named by `kind_of`."""
    kinds = dict.fromkeys(map(kind_of, breaches))
    faults: dict[str, Fault] = {OUTPUT: WrongOutputs(), LSE_WRONG: WrongLses(), INPUT_WRITTEN: writes_inputs}
    return faults | {OUTSIDE: writes_outside} | {kind: breaks(kind) for kind in kinds}
