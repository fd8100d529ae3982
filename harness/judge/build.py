"""A run's folder -> its `Report`. Everything is read from the evidence, so a report can be rebuilt at any time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from assay.harness.backend import Backend
from assay.harness.baselines import counts_of, measured_roles, status_of
from assay.harness.compare.answers import Pair, Pairing, pair
from assay.harness.config import RunSpec, recorded_spec
from assay.harness.engines.sglang.arguments import differences
from assay.harness.evidence.certificate import installed_version, source_hash
from assay.harness.evidence.common_settings import COMMON_SETTINGS
from assay.harness.evidence.counters import CallCount
from assay.harness.evidence.envelope import EnvelopeCounts, envelope_of
from assay.harness.evidence.executed import KERNEL_TRACES, KernelTrace
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import Failure, ServerManifest
from assay.harness.evidence.op_matrix import MATRIX, MatrixRecord
from assay.harness.evidence.records import Answer, Item, Suite
from assay.harness.judge import checks as rules
from assay.harness.judge.accepted import baseline_suite, check_baselines
from assay.harness.judge.binding import Served, check_parsed, check_reconciled, parsed_from_text
from assay.harness.judge.call_counts import call_summaries
from assay.harness.judge.certified import RunEnvelope, check_certificate
from assay.harness.judge.decide import WHOLE, decide, holm_corrected
from assay.harness.judge.envelope import check_envelope, check_served, envelope_result
from assay.harness.judge.executed_kernels import check_kernels_executed, listed_passes
from assay.harness.judge.forced_settings import with_common_settings
from assay.harness.judge.greedy_suite import erratic_reference, greedy_suite
from assay.harness.judge.headline import scope_of, shown_by
from assay.harness.judge.history import check_repeated, compared
from assay.harness.judge.latency_suite import LatencySuite, disbelieve, latency_suite, servers_of
from assay.harness.judge.logits_suite import logits_suite
from assay.harness.judge.mmlu_suite import (
    Questions,
    accuracy_finding,
    accuracy_suite,
    check_question_plan,
    read_questions,
)
from assay.harness.judge.op_matrix import check_matrix, matrix_suite
from assay.harness.judge.own_error import LayerDiff, layer_diff
from assay.harness.judge.report import Environment, FailureResult, Report, ServerSummary, SuiteResult
from assay.harness.judge.sensitivity import FaultEvidence, check_sensitive, read_fault_evidence, sensitivity_result
from assay.harness.judge.sensitivity_result import SensitivityResult
from assay.harness.judge.served import ServedEnvelope, envelope_pairs, served_envelope
from assay.harness.reading import reading
from assay.harness.sides import ROLES, Role, differing
from assay.harness.text import listed
from assay.harness.verdict import Check, Finding, cause_of

_ANSWERED: tuple[Suite, ...] = ("mmlu", "greedy")
"""Suites that compare both servers' answers."""


@dataclass(frozen=True)
class _Evidence:
    """The contents of a run's folder, read once.

    Attributes:
        pairings: pairs of answers to multiple-choice questions and of greedy texts, by suite.
        accuracy: the multiple-choice questions, and what the test of accuracy reads.
        servers: by role; empty for a role whose server never started.
        counts: attention calls by role.
        argument_differences: server arguments that differ beyond the backend.
        layers: the layer diff; None without one.
        envelope: the conditions of the calls that the layer diff compared; None without one.
        over_envelope: both roles' answers to the requests of the envelope.
        faults: what the servers did while a fault was seeded in them.
        matrix: the candidate's kernel on the op-level matrix; None where it was not run.
        noise: noise families that the roles declare.
        kernels: what each role's processes saw in the passes that they traced.
    """

    folder: RunFolder
    spec: RunSpec
    items: Sequence[Item]
    answers: Sequence[Answer]
    pairings: Mapping[Suite, Pairing]
    accuracy: Questions
    servers: Mapping[Role, ServerManifest]
    counts: Mapping[Role, Sequence[CallCount]]
    argument_differences: dict[str, tuple[str, str]]
    layers: LayerDiff | None
    envelope: EnvelopeCounts | None
    faults: FaultEvidence
    matrix: MatrixRecord | None
    over_envelope: Sequence[Pair]

    @cached_property
    def sensitivity(self) -> SensitivityResult | None:
        """The effect on each suite of the fault that was seeded; None where none was."""
        return sensitivity_result(self.folder, self.spec, self.faults, _claimed(self), self.noise)

    @cached_property
    def served(self) -> ServedEnvelope | None:
        """The candidate's own server's answers of the envelope; None where no such answer is compared."""
        if self.envelope is None or self.envelope.limits is None or not self.over_envelope:
            return None
        admissions = self.folder.admissions("candidate")
        return served_envelope(self.envelope.limits, self.over_envelope, admissions, self.counts["candidate"])

    noise: Sequence[str]
    kernels: Mapping[Role, Sequence[KernelTrace]]

    @property
    def questions(self) -> Sequence[Pair]:
        """Pairs of answers to multiple-choice questions."""
        return self.pairings["mmlu"].pairs


