"""Naming a cause soon: the smallest calls first, the others while there is time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.examine import Examination, look, require_any, run_again
from assay.harness.verdict import Finding


@dataclass(frozen=True)
class Naming:
    """What a kernel came to on recorded calls.

    Attributes:
        findings: what is wrong, named where a hypothesis fits; from all that was looked at.
        examination: what was looked at.
        named_s: seconds until the smallest calls had given findings; None if they gave none.
        seconds: all that it took.
        left_out: calls that were not run for want of time.
    """

    findings: tuple[Finding, ...]
    examination: Examination
    named_s: float | None
    seconds: float
    left_out: tuple[AttentionCall, ...]

    @property
    def worst(self) -> float:
        """Largest own error over calls, cells and heads, as a multiple of its bound."""
        return max(float(o.own.max()) / o.bound for o in self.examination.observations)

    @property
    def not_looked_for(self) -> tuple[str, ...]:
        """What was not looked for, as sentences without their full stop; none if nothing was left out."""
        seen = len(self.examination.observations)
        said = []
        if self.left_out:
            said.append(f"{len(self.left_out)} of {len(self.left_out) + seen} calls were not run for want of time")
        if (again := self.examination.repeated) < seen:
            said.append(f"nondeterminism and state were looked for on {again} of {seen} calls")
        return tuple(said)


def name_cause(
    kernel: Kernel,
    calls: Sequence[AttentionCall],
    reproduce: str = "",
    budget_s: float = float("inf"),
    told: Callable[[Sequence[Finding]], None] = lambda findings: None,
    clock: Callable[[], float] = time.monotonic,
) -> Naming:
    """Run a kernel on calls and name what is wrong with it, as soon as that can be said.

    First comes the smallest call of each layer and phase, with and without a cached prefix, once each: that is enough for a name.
    Then the other calls, once each, and then each call twice more in a row, in the same order, as long as there is time.

    Args:
        kernel: the kernel.
        calls: calls, of phases that it computes or not.
        reproduce: the command that shows a finding again.
        budget_s: seconds after which no other call is begun; the smallest calls are always run.
        told: is given the findings of the smallest calls at once, if there are any; they may still change.
        clock: seconds.

    Raises:
        AssayError: no call could be run, which is never a pass; or an output has a wrong shape.
    """
    begun = clock()
    first = smallest_of_each(calls)
    chosen = {id(call) for call in first}
    rest = [call for call in calls if id(call) not in chosen]
    seen, named_s = look(kernel, first), None
    if seen.observations and (early := diagnose(seen, reproduce)):
        named_s = clock() - begun
        told(early)
    while rest and clock() - begun < budget_s:
        seen = _joined(seen, look(kernel, [rest.pop(0)]))
    require_any(seen)
    observations = [o if clock() - begun >= budget_s else run_again(kernel, o) for o in seen.observations]
    seen = replace(seen, observations=tuple(observations))
    return Naming(tuple(diagnose(seen, reproduce)), seen, named_s, clock() - begun, tuple(rest))


def smallest_of_each(calls: Sequence[AttentionCall]) -> list[AttentionCall]:
    """The smallest call of each layer and phase, with and without a cached prefix; smallest first."""
    strata: dict[tuple[int, str, bool], AttentionCall] = {}
    for call in sorted(calls, key=lambda call: (call.k.shape[0], call.q.shape[0])):
        # More keys than queries: no look at the lengths, for which a GPU would have to be waited for.
        strata.setdefault((call.layer, call.phase, call.k.shape[0] > call.q.shape[0]), call)
    return list(strata.values())


def _joined(a: Examination, b: Examination) -> Examination:
    return Examination(a.observations + b.observations, a.delegated + b.delegated, a.refused + b.refused)
