"""The coverage of a pass: the counted conditions of the compared calls, against those that the policy requires."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from assay.harness.conditions import ENVELOPE, ENVELOPE_OF, PHASES, Buckets
from assay.harness.engines import registry
from assay.harness.evidence.counters import Admission
from assay.harness.evidence.envelope import EngineLimits, Envelope, EnvelopeCounts, Missing, Ranges, stood_for
from assay.harness.evidence.envelope_counting import EnvelopeCounting
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.evidence.shadow_errors import ShadowHeader
from assay.harness.judge.answers import Pair
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.greedy_texts import first_divergence
from assay.harness.judge.report import EnvelopeResult, EnvelopeRow
from assay.harness.statement import Statement, state
from assay.harness.verdict import Check, Requirement


def claim(run: RunEvidence) -> Judged:
    """Check that all required conditions were compared, in the shadow and as served, and describe the coverage."""
    policy = run.spec.policy
    envelope, line = Envelope.of(policy.envelope_tokens, run.spec.device), policy.line("envelope_tokens")
    served = served_counts(run.folder, run.envelope, run.servers.get("candidate"), run.over_envelope)
    result = _result(run, served, envelope, line)
    checks = [_check_covered(run, envelope, line), _check_served(run, served, envelope, line)]
    return Judged(checks=checks, parts={"envelope": result} if result else {})


def _result(run: RunEvidence, served: EnvelopeCounts | None, envelope: Envelope, line: str) -> EnvelopeResult | None:
    """Determine the coverage of a verdict, or return None if calls were not compared."""
    counts = run.envelope
    if counts is None or counts.limits is None or not counts.calls:
        return None
    phases = [phase for phase in PHASES if phase in run.claimed]
    headers = run.errors.headers if run.errors is not None else ()
    unfelt = _unfelt(headers, phases)
    in_graphs = any(count.captured and count.phase == "decode" and count.calls for count in run.counts["candidate"])
    return EnvelopeResult(
        policy=line,
        claimed=tuple(phases),
        features=tuple(sorted({name for header in headers for name in header.features} - set(unfelt))),
        unfelt=unfelt,
        operations=_operations(run),
        limits=counts.limits,
        compared={phase: _met(counts, phase) for phase in phases},
        served={phase: _met(served, phase) for phase in phases} if served else {},
        served_in_graphs=in_graphs,
        not_in_shadow=tuple(name for name in run.spec.treatment if name != "backend" and "reference" in run.measured),
        reached=_reached(envelope, counts, counts.limits, phases),
        served_reached=_reached(envelope, served, served.limits, phases) if served and served.limits else {},
        gaps=tuple(map(_lacking, envelope.gaps(counts, phases))),
        rows=tuple(_rows(envelope.kinds(counts.limits), counts, phases)),
    )


def _operations(run: RunEvidence) -> tuple[str, ...]:
    """List the operations of layers in the servers' fingerprints."""
    resolved = (each for told in run.fingerprints.values() for each in told.backends or ())
    return tuple(sorted({each.operation for each in resolved if each.layers}))