def build(folder: RunFolder) -> Report:
    """Build the report of a run's folder, complete or not.

    Raises:
        EvidenceError: the folder is no run's, or is damaged, or was changed after the run had ended.
    """
    with reading(folder.path, "folder of a run"):
        return _build(folder)


def _build(folder: RunFolder) -> Report:
    manifest, progress = folder.manifest(), folder.progress()
    folder.check_sealed()
    spec = recorded_spec(manifest.spec)
    latency = latency_suite(folder, spec)
    evidence = _read(folder, spec, timed=latency.result is not None)
    suites = _suites(evidence)
    latency = disbelieve(latency, spec, [suite for suite in suites if suite.verdict == "regression"])
    suites += [latency.suite] if latency.suite else []
    suites = holm_corrected(suites, spec.policy.alpha)
    # What a run that ended early has not met says nothing: it would have met it later, and its advice is not what to do now.
    checks = [one for one in _checks(evidence, suites, latency) if not progress.failure or one.status == "ok"]
    left_out = [suite for suite in WHOLE if suite not in spec.workload.suites]
    envelope = envelope_result(spec, evidence.envelope, _claimed(evidence), evidence.served)
    covers = envelope.sentence if envelope else ""
    judgement = decide(
        differing(spec.treatment) or spec.candidate.backend,
        suites,
        checks,
        progress.failure,
        left_out=left_out,
        covers=covers,
        scope=scope_of(
            manifest.model, len(evidence.accuracy.prefix.pairs), spec.workload.synthetic, envelope, _claimed(evidence)
        ),
        cause=cause_of(_causes(evidence)),
        shown=shown_by(suites),
    )
    servers, counts, layers = evidence.servers, evidence.counts, evidence.layers
    return Report(
        verdict=judgement.verdict,
        headline=judgement.headline,
        reasons=judgement.reasons,
        run_id=manifest.run_id,
        created=manifest.created,
        seconds=progress.seconds,
        reference=_server(spec.reference.backend, servers.get("reference"), counts["reference"]),
        candidate=_server(
            spec.candidate.backend,
            servers.get("candidate"),
            counts["candidate"],
            instead="as a shadow of the reference" if layers else "never ready",
        ),
        environment=Environment(
            device=spec.device,
            hardware=manifest.hardware,
            python=manifest.python,
            packages=manifest.packages,
            git=manifest.git,
            model=manifest.model,
            model_hash=manifest.model_hash,
            argument_differences=evidence.argument_differences,
        ),
        checks=tuple(checks),
        suites=tuple(suites),
        findings=tuple(_findings(evidence, suites, latency, manifest.command)),
        reproduce=manifest.command,
        treatment=spec.treatment,
        layers=layers.result if layers else None,
        envelope=envelope,
        sensitivity=evidence.sensitivity,
        latency=latency.result,
        kernels=listed_passes(evidence.kernels),
        failure=_failure(progress.failure),
    )


def _failure(failure: Failure | None) -> FailureResult | None:
    if failure is None:
        return None
    return FailureResult(
        kind=failure.kind, cause=failure.cause, found=failure.found, do=failure.do, details=failure.details
    )


