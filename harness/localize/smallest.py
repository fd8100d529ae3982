"""The smallest call found that shows a bug, and a test of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from assay.harness.attention.bugs.family import BY_ID
from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused, tensor_of
from assay.harness.errors import AssayError
from assay.harness.localize.causes import OUTPUT_NOT_WRITTEN, OUTPUT_SCALED
from assay.harness.localize.cells import deviation
from assay.harness.localize.diagnose import describe
from assay.harness.localize.guard import CONTRACT_BROKEN, Guard
from assay.harness.localize.kernel_runs import KernelRun, measure
from assay.harness.localize.shrink import exceeds_bounds_of, reproduction, shrink
from assay.harness.stats.error_sums import relative_l1
from assay.harness.verdict import UNEXPLAINED, Finding, serious

SHRINK_SECONDS = 10.0
"""Time limit for shrinking a failing call; the smallest call found by then is shown."""


_IN_EVIDENCE = "smallest failing call: "


@dataclass(frozen=True)
class _Smallest:
    """The smallest call found that shows a bug.

    Attributes:
        words: the call in words; empty where nothing is out of bounds.
        source: writes a test that shows it, in the words of a finding; None where none can be written.
    """

    words: str = ""
    source: Callable[[Finding], str] | None = None

    def test(self, findings: Sequence[Finding]) -> str:
        """Write a pytest file that shows it, in the words of the first finding about outputs; empty if there is none."""
        about = [finding for finding in serious(findings) if finding.id != CONTRACT_BROKEN]
        return self.source(about[0]) if self.source and about else ""

    def named_in(self, findings: Sequence[Finding]) -> list[Finding]:
        """Name this call in the first finding about outputs, as its smallest; return all findings."""
        about = [finding for finding in serious(findings) if finding.id != CONTRACT_BROKEN][:1]
        evidence = [
            _IN_EVIDENCE + self.words if self.words and line.startswith(_IN_EVIDENCE) else line
            for finding in about
            for line in finding.evidence
        ]
        return [
            finding.model_copy(update={"evidence": tuple(evidence)}) if finding in about else finding
            for finding in findings
        ]


def smallest_call(guard: Guard, run: KernelRun, findings: Sequence[Finding], path: str) -> _Smallest:
    """Find the smallest call that shows the first bug.

    Args:
        guard: the kernel.
        run: its results on several calls.
        findings: what is wrong with it, named bugs first.
        path: how the kernel can be imported, as ``module:function`` or a published name; empty if it cannot.
    """
    failing = [result.call for result in run.results if result.fails]
    if not failing:
        return _Smallest()
    call = min(failing, key=lambda call: (call.k.numel(), call.q.numel()))
    finding = next(f for f in findings if f.id in BY_ID or f.id in (UNEXPLAINED, OUTPUT_SCALED, OUTPUT_NOT_WRITTEN))
    with suppress(ValueError):  # a call with another bug, or one that fails only sometimes, stays as it is
        timed = _until(guard, time.monotonic() + SHRINK_SECONDS)
        # With a head_dim that it was not written for, a kernel may write beyond its output, which ends the process.
        dims = {result.call.q.shape[2] for result in run.results} | set(guard.assay.head_dims or ())
        call = shrink(timed, call, _same_bug(guard, finding.id), head_dims=dims)
    if not path:
        return _Smallest(describe(call))
    try:
        return _Smallest(describe(call), reproduction(call, path, guard.assay.noise))
    except AssayError:  # it fails on its own data only, which is too large for a test
        return _Smallest(describe(call))


def _same_bug(guard: Guard, finding: str) -> Callable[[AttentionCall, Tensor], bool]:
    """Return a test: an output is out of bounds, and within bounds of the hypothesis that named the bug."""
    if finding not in BY_ID:
        return exceeds_bounds_of(guard)

    def fails(call: AttentionCall, out: Tensor) -> bool:
        result = measure(call, out, guard.assay.noise)
        expected = BY_ID[finding].compute(call) if result.fails else None
        return expected is not None and bool(
            (relative_l1(deviation(out, expected, result.cells)) <= result.fit_bounds).all()
        )

    return fails


def _until(kernel: Kernel, deadline: float) -> Kernel:
    """Wrap the kernel to refuse after the deadline."""

    def timed(call: AttentionCall) -> Tensor:
        if time.monotonic() > deadline:
            raise KernelRefused("out of time")
        return tensor_of(kernel(call))

    return timed
