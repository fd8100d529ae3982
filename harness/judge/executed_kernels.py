"""Counted calls and traced passes -> the checks that a kernel really ran, and a report's list of them.

A call of a kernel's function (`kernel-ran-…`) does not prove that its own device kernels ran: the function may have answered with
PyTorch's attention. Here the names of the launched kernels decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from assay.harness.evidence.counters import CallCount, total_calls
from assay.harness.evidence.executed import ExecutedKernel, KernelTrace, TracedPass, passes_of
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.report import KernelRow, PassKernels
from assay.harness.sides import ENGINES, ROLES, Role, profile_of
from assay.harness.statement import state
from assay.harness.verdict import Check, Requirement

# More than this share of each server's decode calls must have been compiled: capturing graphs alone compiles some.
_MIN_COMPILED_SHARE = 0.5
# Longest name of a kernel in a report: those of C++ templates fill whole pages.
_MAX_NAME = 160


def claim(run: RunEvidence) -> Judged:
    """Check that the candidate's own kernels computed the calls that they claim, as counted and as traced."""
    if not run.compares_servers:
        return Judged()
    candidate = run.servers.get("candidate")
    return Judged(
        checks=[
            *check_kernel_ran(candidate, run.counts["candidate"], run.counts["reference"]),
            *_check_kernels_executed(candidate, run.kernels, "reference" not in run.measured),
            *check_compiled(run.servers, run.counts),
        ]
    )


def check_kernel_ran(
    server: ServerManifest | None, counts: Sequence[CallCount], reference: Sequence[CallCount]
) -> list[Check]:
    """Check that the candidate's own kernel, and nothing else, computed every phase that it claims, in every layer.

    Args:
        reference: the calls counted in the reference's server, which tell how many layers there are; may be empty.
    """
    if server is None:
        return [Requirement("kernel-ran").check("missing", state("candidate-never-started"))]
    if not server.started:
        return [Requirement("kernel-ran").check("missing", state("not-instrumented", backend=server.backend))]
    return [_check_counts(phase, server, counts, reference) for phase in server.claimed_phases]


def _check_counts(
    phase: str, server: ServerManifest, counts: Sequence[CallCount], reference: Sequence[CallCount]
) -> Check:
    ran = Requirement("kernel-ran").of(phase)
    here = [count for count in counts if count.phase == phase]
    own = [count for count in here if count.backend == server.backend and not count.delegated_by]
    other = [count for count in here if count not in own]
    if not own:
        return ran.check("missing", state("no-call-counted", phase=phase, backend=server.backend))
    kernel, calls, layers = own[0].kernel, total_calls(own), _layers(own)
    if other:
        others = [(count.kernel, count.calls) for count in other]
        return ran.check("failed", state("others-called", phase=phase, kernel=kernel, calls=calls, others=others))
    expected = _layers(count for count in reference if count.phase == phase)
    if lacking := sorted(expected - layers):
        outcome = state("layers-lacking", kernel=kernel, ran=len(layers), layers=len(expected), lacking=lacking)
        return ran.check("failed", outcome)
    return ran.check("ok", state("own-kernel-called", kernel=kernel, calls=calls, layers=len(layers)))


def _layers(counts: Iterable[CallCount]) -> set[int]:
    return {layer for count in counts for layer in count.calls_by_layer}


def check_compiled(servers: Mapping[Role, ServerManifest], counts: Mapping[Role, Sequence[CallCount]]) -> list[Check]:
    """Check that decode ran mostly as compiled code, in each server that was started with ``--enable-torch-compile``.

    SGLang compiles only passes that it captures into CUDA graphs: without these it silently ignores the flag, and batches beyond
    the captured ones run uncompiled.
    """
    asked = [role for role, server in servers.items() if server.arguments.get("enable_torch_compile")]
    if not asked:
        return []
    shares, met = [], True
    for role in asked:
        decode = [count for count in counts[role] if count.phase == "decode"]
        compiled, calls = total_calls(count for count in decode if count.compiled), total_calls(decode)
        shares.append((role, compiled, calls))
        met = met and compiled > _MIN_COMPILED_SHARE * calls
    return [Requirement("decode-compiled").met(met, state("decode-calls", shares=shares, least=_MIN_COMPILED_SHARE))]


def _check_kernels_executed(
    server: ServerManifest | None, traces: Mapping[Role, Sequence[KernelTrace]], stored: bool = False
) -> list[Check]:
    """Check that the candidate's own kernels ran in the traced passes of each phase it claims, and the reference's did not."""
    if server is None:
        return []
    return [_check_traces(phase, server, traces, stored) for phase in server.claimed_phases]


def _kernel_patterns(traces: Sequence[KernelTrace]) -> tuple[str, ...]:
    """Return the names by which a role's own kernels are recognised, as regular expressions, if any are known."""
    if not traces:
        return ()
    if traces[0].kernels:
        return traces[0].kernels
    names = {name for trace in traces for name in trace.in_package}
    if names:
        return tuple(f"^{re.escape(name)}$" for name in sorted(names))
    known = (profile_of(engine).kernels for engine in ENGINES)
    return next((kernels[traces[0].backend] for kernels in known if traces[0].backend in kernels), ())