def _read(folder: RunFolder, spec: RunSpec, timed: bool) -> _Evidence:
    """Read a run's folder; in a run of latency alone the servers are those that were timed."""
    items = folder.items()
    answers = parsed_from_text(folder.answers(), items)
    servers: dict[Role, ServerManifest] = {server.role: server for server in folder.progress().servers}
    counts: dict[Role, list[CallCount]] = {role: counts_of(folder, role) for role in ROLES}
    if timed and not servers:
        servers, counts = servers_of(folder)
    pairings = {suite: pair(items, answers, suite) for suite in _ANSWERED}
    return _Evidence(
        folder=folder,
        spec=spec,
        items=items,
        answers=answers,
        pairings=pairings,
        accuracy=read_questions(folder, spec, items, pairings["mmlu"], answers),
        servers=servers,
        counts=counts,
        argument_differences=differences(servers["reference"].arguments, servers["candidate"].arguments, spec.treatment)
        if len(servers) == 2
        else {},
        layers=layer_diff(folder, spec),
        envelope=envelope_of(folder),
        faults=read_fault_evidence(folder, items, answers),
        matrix=folder.read(MATRIX),
        over_envelope=envelope_pairs(answers),
        noise=list(folder.manifest().noise.values()),
        kernels={
            role: list(KERNEL_TRACES.read_each(folder.server_folder(role), folder.nonce).values()) for role in ROLES
        },
    )


def _suites(evidence: _Evidence) -> list[SuiteResult]:
    """Judge the suites that ran, except latency, which depends on their verdicts."""
    spec, status = evidence.spec, status_of(evidence.folder)
    suites = [accuracy_suite(spec, evidence.accuracy)] if evidence.questions else []
    if texts := evidence.pairings["greedy"].pairs:
        suites.append(greedy_suite(spec, texts, evidence.answers, evidence.noise, evidence.over_envelope))
    if (logits := logits_suite(evidence.folder, spec, evidence.noise)) is not None:
        suites.append(logits)
    if evidence.layers:
        suites.append(evidence.layers.suite)
    if (matrix := matrix_suite(evidence.matrix)) is not None:
        suites.append(matrix)
    non_inferior = any(suite.id == "mmlu" and suite.verdict == "pass" for suite in suites)
    if status is not None and (accepted := baseline_suite(evidence.folder, spec, status, non_inferior)):
        suites.append(accepted)
    return suites


def _checks(evidence: _Evidence, suites: Sequence[SuiteResult], latency: LatencySuite) -> list[Check]:
    spec, layers = evidence.spec, evidence.layers
    answered = [suite for suite in _ANSWERED if suite in spec.workload.suites]
    served = answered or ("logits" in spec.workload.suites and layers is None)
    checks = _answer_checks(evidence, answered) if served else []
    if "mmlu" in answered or layers is None:
        checks.append(rules.check_cached_prefix([question.candidate for question in evidence.questions]))
    else:
        checks.append(rules.check_cached_prefix_of_layers(layers.errors))
    folder, manifest = evidence.folder, evidence.folder.manifest()
    called = {layer for role in ROLES for count in evidence.counts[role] for layer in count.calls_by_layer}
    errors = layers.errors if layers else None
    checks.append(rules.check_layers(spec.workload.suites, errors, _claimed(evidence), called, has_url=_has_url(spec)))
    if (status := status_of(evidence.folder)) is not None:
        checks += check_baselines(spec, status)
    ran = [suite.id for suite in suites]
    return [
        *checks,
        check_sensitive(spec, evidence.sensitivity, evidence.faults.records, _has_url(spec)),
        check_envelope(spec, evidence.envelope, _claimed(evidence)),
        check_served(spec, evidence.envelope, evidence.served, _claimed(evidence)),
        check_certificate(spec, _ran(evidence)),
        *rules.check_logits(spec.workload.suites, "logits" in ran),
        *check_matrix(spec, evidence.matrix, "candidate" in evidence.folder.manifest().code),
        *rules.check_accuracy_tested(spec.workload.suites),
        *latency.checks,
        *_check_required(spec, ran, gate=status is not None),
        *check_repeated(
            folder.path, compared(spec.device, spec.reference.backend, manifest.model, spec.treatment), manifest.created
        ),
        rules.check_policy(
            (*spec.weakened, *rules.only_declared(spec.policy.bounds, evidence.folder.manifest().noise))
        ),
    ]


def _ran(evidence: _Evidence) -> RunEnvelope:
    """Return where the run was made, as far as a certificate depends on it."""
    manifest, layers = evidence.folder.manifest(), evidence.layers
    return RunEnvelope(
        engines=frozenset(server.engine.partition(" on ")[0] for server in evidence.servers.values()),
        hardware=manifest.hardware,
        model_hash=manifest.model_hash,
        dtype=layers.errors.headers[0].dtype if layers else "",
        noise=manifest.noise.get("candidate", ""),
        phases=tuple(_claimed(evidence)),
        version=installed_version(),
        source=source_hash(),
    )


