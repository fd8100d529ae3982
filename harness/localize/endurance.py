"""Running a kernel on one cheap call of each phase many times: does it become wrong?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.localize.guard import Guard
from assay.harness.localize.kernel_runs import CallResult, compute, measure
from assay.harness.text import percent


@dataclass(frozen=True)
class Endured:
    """What came of it.

    Attributes:
        runs: how many times the kernel had run at the end, the runs before included.
        call: the call on which it became wrong; None if it did not.
        how: how, in words that follow "the kernel"; empty if it did not.
    """

    runs: int
    call: AttentionCall | None = None
    how: str = ""


def endure(guard: Guard, results: Sequence[CallResult], before: int, runs: int, seconds: float) -> Endured:
    """Run the kernel until it has run this often in all, in turn on the cheapest right call of each phase.

    Args:
        guard: the kernel.
        results: what it computed before; those within their bounds are asked again.
        before: how many times it ran before.
        runs: how many times it is to have run in all.
        seconds: most time that this takes.
    """
    cheapest: dict[str, CallResult] = {}
    for one in sorted(results, key=lambda one: (one.call.q.numel() + one.call.k.numel(), one.call.k.shape[0])):
        if not one.fails:
            cheapest.setdefault(one.call.phase, one)
    until = time.monotonic() + seconds
    for one in cycle(cheapest.values()):
        if before + guard.runs >= runs or time.monotonic() > until:
            break
        number = before + guard.runs + 1
        try:
            out = compute(guard, one.call.clone())
        except KernelRefused as error:
            return Endured(number, one.call, f"{error}, in its run {number}")
        if not torch.equal(out, one.out) and (now := measure(one.call, out.clone(), one.noise)).fails:
            own, bound = now.worst_cell
            how = f"is wrong in its run {number} on a call that it computed right before: own error {percent(own)}"
            return Endured(number, one.call, f"{how}; noise explains at most {percent(bound)}")
    return Endured(before + guard.runs)
