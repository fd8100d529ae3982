"""Examining faults on the op-level matrix: each sits on the certified kernel, and `assay check` is asked what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.honest import honest_outputs
from assay.harness.attention.kernels import Declaration, declares
from assay.harness.attention.matrix import Case
from assay.harness.attention.noise import family
from assay.harness.bugs.seeded import SeededFault
from assay.harness.certify.footprint import Footprint, WideCall, footprint, widened
from assay.harness.certify.hidden import hidden_words, largest_effect
from assay.harness.certify.kernel import CertifiedKernel, seeded
from assay.harness.certify.pins import is_named, is_pinned
from assay.harness.evidence.certificate import Examined, Look, Outcome
from assay.harness.localize.threads import few_threads
from assay.harness.offline.check import check
from assay.harness.offline.check_result import CheckResult
from assay.harness.offline.kernel_matrix import matrix_of
from assay.harness.verdict import serious

if TYPE_CHECKING:
    from torch import Tensor

_LAYERS = 4
"""Layers over which the matrix is spread: a call of the matrix has no layer of its own."""
SUITE = "op-level"
_ROUNDS = 5
"""Most matrices, of one seed each, on which a fault in a share of the calls is sought before it counts as missed or not shown."""

Checker = Callable[[Kernel, Sequence[Case]], CheckResult]
"""Checks a kernel on cases."""


def checked(kernel: Kernel, cases: Sequence[Case]) -> CheckResult:
    """Run `assay check` on these cases, without a read-out."""
    return check(kernel, cases=cases, read_out=0)


def read(kernel: Kernel, cases: Sequence[Case]) -> CheckResult:
    """Run `assay check` on these cases; a kernel that is wrong is read."""
    return check(kernel, cases=cases)


@dataclass(frozen=True)
class OpLevel:
    """The part of the op-level matrix that the certified kernel computes, each call in one of several layers.

    Attributes:
        device: where it runs.
        seed: of the matrix.
        kernel: the certified kernel; by default PyTorch's attention.
    """

    device: str = "cpu"
    seed: int = 0
    kernel: CertifiedKernel = field(default_factory=CertifiedKernel)

    def at(self, seed: int) -> OpLevel:
        """Return the matrix of another seed."""
        return self if seed == self.seed else replace(self, seed=seed)

    @cached_property
    def cases(self) -> list[Case]:
        """The cases that the kernel's declaration does not exclude, each call made once."""
        declared, kept = self.kernel.declared, []
        for number, case in enumerate(
            matrix_of(Declaration(phases=declared.phases), device=self.device, seed=self.seed)
        ):
            call = case.make().with_spec(layer=number % _LAYERS)
            if not declared.excludes(call):
                kept.append(replace(case, make=partial(_given, call)))
        return kept

    @cached_property
    def calls(self) -> list[AttentionCall]:
        """The calls of the cases."""
        return [case.make() for case in self.cases]

    @cached_property
    def wide(self) -> list[WideCall]:
        """The calls in float64 with their right outputs."""
        with few_threads(self.calls):
            return widened(self.calls)


def _given(call: AttentionCall) -> AttentionCall:
    return call


def honest(name: str, seed: int) -> Kernel:
    """Make an honest implementation of a noise family, which it declares."""
    quantised = family(name)

    @declares(noise=name)
    def kernel(call: AttentionCall) -> Tensor:
        return honest_outputs(call, quantised, members=1, seed=seed)[0].to(call.q.dtype)

    return kernel


def examine_fault(fault: SeededFault, level: OpLevel, checker: Checker = checked) -> Examined:
    """Check a kernel with a fault, or with an equivalent one, at the op level."""
    begun = time.monotonic()
    calls = 0
    for number in range(_ROUNDS if fault.where.share < 1 else 1):
        now = level.at(level.seed + number)
        with few_threads(now.calls):
            shown = footprint(fault, now.wide)
        fault.restart()
        result = checker(seeded(fault, level.kernel), now.cases)
        flagged = bool(serious(result.findings))
        after = _first_failing(result, now.cases)
        looked = calls + len(now.cases)
        if flagged or fault.equivalent:
            break
        calls = looked
    outcome, noise = _outcome(fault, flagged, shown), level.kernel.declared.noise
    operator, exact = _read(result)
    with few_threads(now.calls):
        effect = largest_effect(fault, now.wide, noise) if outcome == "missed" else None
    return Examined(
        id=fault.id, kind="equivalent" if fault.equivalent else "fault", title=fault.title, links=fault.links,
        restricted=fault.where.words, outcome=outcome,
        looks=(Look(suite=SUITE, caught=flagged, after=None if after is None else calls + after, of=looked),),
        named=is_named(fault, result.findings) if flagged else None,
        pinned=is_pinned(fault, shown, now.calls, result.findings) if flagged else None,
        findings=tuple(finding.id for finding in result.findings),
        where=result.findings[0].where if result.findings else "",
        read=operator, read_exact=exact, effect=effect,
        why="" if flagged or fault.equivalent else _why(result, shown) + hidden_words(effect, noise),
        seed=fault.where.seed, seconds=time.monotonic() - begun,
    )  # fmt: skip


def examine_honest(id: str, title: str, kernel: Kernel, level: OpLevel, checker: Checker = checked) -> Examined:
    """Check a correct kernel at the op level, which should leave it alone."""
    begun = time.monotonic()
    result = checker(kernel, level.cases)
    flagged, (operator, exact) = bool(serious(result.findings)), _read(result)
    return Examined(
        id=id, kind="honest", title=title, outcome="false alarm" if flagged else "quiet",
        looks=(Look(suite=SUITE, caught=flagged, after=_first_failing(result, level.cases), of=len(level.cases)),),
        findings=tuple(finding.id for finding in result.findings), where=result.findings[0].where if result.findings else "",
        read=operator, read_exact=exact, why=result.findings[0].sentence if flagged else "", seed=level.seed,
        seconds=time.monotonic() - begun,
    )  # fmt: skip


def _read(result: CheckResult) -> tuple[str | None, bool | None]:
    """Return what was read off the kernel of a result, and whether that is exact; None twice if it was not read."""
    read_out = result.read_out
    return (None, None) if read_out is None else (serious(result.findings)[0].operator, read_out.exact)


def _outcome(fault: SeededFault, flagged: bool, shown: Footprint) -> Outcome:
    if fault.equivalent:
        return "false alarm" if flagged else "quiet"
    return "caught" if flagged else "missed" if shown.calls else "not shown"


def _first_failing(result: CheckResult, cases: Sequence[Case]) -> int | None:
    """Count the calls up to the first that failed, in the order of the matrix."""
    failing = {case.name for case in result.failing}
    return next((number for number, case in enumerate(cases, 1) if case.name in failing), None)


def _why(result: CheckResult, shown: Footprint) -> str:
    if not shown.calls:
        return "changes no output of these calls"
    worst = f"; worst own error {result.worst.ratio:.2g} of its bound" if result.worst else ""
    return f"changes {len(shown.calls)} calls, none of them out of bounds{worst}"