def _check_required(spec: RunSpec, ran: Sequence[str], gate: bool) -> list[Check]:
    """Check that the suites that the policy requires ran: in a gate whose policy names none, every suite of a whole run."""
    if gate and "require" not in spec.policy.given_by:
        return rules.check_required(WHOLE, ran, f"a gate requires {listed(WHOLE)} (default)")
    return rules.check_required(spec.policy.require, ran, spec.policy.line("require"))


def _answer_checks(evidence: _Evidence, compared: Sequence[Suite]) -> list[Check]:
    """List the checks of a run that compares two servers: their answers, or the logits alone."""
    servers, counts = evidence.servers, evidence.counts
    measured = measured_roles(evidence.folder)
    stored = "reference" not in measured
    served = [
        Served.read(evidence.folder, role, evidence.answers, evidence.spec.workload.concurrency) for role in measured
    ]
    needed = evidence.accuracy.needed | {i.id for i in evidence.items if i.suite != "mmlu"}
    asked = [
        (i.suite, role, i.id, i.prompt_hash)
        for i in evidence.items
        if i.suite in compared and i.id in needed and i.id not in evidence.pairings[i.suite].repeated
        for role in ROLES
    ]
    answered = {(a.suite, a.role, a.item, a.prompt_hash) for a in evidence.answers if a.repeat == 0}
    mismatched = [item for suite in compared for item in evidence.pairings[suite].mismatched]
    return [
        *rules.check_kernel_ran(servers.get("candidate"), counts["candidate"], counts["reference"]),
        *check_kernels_executed(servers.get("candidate"), evidence.kernels, stored),
        *rules.check_compiled(servers, counts),
        with_common_settings(
            rules.check_same_servers(evidence.spec, servers, evidence.argument_differences, stored),
            evidence.folder.read(COMMON_SETTINGS),
        ),
        check_reconciled(served, servers),
        *check_parsed(evidence.folder.answers(), evidence.answers),
        *([check_question_plan(evidence.spec, evidence.accuracy)] if "mmlu" in compared else []),
        *(
            [rules.check_all_answered(len(asked), sum(key in answered for key in asked), mismatched)]
            if compared
            else []
        ),
    ]


def _has_url(spec: RunSpec) -> bool:
    return any(Backend.parse(name).is_url for name in (spec.reference.backend, spec.candidate.backend))


def _claimed(evidence: _Evidence) -> Sequence[str]:
    """Return the phases that the candidate claims, as its server reported: its kernel need not be importable here."""
    if candidate := evidence.servers.get("candidate"):
        return candidate.claimed_phases
    return evidence.layers.errors.headers[0].phases if evidence.layers else ()


def _findings(
    evidence: _Evidence, suites: Sequence[SuiteResult], latency: LatencySuite, reproduce: str
) -> list[Finding]:
    """List the cause that the layer diff names, then what the answers show, then the times."""
    lost = any(suite.id == "mmlu" and suite.verdict == "regression" for suite in suites)
    erratic = erratic_reference(evidence.pairings["greedy"].pairs, evidence.answers, evidence.noise, reproduce)
    return [
        *_causes(evidence),
        *([accuracy_finding(evidence.accuracy.prefix.pairs, reproduce)] if lost else []),
        *filter(None, [erratic]),
        *(latency.result.findings if latency.result else ()),
    ]


def _causes(evidence: _Evidence) -> list[Finding]:
    """List what the layer diff and the op-level matrix found wrong with the kernel."""
    found = evidence.layers.findings if evidence.layers else ()
    return [*found, *(evidence.matrix.findings if evidence.matrix else ())]


def _server(
    backend: str, server: ServerManifest | None, counts: Sequence[CallCount], instead: str = "never ready"
) -> ServerSummary:
    if server is None:
        return ServerSummary(backend=backend, engine=instead, claimed_phases=(), calls=())
    return ServerSummary(
        backend=server.backend,
        engine=server.engine,
        claimed_phases=server.claimed_phases,
        calls=call_summaries(counts),
        startup_s=server.startup_s,
        launch_command=server.launch_command,
    )
