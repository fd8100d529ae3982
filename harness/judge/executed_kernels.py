"""Traced passes -> the checks that a kernel really ran, and what a report lists of them.

That a kernel's function was called (`kernel-ran-…`) does not prove that its own device kernels ran: the function may have answered
with PyTorch's attention. Here the names of what was launched decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import Field

from assay.harness.backend import native_kernels
from assay.harness.evidence.executed import ExecutedKernel, KernelClaim, KernelTrace, TracedPass, passes_of
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.schema import Part
from assay.harness.sides import ROLES, Role
from assay.harness.verdict import Check, Requirement

_EXECUTED = Requirement("kernel-executed", "the candidate's own kernels ran in a traced pass")
_SHOWN = 4
"""Most names in a sentence."""
MAX_NAME = 160
"""Longest name of a kernel in a report: those of C++ templates take whole pages."""


class KernelRow(Part):
    """A kernel that ran in a traced pass."""

    name: str
    kind: Literal["device", "triton", "operator"] = Field(
        description="a kernel on a GPU, a Triton function that the interpreter ran, or an operator of PyTorch"
    )
    launches: int
    attention: bool | None = Field(
        description="whether an attention call launched it; null: not known, as in a CUDA graph"
    )
    of: Literal["reference", "candidate", "both", ""] = Field(
        description="the role whose backend is known to launch kernels of this name; empty for neither"
    )


class PassKernels(Part):
    """The kernels of one traced pass."""

    role: Role
    phase: str
    cached_prefix: bool
    kernels: tuple[KernelRow, ...]

    @property
    def sentence(self) -> str:
        """Row in words: "candidate, extend without a cached prefix: _attn_fwd (4), quant_per_block_int8_kernel (8); 12 others"."""
        own = [kernel for kernel in self.kernels if kernel.of and kernel.attention is not False]
        rest = len(self.kernels) - len(own)
        named = (
            _listed([f"{_short(kernel.name)} ({kernel.launches})" for kernel in own]) or "none that is known by name"
        )
        return f"{self.role}, {_words(self.phase, self.cached_prefix)}: {named}" + (f"; {rest} others" if rest else "")


def check_kernels_executed(
    server: ServerManifest | None, traces: Mapping[Role, Sequence[KernelTrace]], stored: bool = False
) -> list[Check]:
    """Check that the candidate's own kernels ran in the traced passes of each phase it claims, and the reference's did not.

    Args:
        server: the candidate's server; without one that assay started, `check_kernel_ran` says so, and nothing is said here.
        traces: what the processes of each role's server saw.
        stored: whether the reference has no server of its own in this run.
    """
    if server is None or not server.started:
        return []
    return [_check_phase(phase, server, traces, stored) for phase in server.claimed_phases]


def _kernel_patterns(traces: Sequence[KernelTrace]) -> tuple[str, ...]:
    """Return the names by which a role's own kernels are recognised, as regular expressions; empty if none are known.

    They are those that the kernel declares, else the Triton functions of the package that it declares, else those that are known
    of an engine's own backend.
    """
    if not traces:
        return ()
    claim = traces[0].claim
    if claim.kernels:
        return claim.kernels
    names = {name for trace in traces for name in trace.claim.in_package}
    return tuple(f"^{re.escape(name)}$" for name in sorted(names)) or native_kernels(traces[0].backend)


def listed_passes(traces: Mapping[Role, Sequence[KernelTrace]]) -> tuple[PassKernels, ...]:
    """Return the traced passes of both roles, as a report lists them.

    Operators of PyTorch are left out where kernels of a lower level are known and no role's names match them.
    """
    patterns = {role: _kernel_patterns(traces[role]) for role in ROLES}
    return tuple(
        PassKernels(role=role, phase=one.phase, cached_prefix=one.cached_prefix, kernels=tuple(_rows(one, patterns)))
        for role in ROLES
        for trace in traces[role]
        for one in trace.passes
    )


def _rows(traced_pass: TracedPass, patterns: Mapping[Role, Sequence[str]]) -> Iterable[KernelRow]:
    lower = any(kernel.kind != "operator" for kernel in traced_pass.kernels)
    for kernel in traced_pass.kernels:
        of = [role for role in ROLES if _matches(kernel, patterns[role])]
        if of or not lower or kernel.kind != "operator":
            yield KernelRow(
                name=kernel.name[:MAX_NAME],
                kind=kernel.kind,
                launches=kernel.launches,
                attention=kernel.attention,
                of="both" if len(of) == len(ROLES) else of[0] if of else "",
            )


def _matches(kernel: ExecutedKernel, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, kernel.name) for pattern in patterns)


def _check_phase(
    phase: str, server: ServerManifest, traces: Mapping[Role, Sequence[KernelTrace]], stored: bool
) -> Check:
    executed, passes = _EXECUTED.of(phase), passes_of(traces["candidate"], phase)
    own, theirs = _kernel_patterns(traces["candidate"]), _kernel_patterns(traces["reference"])
    if not passes:
        return executed.check("missing", f"no {phase} pass was traced", "run again, so that each server traces a pass")
    if not stored and not passes_of(traces["reference"], phase):
        found = f"no {phase} pass of the reference was traced"
        return executed.check("missing", found, "run again, so that each server traces a pass")
    if not own:
        return _check_without_names(executed, traces["candidate"][0].claim, passes)
    if fault := _foreign(passes, own, theirs, "the reference's kernels ran in the candidate's server"):
        return executed.check("failed", fault, f"run so that only {server.backend} computes {phase}")
    without = [one for one in passes if not any(_matches(kernel, own) for kernel in one.kernels)]
    claim = traces["candidate"][0].claim
    if without and not (claim.kernels or claim.in_package):
        found = f"none of the kernels known of SGLang's {server.backend} ran under its known names; {_what_ran(passes)}"
        return executed.check("not checked", found, "compare the names in the report with what SGLang launches")
    if without:
        found = (
            f"none of {_listed(own)} ran in {_words(without[0].phase, without[0].cached_prefix)}; {_what_ran(without)}"
        )
        return executed.check("failed", found, "find out what the kernel computes instead, or declare what it launches")
    if unseen := _never_ran(claim.kernels, server, traces["candidate"]):
        found = f"declared, but did not run: {_listed(unseen)}; {_what_ran(passes)}"
        return executed.check("failed", found, "find out what the kernel computes instead, or declare what it launches")
    if fault := _foreign(
        passes_of(traces["reference"], phase), theirs, own, "the reference ran the candidate's kernels"
    ):
        return executed.check("failed", fault, "compare it with a reference that does not launch the same kernels")
    return executed.check("ok", _what_ran(passes, own))


def _check_without_names(executed: Requirement, claim: KernelClaim, passes: Sequence[TracedPass]) -> Check:
    """Check a kernel whose launches are not known by name: it must name them if it claims more than plain PyTorch."""
    settles = "name what it launches with declares(kernels=...)"
    claims = [f"the quantisation {claim.noise}"] if claim.noise else []
    claims += [f"the package {claim.package}"] if claim.package else []
    if claims:
        found = f"it declares {' and '.join(claims)}, but no names of kernels that would prove it; {_what_ran(passes)}"
        return executed.check("missing", found, settles)
    return executed.check("not checked", f"it declares no names of kernels; {_what_ran(passes)}", settles)


def _never_ran(declared: Sequence[str], server: ServerManifest, traces: Sequence[KernelTrace]) -> list[str]:
    """List the declared names that did not occur in any traced pass of the claimed phases."""
    kernels = [k for phase in server.claimed_phases for one in passes_of(traces, phase) for k in one.kernels]
    return [pattern for pattern in declared if not any(_matches(kernel, (pattern,)) for kernel in kernels)]


def _foreign(passes: Sequence[TracedPass], own: Sequence[str], theirs: Sequence[str], what: str) -> str:
    """Name the other role's kernels that ran in these passes' attention; empty for none, or if a role's are not known."""
    if not own or not theirs:
        return ""
    found = {
        kernel.name
        for one in passes
        for kernel in one.kernels
        if kernel.attention is not False and _matches(kernel, theirs) and not _matches(kernel, own)
    }
    return f"{what}: {_listed(sorted(found))}" if found else ""