def _unfelt(headers: Sequence[ShadowHeader], phases: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return, by feature, the phases in which some layer asked for it but it changed none of the layer's queries in any process."""
    effects = {effect for header in headers for effect in header.effects}
    lacking = {
        (feature, phase)
        for layer, phase, feature, felt in effects
        if not felt and (layer, phase, feature, True) not in effects
    }
    return {
        name: tuple(phase for phase in phases if (name, phase) in lacking)
        for name in sorted({feature for feature, phase in lacking if phase in phases})
    }


def _rows(
    kinds: Mapping[str, Mapping[str, Collection[str]]], counts: EnvelopeCounts, phases: Sequence[str]
) -> Iterator[EnvelopeRow]:
    """List the conditions that were compared or are required, of the given `kinds`."""
    for phase in phases:
        for quantity in ENVELOPE_OF[phase]:
            for label in ENVELOPE[quantity].labels:
                calls, wanted = counts.count(phase, quantity, label), label in kinds[phase].get(quantity, ())
                if calls or wanted:
                    yield EnvelopeRow(
                        phase=phase,
                        condition=quantity,
                        title=ENVELOPE[quantity].title,
                        label=label,
                        calls=calls,
                        wanted=wanted,
                    )


def _reached(
    envelope: Envelope, counts: EnvelopeCounts, limits: EngineLimits, phases: Sequence[str]
) -> dict[str, dict[str, int]]:
    reached: dict[str, dict[str, int]] = {}
    for phase in phases:
        # Up to the first gap: a length beyond a gap says nothing about those in it.
        lengths = {
            quantity: next((last for first, last in ranges if first <= points[0] <= last), 0)
            for quantity, points in envelope.reach(limits).lengths[phase].items()
            for ranges in (stood_for(counts.values(phase, quantity), points, limits.step(quantity)),)
        }
        others = [quantity for quantity in ("batch", "depth") if quantity in ENVELOPE_OF[phase]]
        reached[phase] = lengths | {other: counts.reached(phase, other) for other in others}
    return reached


def _met(counts: EnvelopeCounts, phase: str) -> dict[str, Ranges]:
    """Return the values of each numeric condition in the calls of every layer, by id of the condition."""
    numbers = (quantity for quantity in ENVELOPE_OF[phase] if isinstance(ENVELOPE[quantity], Buckets))
    return {quantity: counts.values(phase, quantity) for quantity in numbers}


def _check_covered(run: RunEvidence, envelope: Envelope, line: str) -> Check:
    """Check that every layer was compared under every required condition, in each claimed phase."""
    counts, required = run.envelope, Requirement("envelope-covered")
    if "layers" not in run.spec.workload.suites:
        return required.check("not checked", state("envelope-not-requested", line=line))
    if counts is None or counts.limits is None or not run.claimed:
        return required.check("missing", state("envelope-not-counted", line=line, url=bool(run.urls)))
    if missing := envelope.missing(counts, run.claimed):
        return required.check("missing", _state_missing(missing, counts.limits, line))
    layers = [(phase, len(counts.layers(phase))) for phase in run.claimed]
    return required.check("ok", state("envelope-covered", layers=layers, line=line))


def _check_served(run: RunEvidence, served: EnvelopeCounts | None, envelope: Envelope, line: str) -> Check:
    """Check that the candidate's own server answered, and was compared, with every required length."""
    counts, required = run.envelope, Requirement("envelope-served")
    if lacking := [suite for suite in ("layers", "greedy") if suite not in run.spec.workload.suites]:
        return required.check("not checked", state("envelope-not-asked", suites=lacking, line=line))
    if counts is None or served is None or served.limits is None or not run.claimed:
        return required.check("missing", state("envelope-not-answered", line=line, url=bool(run.urls)))
    if missing := envelope.gaps(served, run.claimed):
        parted = sum(_compared_tokens(both) < len(both.candidate.tokens) for both in run.over_envelope)
        return required.check("missing", _state_missing(missing, served.limits, line, parted))
    return required.check("ok", state("envelope-answered", answers=len(run.over_envelope), line=line))


def _state_missing(missing: Sequence[Missing], limits: EngineLimits, line: str, parted: int | None = None) -> Statement:
    """State the missing conditions and their likely cause.

    Args:
        parted: number of served texts that diverge, or None for calls of the shadow.
    """
    only_decode = {phase for phase, _, _ in missing} == {"decode"}
    cause = "" if only_decode or limits.prefix_cache else "no prefix cache"
    if only_decode and parted:
        cause = "texts part"
    return state("envelope-lacking", parted=parted, lacking=list(map(_lacking, missing)), cause=cause, line=line)


def _lacking(missing: Missing) -> Statement:
    phase, condition, lacking = missing
    return state("calls-lacking", phase=phase, condition=condition, lacking=lacking)


# A request passes through all layers, so one represents them all.
_ANY_LAYER = 0


def served_counts(
    folder: RunFolder, counts: EnvelopeCounts | None, candidate: ServerManifest | None, pairs: Sequence[Pair]
) -> EnvelopeCounts | None:
    """Count the lengths that the candidate's own server answered, or return None if such answers are not compared.

    Args:
        counts: the calls that the shadow compared.
        candidate: its server, if known.
        pairs: both roles' answers to the requests at required lengths.

    Raises:
        EvidenceError: a file of the candidate's server is damaged.
    """
    if counts is None or counts.limits is None or not pairs:
        return None
    limits = counts.limits
    if candidate is not None and candidate.arguments:
        own = registry.arguments(candidate.kind).limits_of(candidate.arguments, limits.context_tokens)
        limits = limits.model_copy(
            update={name: getattr(own, name) for name in ("chunk_tokens", "page_tokens", "mixed")}
        )
    return _served_envelope(limits, pairs, folder.admissions("candidate"))


def _served_envelope(limits: EngineLimits, pairs: Sequence[Pair], admissions: Iterable[Admission]) -> EnvelopeCounts:
    """Count the passes of the candidate's own server by condition, as for one layer; the batches of decode are unknown."""
    counting = EnvelopeCounting(limits)
    _count_extend(counting, {both.candidate.request_id for both in pairs}, admissions)
    for both in pairs:
        for step in range(_compared_tokens(both) - 1):
            length = both.candidate.prompt_tokens + step
            counting.count("decode", _ANY_LAYER, counting.decode([length], [both.candidate.request_id]))
    return counting.counts("")


def _count_extend(counting: EnvelopeCounting, compared: Collection[str], admissions: Iterable[Admission]) -> None:
    """Count the prefill batches of the requests whose answers are compared."""
    seen = set()
    for batch in admissions:
        passed = (batch.rids, batch.new, batch.prefix)
        rows = [row for row, rid in enumerate(batch.rids) if rid in compared]
        if not rows or passed in seen:  # processes that share the heads of a layer admit the same batches
            continue
        seen.add(passed)
        new, prefix = ([lengths[row] for row in rows] for lengths in (batch.new, batch.prefix))
        counting.count("extend", _ANY_LAYER, counting.extend(new, prefix, [batch.rids[row] for row in rows]))


def _compared_tokens(both: Pair) -> int:
    """Count the tokens of the candidate's answer with the same history as the reference's, including the first differing one."""
    tokens = both.candidate.tokens
    parting = first_divergence(both.reference.tokens, tokens)
    return len(tokens) if parting is None else min(parting + 1, len(tokens))
