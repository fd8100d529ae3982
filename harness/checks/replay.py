"""Replays recorded calls on a candidate, without a server or a model, and names its bug."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from assay.harness.attention import kernels
from assay.harness.attention.call import AttentionCall, default_device
from assay.harness.attention.matrix import dtype_name
from assay.harness.attention.shapes import shape_of
from assay.harness.backend import Backend
from assay.harness.checks.check import concluded, explore
from assay.harness.checks.check_findings import breach, example
from assay.harness.checks.observed import Reader
from assay.harness.conditions import has_any_prefix, has_cached_prefix
from assay.harness.engines import registry
from assay.harness.errors import UsageError
from assay.harness.evidence.kernel_result import KernelResult, MeasuredCall
from assay.harness.evidence.manifest import engine_of
from assay.harness.evidence.pack import RecordedCall, hash_pack, read_manifest, read_pack, replay_command
from assay.harness.localize.call_conditions import describe
from assay.harness.localize.diagnose import CALL_REFUSED, diagnose
from assay.harness.localize.experiment import NOTHING_TRIED, Experiments
from assay.harness.localize.faults import OUTPUT, WrongOutputs
from assay.harness.localize.guard import Guard, run_calls
from assay.harness.localize.kernel_runs import CallResult, KernelRun, measure, worst_of
from assay.harness.localize.threads import few_threads
from assay.harness.text import counted, listed, ranges
from assay.harness.verdict import Finding, with_evidence
from assay.worker import UNREAD, Journal

# Recorded calls for the read-out of a backend, in addition to the examined ones.
_MORE_CALLS = 64


def replay(
    pack: Path | str,
    kernel: str,
    reproduce: str = "",
    read_out: float | None = None,
    journal: Journal = UNREAD,
) -> KernelResult:
    """Run a kernel on recorded calls in this process; see `assay.harness.checks.jobs.replay`.

    Args:
        pack: see there, like `reproduce` and `read_out`.
        kernel: the candidate.
        journal: receives each call, and the results so far, as the events of `assay.harness.checks.jobs`.

    Raises:
        UsageError: see there.
        AssayError: the kernel computed no call.
    """
    pack, start = Path(pack), time.monotonic()
    reproduce = reproduce or replay_command(pack, kernel)
    guard = Guard(kernels.find("", kernel), journal=journal)
    phases = guard.assay.phases
    unread: list[str] = []
    recorded = [record for record in read_pack(pack, unread) if record.call.phase in phases]
    if not recorded:
        raise _nothing(pack, f"no {' or '.join(phases)} call", kernel)
    chosen = choose(recorded)
    calls = [_on_device(record.call) for record in chosen]
    with few_threads(calls):
        run = run_calls(guard, calls, repeats=len(calls))
        if not guard.breaches:
            run.require_results()
    broken = [call for call, why in (*run.refused, *run.failed_repeats) if why in guard.breaches]
    where, written = f"{len(broken)} recorded calls", guard.written[:1]
    breaches = [breach(how, where, (example(broken[0]),), reproduce) for how in sorted(guard.breaches)]
    breaches += [breach(how, "recorded calls", (example(call),), reproduce) for call, how in written]
    envelope = {phase: _envelope([record for record in chosen if record.call.phase == phase]) for phase in phases}
    examined = _Examined(pack, recorded, chosen, unread=unread)

    def judged(experiments: Experiments, untried: Sequence[str] = ()) -> KernelResult:
        findings = [
            finding
            for finding in _diagnosed(run, reproduce, experiments)
            if finding.id != CALL_REFUSED or finding.diagnosis not in guard.breaches
        ]
        seconds = time.monotonic() - start
        result = _result(kernel, run, examined, [*findings, *breaches], seconds, reproduce, envelope, untried)
        return result.model_copy(update=experiments.said)

    experiments = NOTHING_TRIED
    with few_threads(calls):
        result = judged(experiments)
        if read_out != 0:
            journal.write("stands", result=result, reading=False)
            experiments, untried = _explored(guard, run, journal)
            result = judged(experiments, untried)
    return concluded(result, guard, run, kernel, read_out, journal, experiments)


def replay_recorded(
    pack: Path,
    candidate: Backend,
    reproduce: str,
    served: bool = False,
    not_run: str = "",
    reader: Reader | None = None,
    journal: Journal = UNREAD,
) -> KernelResult:
    """Compare a candidate's outputs, recorded by a server, with the oracle, and diagnose it.

    A kernel also runs here, on one call with and one without a prefix: recorded outputs do not show whether it is deterministic
    and leaves its inputs unchanged. If there are serious findings, a read-out can follow, as in `replay`. For a candidate that
    cannot run here, or is correct here, the read-out uses the recorded outputs.

    Args:
        pack: folder of a replay pack that was recorded with the candidate as a shadow, or in its own server.
        candidate: a kernel, or an engine's own backend.
        reproduce: a command that reproduces the findings.
        served: whether the candidate was the backend of the pack's server, so that the pack holds its outputs as the reference's.
        not_run: the reason not to run a kernel here, or an empty string to run it.
        reader: runs the read-out of a wrong kernel, or None for no read-out.
        journal: receives each call, and the result before a read-out, in which a kernel may hang.

    Raises:
        UsageError: `pack` is not a pack, or holds no output of the candidate.
        KernelRefused: there is no such kernel.
    """
    start = time.monotonic()
    examined, run = _recorded_run(pack, candidate, served)
    kernel = candidate.kernel() if candidate.is_kernel and not not_run else None
    guard = Guard(kernel, journal=journal, memory=False) if kernel else None
    why = not_run or "an engine's own backend runs only in a server"
    not_tested = f"nondeterminism, state and overwritten inputs were not tested: {why}"
    if guard:
        smallest: dict[bool, AttentionCall] = {}
        for call in sorted((result.call for result in run.results), key=lambda call: call.k.shape[0]):
            smallest.setdefault(has_any_prefix(call.prefixes), call)  # among calls of one size, the first layer's
        here = run_calls(guard, list(smallest.values()))
        if guard.breaches:
            # It may need a server, such as for a group of ranks. Its recorded outputs still count, but cannot pass.
            not_run = f"outside a server, the kernel {min(guard.breaches)}"
            not_tested = f"nondeterminism, state and overwritten inputs were not tested: {not_run}"
        else:
            run = replace(here, results=run.results + here.results)
            not_tested = f"only {len(here.results)} calls were tested for nondeterminism, state and overwritten inputs"
    left_out = f"{examined.left_out} prefills with a cache of fewer bits were compared only in the shadow"

    def judged(experiments: Experiments, untried: Sequence[str] = ()) -> KernelResult:
        said = (not_tested, *[left_out] * bool(examined.left_out), *untried)
        known = _diagnosed(run, reproduce, experiments)
        seconds = time.monotonic() - start
        result = _result(candidate.name, run, examined, known, seconds, reproduce, not_tested=said, not_run=not_run)
        return result.model_copy(update=experiments.said)

    experiments = NOTHING_TRIED
    result = judged(experiments)
    if guard and not not_run and reader is not None:
        journal.write("stands", result=result, reading=False)
        experiments, untried = _explored(guard, run, journal)
        result = judged(experiments, untried)
    findings: Sequence[Finding] = result.findings
    asked = None if not_run else guard
    if asked and reader is None:
        return result
    reader = reader or Reader()
    if not reader.wants(findings, run.results):
        return result
    journal.write("stands", result=result, reading=True)
    again = run.results[len(examined.chosen) :]
    if asked and not any(result.fails for result in again):
        only = f"asked again, the kernel computes {counted(len(again), 'recorded call')} within bounds: it is wrong in its server"
        asked, findings, run = (
            None,
            with_evidence(findings, only),
            replace(run, results=run.results[: len(examined.chosen)]),
        )
    more = [*_further(examined, run, served), *(result for _, result in experiments.kept)] if asked else []
    with few_threads([result.call for result in run.results]):
        observed = reader.observe(findings, asked, [*run.results, *more], experiments)
    return result.model_copy(update={"findings": observed.findings})


def _explored(guard: Guard, run: KernelRun, journal: Journal) -> tuple[Experiments, tuple[str, ...]]:
    """Find the condition under which a kernel is wrong on calls of recorded shapes, or explain why there are no experiments."""
    failing = sorted((o.call for o in run.results if o.fails), key=lambda call: (call.k.numel(), call.q.numel()))
    if not failing:
        return NOTHING_TRIED, ()
    results = sorted(run.results, key=lambda result: (result.call.k.numel(), result.call.q.numel()))
    calls, came = [result.call for result in results], [(shape_of(result.call), result) for result in results]
    experiments = explore(guard, calls, came, journal, {OUTPUT: WrongOutputs()})[OUTPUT]
    if experiments.place is not None or experiments.failed:
        return experiments, ()
    why = "with random numbers, calls of these shapes are correct"
    try:
        (shape := shape_of(failing[0])).make(0)
    except (LookupError, ValueError):
        what = listed([*shape.asked, *[shape.data] * (shape.data != "normal")])
        why = f"{describe(failing[0])}{f', with {what},' * bool(what)} cannot be drawn again"
    return experiments, (f"no experiments on the condition of the error: {why}",)


def _diagnosed(run: KernelRun, reproduce: str, experiments: Experiments) -> list[Finding]:
    """Diagnose recorded calls, without errors in layers that were not recorded."""
    layers = {result.call.layer for result in run.results}
    drawn = tuple(result for _, result in experiments.kept if result.call.layer in layers)
    points = [(known, bad) for known, bad in experiments.points if known["layer"] in layers]
    findings = diagnose(replace(run, drawn=drawn, points=points), reproduce, experiments.tried)
    return with_evidence(findings, *experiments.failed)


def _further(examined: _Examined, run: KernelRun, served: bool) -> list[CallResult]:
    """Compare the smallest recorded calls that were not examined, for the read-out."""
    known, noise = {id(record) for record in examined.chosen}, run.results[0].noise
    small = sorted(examined.recorded, key=lambda record: record.call.k.shape[0])
    others = [record for record in small if id(record) not in known][:_MORE_CALLS]
    calls = [(_on_device(record.call), record) for record in others]
    return [measure(call, _output(record, served).to(call.q.device), noise) for call, record in calls]


def _envelope(recorded: Sequence[RecordedCall]) -> str:
    """Describe layers, new tokens and cached prefixes of calls, or return an empty string without a call."""
    if not recorded:
        return ""
    layers = {record.call.layer for record in recorded}
    new = {length for record in recorded for length in record.call.lens_q}
    cached = {length for record in recorded for length in record.call.prefixes}
    return (
        f"layers {ranges(layers)}; {ranges(new)} new tokens, {ranges(cached)} cached; {counted(len(recorded), 'call')}"
    )


@dataclass(frozen=True)
class _Examined:
    """Calls of a pack in the candidate's phases: all, the examined ones, and those that cannot be judged or read."""

    pack: Path
    recorded: Sequence[RecordedCall]
    chosen: Sequence[RecordedCall]
    left_out: int = 0
    unread: Sequence[str] = ()


