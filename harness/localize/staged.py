"""Diagnosing a kernel in stages: the smallest calls first, then the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.kernel_runs import KernelRun, repeat, require_results, run_once
from assay.harness.verdict import Finding


@dataclass(frozen=True)
class StagedDiagnosis:
    """The diagnosis of a kernel on recorded calls.

    Attributes:
        findings: what is wrong, named where a hypothesis fits; from all calls that were run.
        run: the results.
        first_finding_s: seconds until the smallest calls gave findings; None if they gave none.
        seconds: total time.
    """

    findings: tuple[Finding, ...]
    run: KernelRun
    first_finding_s: float | None
    seconds: float


def diagnose_kernel(
    kernel: Kernel,
    calls: Sequence[AttentionCall],
    reproduce: str = "",
    on_first: Callable[[Sequence[Finding]], None] = lambda findings: None,
) -> StagedDiagnosis:
    """Run a kernel on calls and name what is wrong with it as early as possible.

    The smallest call of each layer and phase, with and without a cached prefix, runs first: that is enough for a name. Then the
    other calls run once each, and then each call twice more in a row, in the same order.

    Args:
        kernel: the kernel.
        calls: calls, of phases that it computes or not.
        reproduce: a command that reproduces a finding.
        on_first: receives the findings of the smallest calls at once, if there are any; they may still change.

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
    run += run_once(kernel, rest)
    require_results(run)
    run = replace(run, results=tuple(repeat(kernel, result) for result in run.results))
    return StagedDiagnosis(tuple(diagnose(run, reproduce)), run, first_finding_s, time.monotonic() - start)


def smallest_of_each(calls: Sequence[AttentionCall]) -> list[AttentionCall]:
    """Choose the smallest call of each layer and phase, with and without a cached prefix; smallest first."""
    strata: dict[tuple[int, str, bool], AttentionCall] = {}
    for call in sorted(calls, key=lambda call: (call.k.shape[0], call.q.shape[0])):
        # More keys than queries means a cached prefix. Reading the lengths would synchronise with the GPU.
        strata.setdefault((call.layer, call.phase, call.k.shape[0] > call.q.shape[0]), call)
    return list(strata.values())
