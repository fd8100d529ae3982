"""Counted calls and traced passes -> the checks that a kernel really ran, and what a report lists of them.

That a kernel's function was called (`kernel-ran-…`) does not prove that its own device kernels ran: the function may have answered
with PyTorch's attention. Here the names of what was launched decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from assay.harness.evidence.counters import CallCount, total_calls
from assay.harness.evidence.executed import (
    ExecutedKernel,
    KernelTrace,
    TracedPass,
    pass_title,
    passes_of,
    some_kernels,
)
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.report import KernelRow, PassKernels
from assay.harness.sides import ENGINES, ROLES, Role, profile_of
from assay.harness.text import percent
from assay.harness.verdict import Check, Requirement

# More than this share of each server's decode calls must have been compiled: capturing graphs alone compiles some.
_MIN_COMPILED_SHARE = 0.5
# Longest name of a kernel in a report: those of C++ templates take whole pages.
_MAX_NAME = 160


def claim(run: RunEvidence) -> Judged:
    """Check that the candidate's own kernels computed what they claim, as counted and as traced."""
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
    """Check that the candidate's own kernel computed every phase that it claims, in every layer, and nothing else did.

    Args:
        server: the candidate's server; None if it never started.
        reference: the calls counted in the reference's server, which say how many layers there are; may be empty.
    """
    if server is None:
        settles = "start it; see candidate.log for why it did not"
        return [Requirement("kernel-ran").check("missing", "its server never started", settles)]
    if not server.started:
        observed = f"{server.backend} is a server that assay did not start and cannot instrument"
        return [
            Requirement("kernel-ran").check("missing", observed, "let assay start the candidate, by its backend's name")
        ]
    return [_check_counts(phase, server, counts, reference) for phase in server.claimed_phases]


def _check_counts(
    phase: str, server: ServerManifest, counts: Sequence[CallCount], reference: Sequence[CallCount]
) -> Check:
    ran = Requirement("kernel-ran").of(phase)
    here = [count for count in counts if count.phase == phase]
    own = [count for count in here if count.backend == server.backend and not count.delegated_by]
    other = [count for count in here if count not in own]
    if not own:
        settles = f"run so that {server.backend} computes {phase}; see candidate.log for what ran instead"
        return ran.check("missing", f"no {phase} call of {server.backend} was counted", settles)
    calls, layers = total_calls(own), _layers(own)
    if other:
        observed = (
            f"{own[0].kernel} {calls:,} calls, but also {', '.join(f'{c.kernel} {c.calls:,} calls' for c in other)}"
        )
        return ran.check("failed", observed, f"run so that nothing else computes {phase}")
    expected = _layers(count for count in reference if count.phase == phase)
    if lacking := sorted(expected - layers):
        observed = f"{own[0].kernel} ran in {len(layers)} of {len(expected)} layers; not in {lacking[:8]}"
        return ran.check("failed", observed, "run so that it computes every layer")
    return ran.check("ok", f"{own[0].kernel} {calls:,} calls in {len(layers)} layers")


def _layers(counts: Iterable[CallCount]) -> set[int]:
    return {layer for count in counts for layer in count.calls_by_layer}


def check_compiled(servers: Mapping[Role, ServerManifest], counts: Mapping[Role, Sequence[CallCount]]) -> list[Check]:
    """Check that decode ran mostly as compiled code, in each server that was started with ``--enable-torch-compile``.

    SGLang compiles only what it captures into CUDA graphs: without them it silently ignores the flag, and batches larger than
    the captured ones run uncompiled.
    """
    asked = [role for role, server in servers.items() if server.arguments.get("enable_torch_compile")]
    if not asked:
        return []
    shares, met = [], True
    for role in asked:
        decode = [count for count in counts[role] if count.phase == "decode"]
        compiled = total_calls(count for count in decode if count.compiled)
        shares.append(f"{compiled:,} of {total_calls(decode):,} decode calls of the {role}")
        met = met and compiled > _MIN_COMPILED_SHARE * total_calls(decode)
    observed = f"{', '.join(shares)}; more than {percent(_MIN_COMPILED_SHARE)} of each are needed"
    settles = "capture CUDA graphs for batches this large; a kernel of the contract that computes decode allows none"
    return [Requirement("decode-compiled").met(met, observed, settles)]


def _check_kernels_executed(
    server: ServerManifest | None, traces: Mapping[Role, Sequence[KernelTrace]], stored: bool = False
) -> list[Check]:
    """Check that the candidate's own kernels ran in the traced passes of each phase it claims, and the reference's did not."""
    if server is None:
        return []
    return [_check_traces(phase, server, traces, stored) for phase in server.claimed_phases]