def _recorded_run(pack: Path, candidate: Backend, served: bool) -> tuple[_Examined, KernelRun]:
    """Compare a choice of the recorded outputs of a candidate with the oracle."""
    engine = engine_of(read_manifest(pack).source.engine)
    phases, noise = candidate.phases, candidate.noise  # each lookup of a published kernel takes 20 ms
    every = [record for record in read_pack(pack) if record.call.phase in phases]
    every = recorded = [record for record in every if served or record.candidate is not None]
    if not candidate.is_kernel:
        # An engine's own backend may read new tokens as the layer gave them, before the cache stored them in fewer bits. A pack
        # has only the stored values, so such calls are left to the shadow.
        recorded = [record for record in every if record.call.stored is None or record.call.phase == "decode"]
    if not recorded:
        beside = "only prefills with a cache of fewer bits, which only the shadow compares"
        raise _nothing(pack, beside if every else "no output of a candidate", candidate.name)
    chosen, results = choose(recorded), []
    for record in chosen:
        call = _on_device(record.call)
        if not candidate.is_kernel:  # the engine's catalogue states the noise of such a backend
            noise = registry.native_noise(engine, (candidate.name,), call.phase, call.stored is not None)
        results.append(measure(call, _output(record, served).to(call.q.device), noise))
    return _Examined(pack, recorded, chosen, len(every) - len(recorded)), KernelRun(tuple(results))


