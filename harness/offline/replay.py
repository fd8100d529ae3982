"""Replay: recorded calls, without a server and without a model, and the name of what is wrong with the candidate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from assay.harness.attention import kernels
from assay.harness.attention.call import AttentionCall
from assay.harness.engines.backend import Backend
from assay.harness.errors import UsageError
from assay.harness.evidence.pack import PackedCall, read_pack
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.examine import Examination, Observation, look, observe, run_again
from assay.harness.localize.guard import Guard
from assay.harness.localize.naming import name_cause, smallest_of_each
from assay.harness.localize.smallest import smallest_call
from assay.harness.schema import Record
from assay.harness.verdict import Finding


class LayerBound(Record):
    """The largest own error (relative L1) that noise explained in the replayed calls of a layer and phase."""

    layer: int
    phase: str
    bound: float


class ReplayResult(Record):
    """What a candidate came to on recorded calls.

    Attributes:
        candidate: its name.
        calls: calls that were looked at.
        recorded: calls in the pack, in the phases that the candidate computes.
        with_prefix: calls looked at in which a prefix was cached.
        worst: largest own error over calls, cells and heads, as a multiple of its bound.
        bounds: by layer and phase.
        findings: what is wrong, named where a hypothesis fits.
        not_looked_for: sentences.
        named_s: seconds until the first findings; None if there are none.
        seconds: time that examining and diagnosing took.
        smallest: the smallest failing call that was found, in words; empty if none fails, or where the kernel was not run.
        test: a pytest file that shows it; empty where there is none.
    """

    candidate: str
    calls: int
    recorded: int
    with_prefix: int
    worst: float
    bounds: tuple[LayerBound, ...]
    findings: tuple[Finding, ...]
    not_looked_for: tuple[str, ...] = ()
    named_s: float | None = None
    seconds: float
    smallest: str = ""
    test: str = ""


def replay(
    pack: Path, candidate: str, reproduce: str, told: Callable[[Sequence[Finding]], None] = lambda findings: None
) -> ReplayResult:
    """Run a kernel on recorded calls, and name what is wrong with it.

    Args:
        pack: folder of a replay pack.
        candidate: a published kernel, or ``module:function``.
        reproduce: the command that shows a finding again.
        told: is given the first findings as soon as there are any; they may still change.

    Raises:
        UsageError: `pack` is no pack, or holds no call of a phase that the kernel computes.
        KernelRefused: there is no such kernel.
    """
    kernel = kernels.load(candidate)
    phases = kernels.declaration(kernel).phases
    recorded = [one for one in read_pack(pack) if one.phase in phases]
    if not recorded:
        raise _nothing(pack, f"no {' or '.join(phases)} call", candidate)
    calls = [_here(one.call) for one in choose(recorded)]
    naming = name_cause(kernel, calls, reproduce, told=told)
    made = _result(
        candidate,
        naming.examination,
        len(recorded),
        naming.findings,
        naming.seconds,
        naming.named_s,
        naming.not_looked_for,
    )
    guard = Guard(kernel, kernels.declaration(kernel))
    smallest, test = smallest_call(guard, naming.examination, naming.findings, candidate)
    return made.model_copy(update={"smallest": smallest, "test": test})


def examine_recorded(pack: Path, candidate: Backend, reproduce: str, served: bool = False) -> ReplayResult:
    """Hold the outputs of a candidate that a server recorded against the truth, and name what is wrong with it.

    A kernel is also run here, on a call with and one without a cached prefix: whether it gives the same twice, and writes to
    nothing, no recorded output tells.

    Args:
        pack: folder of a replay pack that was recorded with the candidate in the shadow, or in its own server.
        candidate: a kernel, or one of SGLang's own backends.
        reproduce: the command that shows a finding again.
        served: whether the server was the candidate's own, so that its outputs are those which the pack calls the reference's.

    Raises:
        UsageError: `pack` is no pack, or holds no output of the candidate.
        KernelRefused: there is no such kernel.
    """
    begun = time.monotonic()
    recorded, seen = _held(pack, candidate, served)
    kernel = candidate.kernel() if candidate.is_kernel else None
    findings = diagnose(seen, reproduce)
    named_s = time.monotonic() - begun if findings else None
    unseen = (
        "nondeterminism, state and writing to inputs were not looked for: a backend of SGLang's is not run by itself"
    )
    if kernel:
        again = smallest_of_each([o.call for o in seen.observations])
        first = {bool(any(call.prefixes)): call for call in reversed(again)}
        ran = look(kernel, list(first.values()))
        ran = replace(ran, observations=tuple(run_again(kernel, o) for o in ran.observations))
        seen = Examination(seen.observations + ran.observations, refused=ran.refused)
        findings = diagnose(seen, reproduce)
        unseen = f"nondeterminism, state and writing to inputs were looked for on {len(ran.observations)} calls"
    return _result(candidate.name, seen, recorded, findings, time.monotonic() - begun, named_s, (unseen,))


def name_recorded(pack: Path, candidate: Backend, reproduce: str, served: bool = False) -> list[Finding]:
    """What the outputs of a candidate that a server recorded come to by themselves: no kernel is run. Arguments, and what is
    raised, as in `examine_recorded`.
    """
    return diagnose(_held(pack, candidate, served)[1], reproduce)


def _held(pack: Path, candidate: Backend, served: bool) -> tuple[int, Examination]:
    """The number of recorded outputs of a candidate, and those that were chosen, held against the truth."""
    recorded = [one for one in read_pack(pack) if one.phase in candidate.phases]
    recorded = [one for one in recorded if served or one.candidate is not None]
    if not recorded:
        raise _nothing(pack, "no output of a candidate", candidate.name)
    return len(recorded), Examination(tuple(_as_recorded(one, candidate.noise, served) for one in choose(recorded)))


def _result(
    candidate: str,
    seen: Examination,
    recorded: int,
    findings: Sequence[Finding],
    seconds: float,
    named_s: float | None,
    not_looked_for: Sequence[str],
) -> ReplayResult:
    return ReplayResult(
        candidate=candidate,
        calls=len(seen.observations),
        recorded=recorded,
        with_prefix=sum(any(o.call.prefixes) for o in seen.observations),
        worst=max((float(o.own.max()) / o.bound for o in seen.observations), default=0.0),
        bounds=tuple(bounds_of(seen.observations)),
        findings=tuple(findings),
        not_looked_for=tuple(not_looked_for),
        named_s=named_s,
        seconds=seconds,
    )


def choose(recorded: Sequence[PackedCall]) -> list[PackedCall]:
    """The smallest call and the middle one of each layer and phase, with and without a cached prefix, and the worst one of each
    layer and phase: enough to name a bug, and to hold what is furthest off against its bound.
    """
    strata: dict[tuple[int, str, bool], list[PackedCall]] = {}
    for one in sorted(recorded, key=lambda one: (one.call.k.shape[0], one.call.q.shape[0])):
        strata.setdefault((one.layer, one.phase, any(one.entry.prefix)), []).append(one)
    chosen = [stratum[at] for stratum in strata.values() for at in sorted({0, len(stratum) // 2})]
    known = {id(one) for one in chosen}
    return chosen + [one for one in recorded if one.entry.chosen == "worst" and id(one) not in known]


def bounds_of(observations: Sequence[Observation]) -> list[LayerBound]:
    """The largest bound of each layer and phase."""
    largest: dict[tuple[int, str], float] = {}
    for one in observations:
        where = (one.call.layer, one.call.phase)
        largest[where] = max(largest.get(where, 0.0), one.bound)
    return [LayerBound(layer=layer, phase=phase, bound=bound) for (layer, phase), bound in sorted(largest.items())]


def _as_recorded(one: PackedCall, noise: str, served: bool) -> Observation:
    out = one.reference if served else one.candidate
    assert out is not None
    call = _here(one.call)
    return observe(call, out.to(call.q.device), noise)


def _here(call: AttentionCall) -> AttentionCall:
    """The call on the GPU, if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return call.to(device)


def _nothing(pack: Path, found: str, candidate: str) -> UsageError:
    return UsageError(
        f"{pack} holds {found}.", f"calls that {candidate} computes", "record a pack with assay diff or assay record"
    )
