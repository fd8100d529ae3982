"""A run's folder -> its `Report`. Everything is read from the evidence, so a report can be rebuilt at any time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from assay.harness.config import recorded_spec
from assay.harness.evidence.folder import RunFolder
from assay.harness.judge import (
    accuracy_suite,
    engine_warnings,
    envelope,
    executed_kernels,
    greedy_suite,
    latency,
    logits_suite,
    own_error,
    same_servers,
    sensitivity,
)
from assay.harness.judge.call_counts import call_summaries
from assay.harness.judge.decide import decide, holm_corrected
from assay.harness.judge.evidence import Judged, RunEvidence
from assay.harness.judge.judgement import WHOLE
from assay.harness.judge.latency_result import LatencyResult
from assay.harness.judge.report import Environment, Report, ServerSummary, SuiteResult
from assay.harness.policy import Policy
from assay.harness.reading import reading
from assay.harness.sides import Role
from assay.harness.statement import state
from assay.harness.verdict import Check, Requirement

CLAIMS: tuple[Callable[[RunEvidence], Judged], ...] = (
    executed_kernels.claim,
    same_servers.claim,
    accuracy_suite.claim,
    greedy_suite.claim,
    own_error.claim,
    sensitivity.claim,
    envelope.claim,
    logits_suite.claim,
    own_error.matrix_claim,
    engine_warnings.claim,
)
"""The claims about a run, in the order in which a report lists its checks. Latency and policy come after them and depend on
their results."""
# The order in which a report lists its suites.
_SUITES = ("accuracy", "greedy", "logits", "layers", "matrix", "latency")


def build(folder: RunFolder) -> Report:
    """Build the report of a run's folder, complete or not."""
    with reading(folder.path, "folder of a run"):
        return _build(folder)


def _build(folder: RunFolder) -> Report:
    manifest, progress = folder.manifest(), folder.progress()
    folder.check_sealed()
    spec = recorded_spec(manifest.spec)
    times = latency.timed(folder) if "latency" in spec.workload.suites else ""
    run = RunEvidence.of(folder, timed=not isinstance(times, str))
    judged = _judged(run, times)
    # Before `decide`: a regression must hold up among all suites of the run.
    suites = holm_corrected(_suites(judged), spec.policy.alpha)
    checks = list(chain.from_iterable(part.checks for part in judged))
    if progress.failure:
        # Unmet checks say nothing: they would have been met later, and their advice does not apply now.
        checks = [check for check in checks if check.status == "ok"]
    causes = list(chain.from_iterable(part.causes for part in judged))
    parts: dict[str, Any] = dict(chain.from_iterable(part.parts.items() for part in judged))
    # The condition in which answers were lost is named only if Holm's correction upheld the loss.
    stands = any(
        (suite.id, suite.verdict, suite.decided_by) == ("accuracy", "regression", accuracy_suite.LOSS)
        for suite in suites
    )
    lost = [accuracy_suite.accuracy_finding(run.read, manifest.command)] if stands else []
    return Report(
        verdict=decide((suite.verdict for suite in suites), checks, progress.failure),
        run_id=manifest.run_id,
        created=manifest.created,
        seconds=progress.seconds,
        reference=_server(run, "reference", "never ready"),
        candidate=_server(run, "candidate", "never ready" if run.errors is None else "as a shadow of the reference"),
        environment=Environment(
            device=spec.device,
            hardware=manifest.hardware,
            python=manifest.python,
            packages=manifest.packages,
            git=manifest.git,
            model=manifest.model,
            model_hash=manifest.model_hash,
            argument_differences=run.argument_differences,
            derived_arguments=run.derived_arguments,
        ),
        checks=tuple(checks),
        suites=tuple(suites),
        findings=(*causes, *lost, *chain.from_iterable(part.findings for part in judged)),
        causes=len(causes),
        left_out=tuple(suite for suite in WHOLE if suite not in spec.workload.suites),
        reproduce=manifest.command,
        treatment=spec.treatment,
        kernels=executed_kernels.listed_passes(run.kernels),
        failure=progress.failure,
        **parts,
    )


def _judged(run: RunEvidence, times: LatencyResult | str) -> list[Judged]:
    """Judge every claim."""
    judged = [claim(run) for claim in CLAIMS]
    # Last, since they depend on the others: times of a wrong computation prove nothing, and a policy may require suites.
    wrong = [suite for suite in _suites(judged) if suite.verdict == "regression"]
    judged.append(latency.claim(times, wrong))
    judged.append(policy_claim(run, [suite.id for suite in _suites(judged)]))
    return judged


def _suites(judged: Sequence[Judged]) -> list[SuiteResult]:
    """List the suites in their order."""
    suites = [part.suite for part in judged if part.suite is not None]
    return sorted(suites, key=lambda suite: _SUITES.index(suite.id))


def _server(run: RunEvidence, role: Role, instead: str) -> ServerSummary:
    """Summarise a role's server; without a server, `instead` names the source of its answers."""
    server = run.servers.get(role)
    if server is None:
        return ServerSummary(backend=run.spec.sides[role].backend, engine=instead, claimed_phases=(), calls=())
    return ServerSummary(
        backend=server.backend,
        engine=server.engine,
        claimed_phases=server.claimed_phases,
        calls=call_summaries(run.counts[role]),
        startup_s=server.startup_s,
        launch_command=server.launch_command,
    )


def policy_claim(run: RunEvidence, ran: Sequence[str]) -> Judged:
    """Check that the required suites ran, and with which policy."""
    return Judged(checks=[*_check_required(run.spec.policy, ran), _check_policy(run)])


def _check_policy(run: RunEvidence) -> Check:
    """Check that the policy is as strict as the default. The user may choose a weaker one, but never silently."""
    noise = run.manifest.noise.get("candidate", "")
    declared = noise if noise not in run.spec.policy.bounds else ""
    weaker = bool(run.spec.weakened or declared)
    outcome = state("policy-weakened", lines=run.spec.weakened, declared=declared) if weaker else state("policy-strict")
    return Requirement("policy").check("not checked" if weaker else "ok", outcome)


def _check_required(policy: Policy, ran: Sequence[str]) -> list[Check]:
    """Check that the suites that the policy requires ran."""
    line = policy.line("require")
    return [
        Requirement("required")
        .of(suite)
        .met(suite in ran, state("suite-required", suite=suite, ran=suite in ran, line=line))
        for suite in policy.require
    ]