def _result(
    candidate: str,
    run: KernelRun,
    examined: _Examined,
    findings: Sequence[Finding],
    seconds: float,
    again: str,
    envelope: Mapping[str, str] | None = None,
    not_tested: Sequence[str] = (),
    not_run: str = "",
) -> KernelResult:
    worst = worst_of(run.results)
    own, bound = worst.worst_cell if worst else (None, None)
    with_prefix, envelope = sum(has_cached_prefix(record.served_prefixes) for record in examined.chosen), envelope or {}
    missing = [f"the pack has no {phase} call, which the kernel claims" for phase, text in envelope.items() if not text]
    if not with_prefix:
        missing.insert(0, "no call had a cached prefix: record a pack with the prefix cache on")
    if unread := examined.unread:
        missing.append(f"{counted(len(unread), 'recorded call')} could not be read: {unread[0].rstrip('.')}")
    return KernelResult(
        kernel=candidate,
        calls=len(run.results),
        worst_own=own,
        worst_bound=bound,
        measured=tuple(map(_measured, run.results)),
        findings=tuple(findings),
        missing=(*missing, *filter(None, [not_run])),
        not_run=not_run,
        again=again,
        seconds=seconds,
        pack=hash_pack(examined.pack),
        examined=tuple(record.entry.sha256 for record in examined.chosen),
        recorded=len(examined.recorded),
        with_prefix=with_prefix,
        envelope=dict(envelope),
        outside=tuple(sorted({(result.call.layer, result.call.phase) for result in run.results if result.fails})),
        not_tested=tuple(not_tested),
    )


