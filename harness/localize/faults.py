"""What may be wrong with a call: the questions that experiments, and the search for the smallest call, ask of what came of it."""

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
"""What came of a call: a result, or why the kernel gave none."""
Fault = Callable[[Came], tuple[bool, ...] | bool | None]
"""Tells whether something is wrong with each sequence of a call, or with the call as a whole; None where that cannot be told."""

OUTPUT, OUTSIDE = "output", "outside"
"""Names of the faults that outputs are out of bounds, and that a kernel writes outside of its tensors."""
# Own error of a cell from which on it is wrong whatever the noise is; or as a multiple of the largest bound in its dtype.
_CLEARLY, _TIMES_BOUND = 0.3, 30.0


def wrong_sequences(result: CallResult) -> tuple[bool, ...]:
    """Tell for each sequence of a call whether a query of it is out of bounds."""
    bad = {result.cells.sequence[int(cell)] for cell in result.failing.any(1).nonzero()} if result.fails else set()
    return tuple(b in bad for b in range(len(result.call.lens_q)))


class WrongOutputs:
    """Tells as `wrong_sequences` does, without simulating noise where every error is far beyond it or within rounding."""

    def __init__(self) -> None:
        self._clearly: dict[torch.dtype, float] = {}

    def clearly(self, dtype: torch.dtype) -> float:
        """Return the own error from which on a cell is wrong, as far as it is known."""
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
    """Tells for each sequence whether a log-sum-exp is out of bounds, and simulates noise as little as `WrongOutputs`."""

    def __init__(self) -> None:
        self._clearly: dict[torch.dtype, float] = {}

    def __call__(self, came: Came) -> tuple[bool, ...] | None:
        """See `Fault`."""
        if isinstance(came, str) or (errors := came.lse_errors) is None:
            return None
        times, clearly = errors.own / errors.least, self._clearly.get(dtype := came.call.q.dtype, math.inf)
        if bool(((times <= 1) | (times > clearly)).all()):
            return errors.sequences_with(times > clearly)
        if dtype not in self._clearly and not came.noise:
            noise = (errors.bounds / errors.least).nan_to_num(posinf=0.0)
            self._clearly[dtype] = _TIMES_BOUND * float(noise.max())
        return errors.wrong_sequences


def writes_inputs(came: Came) -> bool | None:
    """Tell whether the kernel wrote to an input."""
    return None if isinstance(came, str) else bool(came.mutated)


def writes_outside(came: Came) -> bool | None:
    """Tell whether the kernel wrote outside of its tensors."""
    return None if isinstance(came, str) else bool(came.outside)


def kind_of(why: str) -> str:
    """Return what breaches of one kind have in common: the exception and the line that raised it, or that an output was wrong."""
    kind, _, rest = why.partition(":")
    return f"{kind} {rest[rest.rfind('(') :]}" if why.startswith(RAISED) else kind


def came_of(guard: Guard, call: AttentionCall) -> Came | None:
    """Have a kernel compute a copy of a call, and return what came of it; None where the numbers overflow the dtype."""
    try:
        return attempt(guard, call)
    except KernelRefused as refusal:
        return str(refusal)
    except ValueError:
        return None


def shows(fault: Fault, came: Came) -> bool:
    """Return True if something is wrong with a sequence of a call, or with all of it."""
    answer = fault(came)
    return any(answer) if isinstance(answer, tuple) else bool(answer)


def breaks(kind: str) -> Fault:
    """Return the fault that the kernel breaks the contract in a way, by `kind_of`."""

    def broken(came: Came) -> bool | None:
        """See `Fault`."""
        return False if isinstance(came, CallResult) else True if kind_of(came) == kind else None

    return broken


def faults_of(breaches: Iterable[str]) -> dict[str, Fault]:
    """Return all faults by name, outputs first: those of breaches by `kind_of`."""
    kinds = dict.fromkeys(map(kind_of, breaches))
    faults: dict[str, Fault] = {OUTPUT: WrongOutputs(), LSE_WRONG: WrongLses(), INPUT_WRITTEN: writes_inputs}
    return faults | {OUTSIDE: writes_outside} | {kind: breaks(kind) for kind in kinds}