def _kernel_patterns(traces: Sequence[KernelTrace]) -> tuple[str, ...]:
    """Return the names by which a role's own kernels are recognised, as regular expressions; empty if none are known."""
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

    Operators of PyTorch are left out where kernels of a lower level are known and no role's names match them.
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
        whose = f"{phase} pass of the reference" if passes else f"{phase} pass"
        return executed.check("missing", f"no {whose} was traced", "run again, so that each server traces a pass")
    if not own:
        return _check_without_names(executed, traces["candidate"][0], passes)
    if fault := _foreign(passes, own, theirs, "the reference's kernels ran in the candidate's server"):
        return executed.check("failed", fault, f"run so that only {server.backend} computes {phase}")
    without = [traced for traced in passes if not any(_matches(kernel, own) for kernel in traced.kernels)]
    declared = traces["candidate"][0]
    if without and not (declared.kernels or declared.in_package):
        observed = (
            f"none of the kernels known of SGLang's {server.backend} ran under its known names; {_what_ran(passes)}"
        )
        return executed.check("not checked", observed, "compare the names in the report with what SGLang launches")
    find_out = "find out what the kernel computes instead, or declare what it launches"
    if without:
        in_pass = pass_title(without[0].phase, without[0].cached_prefix)
        return executed.check("failed", f"none of {some_kernels(own)} ran in {in_pass}; {_what_ran(without)}", find_out)
    if unseen := _never_ran(declared.kernels, server, traces["candidate"]):
        observed = f"declared, but did not run: {some_kernels(unseen)}; {_what_ran(passes)}"
        return executed.check("failed", observed, find_out)
    ours = passes_of(traces["reference"], phase)
    if fault := _foreign(ours, theirs, own, "the reference ran the candidate's kernels"):
        return executed.check("failed", fault, "compare it with a reference that does not launch the same kernels")
    return executed.check("ok", _what_ran(passes, own))


def _check_without_names(executed: Requirement, declared: KernelTrace, passes: Sequence[TracedPass]) -> Check:
    """Check a kernel whose launches are not known by name: it must name them if it claims more than plain PyTorch."""
    settles = "name what it launches with declares(kernels=...)"
    claims = [f"the quantisation {declared.noise}"] if declared.noise else []
    claims += [f"the package {declared.package}"] if declared.package else []
    if claims:
        observed = (
            f"it declares {' and '.join(claims)}, but no names of kernels that would prove it; {_what_ran(passes)}"
        )
        return executed.check("missing", observed, settles)
    return executed.check("not checked", f"it declares no names of kernels; {_what_ran(passes)}", settles)


def _never_ran(declared: Sequence[str], server: ServerManifest, traces: Sequence[KernelTrace]) -> list[str]:
    """List the declared names that did not occur in any traced pass of the claimed phases."""
    kernels = [k for phase in server.claimed_phases for traced in passes_of(traces, phase) for k in traced.kernels]
    return [pattern for pattern in declared if not any(_matches(kernel, (pattern,)) for kernel in kernels)]


def _foreign(passes: Sequence[TracedPass], own: Sequence[str], theirs: Sequence[str], what: str) -> str:
    """Name the other role's kernels that ran in these passes' attention; empty for none, or if a role's are not known."""
    if not own or not theirs:
        return ""
    names = {
        kernel.name
        for traced in passes
        for kernel in traced.kernels
        if kernel.attention is not False and _matches(kernel, theirs) and not _matches(kernel, own)
    }
    return f"{what}: {some_kernels(sorted(names))}" if names else ""


def _what_ran(passes: Sequence[TracedPass], only: Sequence[str] = ()) -> str:
    """Describe what attention launched: "ran: _attn_fwd 4 times, …"."""
    launches: dict[str, int] = {}
    kernels = [k for traced in passes for k in traced.kernels if k.attention is not False]
    lower = [k for k in kernels if k.kind != "operator"] or kernels
    for kernel in [k for k in kernels if _matches(k, only)] if only else lower:
        launches[kernel.name] = launches.get(kernel.name, 0) + kernel.launches
    most = sorted(launches, key=lambda name: (-_weight(name), -launches[name]))
    return f"ran: {some_kernels(f'{name} ({launches[name]})' for name in most)}" if launches else "nothing ran"


def _weight(name: str) -> bool:
    """Return True if a name is likely to be attention's, so that it is shown first."""
    return re.search(r"attention|attn|flash|fmha|softmax|bmm|quant", name, re.IGNORECASE) is not None