def _measured(result: CallResult) -> MeasuredCall:
    call, (own, bound) = result.call, result.judged_cell
    condition = {
        "phase": call.phase,
        "layer": str(call.layer),
        "new": " ".join(map(str, call.lens_q)),
        "prefix": " ".join(map(str, call.prefixes)),
        "dtype": dtype_name(call.q.dtype),
    }
    return MeasuredCall(case=describe(call), condition=condition, error=own, bound=bound, wrong=result.fails)


def choose(recorded: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Choose the smallest, median and largest call of each layer and phase, with and without a prefix, and the worst one.

    These are enough to name a bug, and to test the largest errors and errors that begin only in long calls.
    """
    strata: dict[tuple[int, str, bool], list[RecordedCall]] = {}
    for record in sorted(recorded, key=lambda record: (record.call.k.shape[0], record.call.q.shape[0])):
        strata.setdefault((record.call.layer, record.call.phase, has_any_prefix(record.entry.prefix)), []).append(
            record
        )
    chosen = [stratum[at] for stratum in strata.values() for at in sorted({0, len(stratum) // 2, len(stratum) - 1})]
    known = {id(record) for record in chosen}
    return chosen + [record for record in recorded if record.entry.chosen == "worst" and id(record) not in known]


def _output(record: RecordedCall, served: bool) -> Tensor:
    """Return the candidate's output, [total_q, num_q_heads, head_dim_v]."""
    out = record.reference if served else record.candidate
    assert out is not None
    return out


def _on_device(call: AttentionCall) -> AttentionCall:
    """Move the call to the GPU, if there is one."""
    return call.to(default_device())


def _nothing(pack: Path, what: str, candidate: str) -> UsageError:
    return UsageError(
        f"{pack} holds {what}.", f"calls that {candidate} computes", "record a pack with assay run --record"
    )