def listed_passes(traces: Mapping[Role, Sequence[KernelTrace]]) -> tuple[PassKernels, ...]:
    """Return the traced passes of both roles, as a report lists them.

    Operators of PyTorch are left out if kernels of a lower level are known and no role's names match the operators.
    """
    patterns = {role: _kernel_patterns(traces[role]) for role in ROLES}
    return tuple(
        PassKernels(
            role=role, phase=traced.phase, cached_prefix=traced.cached_prefix, kernels=tuple(_rows(traced, patterns))
        )
        for role in ROLES
        for trace in traces[role]
        for traced in trace.passes
    )


def _rows(traced_pass: TracedPass, patterns: Mapping[Role, Sequence[str]]) -> Iterable[KernelRow]:
    lower = any(kernel.kind != "operator" for kernel in traced_pass.kernels)
    for kernel in traced_pass.kernels:
        of = [role for role in ROLES if _matches(kernel, patterns[role])]
        if of or not lower or kernel.kind != "operator":
            yield KernelRow(
                name=kernel.name[:_MAX_NAME],
                kind=kernel.kind,
                launches=kernel.launches,
                attention=kernel.attention,
                of="both" if len(of) == len(ROLES) else of[0] if of else "",
            )


def _matches(kernel: ExecutedKernel, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, kernel.name) for pattern in patterns)


def _check_traces(
    phase: str, server: ServerManifest, traces: Mapping[Role, Sequence[KernelTrace]], stored: bool
) -> Check:
    executed, passes = Requirement("kernel-executed").of(phase), passes_of(traces["candidate"], phase)
    own, theirs = _kernel_patterns(traces["candidate"]), _kernel_patterns(traces["reference"])
    if not passes or not (stored or passes_of(traces["reference"], phase)):
        return executed.check("missing", state("no-pass-traced", phase=phase, of_reference=bool(passes)))
    declared = traces["candidate"][0]
    if not own:
        claims = {"noise": declared.noise, "package": declared.package}
        outcome = state("kernels-not-named", **claims, ran=_what_ran(passes))
        return executed.check("missing" if any(claims.values()) else "not checked", outcome)
    if names := _foreign(passes, own, theirs):
        outcome = state("reference-kernels-ran", phase=phase, backend=server.backend, names=names)
        return executed.check("failed", outcome)
    without = [traced for traced in passes if not any(_matches(kernel, own) for kernel in traced.kernels)]
    if without and not (declared.kernels or declared.in_package):
        outcome = state("known-names-lacking", backend=server.backend, ran=_what_ran(passes))
        return executed.check("not checked", outcome)
    if without:
        seen = {"phase": without[0].phase, "cached_prefix": without[0].cached_prefix, "ran": _what_ran(without)}
        return executed.check("failed", state("own-kernels-lacking", names=own, **seen))
    if unseen := _never_ran(declared.kernels, server, traces["candidate"]):
        return executed.check("failed", state("declared-never-ran", names=unseen, ran=_what_ran(passes)))
    if names := _foreign(passes_of(traces["reference"], phase), theirs, own):
        return executed.check("failed", state("reference-ran-candidates", names=names))
    return executed.check("ok", state("kernels-ran", ran=_what_ran(passes, own)))


def _never_ran(declared: Sequence[str], server: ServerManifest, traces: Sequence[KernelTrace]) -> list[str]:
    """List the declared names that did not occur in any traced pass of the claimed phases."""
    kernels = [k for phase in server.claimed_phases for traced in passes_of(traces, phase) for k in traced.kernels]
    return [pattern for pattern in declared if not any(_matches(kernel, (pattern,)) for kernel in kernels)]


def _foreign(passes: Sequence[TracedPass], own: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """Name the other role's kernels that ran in these passes' attention. The list is empty if a role's kernels are unknown."""
    if not own or not theirs:
        return []
    kernels = [k for traced in passes for k in traced.kernels if k.attention is not False]
    names = sorted({k.name for k in kernels if _matches(k, theirs) and not _matches(k, own)})
    return [name[:_MAX_NAME] for name in names]


def _what_ran(passes: Sequence[TracedPass], only: Sequence[str] = ()) -> list[tuple[str, int]]:
    """Return the kernels that attention launched, with counts: attention's likely own kernels first, then by frequency."""
    launches: dict[str, int] = {}
    kernels = [k for traced in passes for k in traced.kernels if k.attention is not False]
    lower = [k for k in kernels if k.kind != "operator"] or kernels
    for kernel in [k for k in kernels if _matches(k, only)] if only else lower:
        launches[kernel.name] = launches.get(kernel.name, 0) + kernel.launches
    most = sorted(launches, key=lambda name: (-_weight(name), -launches[name]))
    return [(name[:_MAX_NAME], launches[name]) for name in most]


def _weight(name: str) -> bool:
    """Return True if a name is likely to be attention's."""
    return re.search(r"attention|attn|flash|fmha|softmax|bmm|quant", name, re.IGNORECASE) is not None
