"""Diagnosing a kernel in stages: the smallest calls first, then the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.kernel_runs import KernelRun, repeat_all, run_once
from assay.harness.verdict import Finding


def diagnose_kernel(
    kernel: Kernel,
    calls: Sequence[AttentionCall],
    reproduce: str = "",
    on_first: Callable[[Sequence[Finding]], None] = lambda findings: None,
) -> tuple[KernelRun, tuple[Finding, ...], float | None]:
    """Run a kernel on calls and name what is wrong with it as early as possible.

    The smallest call of each layer and phase, with and without a cached prefix, runs first: that is enough for a name. Then the
    other calls run once each, and then each call twice more in a row, in the same order.

    Args:
        kernel: the kernel.
        calls: calls, of phases that it computes or not.
        reproduce: a command that reproduces a finding.
        on_first: receives the findings of the smallest calls at once, if there are any; they may still change.

    Returns:
        The results; the findings of all calls that were run; and the seconds until the smallest calls gave findings, None if they
        gave none.

    Raises:
        AssayError: no call could be run, which is never a pass; or an output breaks the contract.
    """
    start = time.monotonic()
    first = smallest_of_each(calls)
    chosen = {id(call) for call in first}
    rest = [call for call in calls if id(call) not in chosen]
    run, first_finding_s = run_once(kernel, first), None
    if run.results and (early := diagnose(run, reproduce)):
        first_finding_s = time.monotonic() - start
        on_first(early)
    run = repeat_all(kernel, run + run_once(kernel, rest))
    return run, tuple(diagnose(run, reproduce)), first_finding_s


def smallest_of_each(calls: Sequence[AttentionCall]) -> list[AttentionCall]:
    """Choose the smallest call of each layer and phase, with and without a cached prefix; smallest first."""
    strata: dict[tuple[int, str, bool], AttentionCall] = {}
    for call in sorted(calls, key=lambda call: (call.k.shape[0], call.q.shape[0])):
        # More keys than queries means a cached prefix. Reading the lengths would synchronise with the GPU.
        strata.setdefault((call.layer, call.phase, call.k.shape[0] > call.q.shape[0]), call)
    return list(strata.values())
