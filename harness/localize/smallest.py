"""The smallest call that was found on which a bug shows, and a test of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused
from assay.harness.attention.hypotheses import BY_NAME
from assay.harness.errors import AssayError
from assay.harness.localize.cells import deviation
from assay.harness.localize.diagnose import NO_KNOWN_CAUSE, describe
from assay.harness.localize.examine import Examination, observe
from assay.harness.localize.guard import Guard
from assay.harness.localize.shrink import as_pytest, out_of_bounds, shrink
from assay.harness.verdict import Finding

SHRINK_SECONDS = 10.0
"""Time for making a failing call small; what was reached by then is shown."""


def smallest_call(guard: Guard, examination: Examination, findings: Sequence[Finding], path: str) -> tuple[str, str]:
    """The smallest call found on which the first bug shows.

    Args:
        guard: the kernel.
        examination: what it made of several calls.
        findings: what is wrong with it, named bugs first.
        path: how the kernel can be imported, as ``module:function`` or a published name; empty if it cannot.

    Returns:
        The call in words and the source of a pytest file; empty where nothing is out of bounds, and the second also where
        no test can be written.
    """
    failing = [o.call for o in examination.observations if bool(o.failing.any())]
    if not failing:
        return "", ""
    call = min(failing, key=lambda call: (call.k.numel(), call.q.numel()))
    finding = next(f for f in findings if f.id in BY_NAME or f.id == NO_KNOWN_CAUSE)
    judge = _same_bug(guard, finding.id)
    with suppress(ValueError):  # a call with another bug, or one on which it fails at times, stays as it is
        call = shrink(_until(guard, time.monotonic() + SHRINK_SECONDS), call, judge)
    if not path:
        return describe(call), ""
    try:
        return describe(call), as_pytest(call, path, finding)
    except AssayError:  # it fails on its own data only, and that is too much for a test
        return describe(call), ""


def _same_bug(guard: Guard, kind: str) -> Callable[[AttentionCall, Tensor], bool]:
    """Whether an output is out of bounds, and within them of the hypothesis by which the bug was named."""
    if kind not in BY_NAME:
        return out_of_bounds(guard)

    def judge(call: AttentionCall, out: Tensor) -> bool:
        seen = observe(call, out, guard.assay.noise)
        expected = BY_NAME[kind].compute(call) if bool(seen.failing.any()) else None
        return expected is not None and bool((deviation(out, expected, seen.cells).relative_l1 <= seen.bound).all())

    return judge


def _until(kernel: Kernel, deadline: float) -> Kernel:
    """The kernel, which refuses once the time is over."""

    def timed(call: AttentionCall) -> Tensor:
        if time.monotonic() > deadline:
            raise KernelRefused("no time left")
        return kernel(call)

    return timed
