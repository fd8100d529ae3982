"""Which faults of the catalogue does `assay check` catch and name, and what does it flag that is right?

    python benchmarks/seeded_faults.py --processes 16        # the whole catalogue, 99 faults, and what must stay quiet
    python benchmarks/seeded_faults.py mask-top-left identity
    python benchmarks/seeded_faults.py --candidate sage_attn --device cuda

Each fault of `fault_catalogue` is seeded in the output of a correct kernel, by default PyTorch's, on the
op-level matrix, whose calls are spread over four layers. A fault that changes no output of these calls is "not shown". One that
comes and goes is sought on matrices of up to five seeds. Equivalent faults and an honest kernel of each noise family must not be
flagged.

Exits with 1 if a fault that shows was missed, or if something right was flagged.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

from fault_catalogue import CATALOGUE, SeededFault
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, default_device, tensor_of
from assay.harness.attention.declaration import Declaration, declaration, declares
from assay.harness.attention.honest import honest_outputs
from assay.harness.attention.kernels import find
from assay.harness.attention.matrix import Case
from assay.harness.attention.noise import FAMILIES, family
from assay.harness.attention.oracle import oracle
from assay.harness.checks.check import check
from assay.harness.checks.kernel_matrix import matrix_of
from assay.harness.localize.diagnose import NONDETERMINISM, STATE_KEPT
from assay.harness.localize.threads import few_threads
from assay.harness.verdict import Finding, serious

LAYERS, ROUNDS = 4, 5
TORCH_SDPA = "assay.harness.attention.sdpa:torch_sdpa"
LEAST = 1e-6
"""Relative change of an output, L1 in float64, above which a fault shows: float64 rounds far below it."""
HONEST = "honest-"


@dataclass(frozen=True)
class Tried:
    """What a check said of a kernel with a fault, or of a right one. `named` is None if the fault has no name."""

    id: str
    outcome: str
    named: bool | None
    findings: tuple[str, ...]
    seconds: float


def cases_in_layers(declared: Declaration, device: str, seed: int) -> list[Case]:
    """Make the calls of the matrix that a kernel computes, each once, in one of several layers."""
    cases = matrix_of(Declaration(phases=declared.phases), device=device, seed=seed)
    calls = [case.make().with_spec(layer=number % LAYERS) for number, case in enumerate(cases)]
    kept = [(case, call) for case, call in zip(cases, calls, strict=True) if not declared.excludes(call)]
    return [replace(case, draw=partial(lambda call: call, call)) for case, call in kept]


def seeded(fault: SeededFault, kernel: Kernel) -> Kernel:
    """Seed a fault in a kernel's output. The result declares what the kernel declares."""
    declared = declaration(kernel)

    @declares(
        phases=declared.phases, noise=declared.noise, head_dims=declared.head_dims, dtypes=declared.dtypes, prefix=declared.prefix
    )  # fmt: skip
    def faulty(call: AttentionCall) -> Tensor:
        # A recomputed output needs the kernel's own noise, or its lack would be found in place of the fault.
        return fault.apply(call, tensor_of(kernel(call)).clone(), oracle(call) if declared.noise else None)

    return faulty


def shows(fault: SeededFault, cases: Sequence[Case]) -> bool:
    """Return True if the fault changes the right output of one of these calls, made in this order."""
    fault.restart()
    for case in cases:
        call = case.make()
        right = oracle(call)
        changed = (fault.apply(call, right) - right).abs().nan_to_num(nan=float("inf"))
        if bool((changed.sum((0, 2)) > LEAST * right.abs().sum((0, 2))).any()):
            return True
    return False


def is_named(fault: SeededFault, findings: Sequence[Finding]) -> bool | None:
    """Return True if a finding names the fault, or one that these calls cannot tell from it."""
    ids = {id for finding in findings for id in (finding.id, *finding.equivalent)}
    if fault.where.counts:  # such a fault is known by calls that differ when they are repeated
        return bool(ids & {NONDETERMINISM, STATE_KEPT, fault.hypothesis})
    return fault.hypothesis in ids if fault.hypothesis else None


def honest(name: str) -> Kernel:
    """Make an honest implementation of a noise family, which it declares."""
    quantised = family(name)

    @declares(noise=name)
    def kernel(call: AttentionCall) -> Tensor:
        return honest_outputs(call, quantised, members=1, seed=0)[0].to(call.q.dtype)

    return kernel


def tried(id: str, candidate: str, device: str, seed: int) -> Tried:
    """Check a kernel with one fault, or a right kernel."""
    begun, fault = time.monotonic(), CATALOGUE.get(id)
    kernel = find("--candidate", candidate) if fault or id == HONEST + "candidate" else honest(id.removeprefix(HONEST))
    flagged, findings, cases = False, (), list[Case]()
    for number in range(ROUNDS if fault and fault.where.share < 1 else 1):
        cases = cases_in_layers(declaration(kernel), device, seed + number)
        if fault:
            fault.restart()
        result = check(seeded(fault, kernel) if fault else kernel, cases=cases, read_out=0)
        flagged, findings = bool(serious(result.findings)), tuple(result.findings)
        if flagged:
            break
    if fault is None or fault.equivalent:
        outcome = "false alarm" if flagged else "quiet"
    else:
        with few_threads([case.make() for case in cases]):
            outcome = "caught" if flagged else "missed" if shows(fault, cases) else "not shown"
    named = is_named(fault, findings) if fault and outcome == "caught" else None
    return Tried(id, outcome, named, tuple(finding.id for finding in findings), time.monotonic() - begun)


def all_tried(ids: Sequence[str], processes: int, candidate: str, device: str, seed: int) -> Iterator[Tried]:
    """Try each of these in turn, or several at a time."""
    if processes == 1:
        yield from (tried(id, candidate, device, seed) for id in ids)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for future in [pool.submit(tried, id, candidate, device, seed) for id in ids]:
            yield future.result()


def main() -> int:
    """Try, print a row for each, and count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    known = [*CATALOGUE, HONEST + "candidate", *(f"{HONEST}{name}" for name in FAMILIES)]
    parser.add_argument("ids", nargs="*", metavar="ID", help="faults, or honest-FAMILY; all by default")
    parser.add_argument("--candidate", default=TORCH_SDPA, help="the kernel in whose output faults are seeded")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    if unknown := set(given.ids) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(known)}")
    outcomes, named = Counter[str](), Counter[bool]()
    print("| fault | outcome | named | findings | s |\n|---|---|---|---|---|")
    for one in all_tried(given.ids or known, given.processes, given.candidate, given.device, given.seed):
        outcomes[one.outcome] += 1
        if one.named is not None:
            named[one.named] += 1
        name = {None: "", True: "yes", False: "no"}[one.named]
        print(f"| {one.id} | {one.outcome} | {name} | {' '.join(one.findings)} | {one.seconds:.1f} |", flush=True)
    print(
        ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()),
        f"; {named[True]} of {named.total()} named",
    )
    return int(outcomes["missed"] + outcomes["false alarm"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