def _what_ran(passes: Sequence[TracedPass], only: Sequence[str] = ()) -> str:
    """Describe what attention launched: "ran: _attn_fwd 4 times, …"."""
    launches: dict[str, int] = {}
    kernels = [k for one in passes for k in one.kernels if k.attention is not False]
    lower = [k for k in kernels if k.kind != "operator"] or kernels
    for kernel in [k for k in kernels if _matches(k, only)] if only else lower:
        launches[kernel.name] = launches.get(kernel.name, 0) + kernel.launches
    most = sorted(launches, key=lambda name: (-_weight(name), -launches[name]))
    return f"ran: {_listed([f'{_short(name)} ({launches[name]})' for name in most])}" if launches else "nothing ran"


def _weight(name: str) -> bool:
    """Return True if a name is likely to be attention's, so that it is shown first."""
    return re.search(r"attention|attn|flash|fmha|softmax|bmm|quant", name, re.IGNORECASE) is not None


def _words(phase: str, cached_prefix: bool) -> str:
    return phase if phase == "decode" else f"{phase} {'with' if cached_prefix else 'without'} a cached prefix"


def _short(name: str) -> str:
    return name if len(name) <= MAX_NAME // 2 else f"{name[: MAX_NAME // 2]}…"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(_short, names[:_SHOWN])) + more
