"""A run's folder -> its `Report`. Everything is read from the evidence, so a report can be made again at any time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from assay.harness.baselines import Comparison, calls_of, check_baselines, compare_accepted, measured_roles, status_of
from assay.harness.compare.answer_conditions import ConditionRow, by_condition, most_telling
from assay.harness.compare.answers import Flips, Pair, Tally, flips, pair, tally
from assay.harness.compare.text import TextDivergence, compare_text, floor_between
from assay.harness.conditions import CACHED_PREFIX
from assay.harness.config import RunSpec
from assay.harness.engines.arguments import differences
from assay.harness.engines.backend import Backend
from assay.harness.evidence.counters import CallCount
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import Manifest, ServerManifest
from assay.harness.evidence.records import ROLES, Answer, Item, Role
from assay.harness.evidence.shadow_errors import ShadowErrors
from assay.harness.judge import checks as rules
from assay.harness.judge import report
from assay.harness.judge.calls import call_summaries
from assay.harness.judge.latency_suite import servers_of, timed
from assay.harness.judge.layer_suite import inside
from assay.harness.stats.decision import Decision, decide_accuracy, decide_share
from assay.harness.verdict import Check, Finding


def build(folder: RunFolder) -> report.Report:
    """The report of what a run's folder holds, whole or not.

    Raises:
        EvidenceError: the folder is no run's, or is damaged.
    """
    manifest, progress = folder.manifest(), folder.progress()
    spec = RunSpec(**manifest.spec)
    items, answers = folder.items(), folder.answers()
    servers = {server.role: server for server in progress.servers}
    counts: dict[Role, list[CallCount]] = {role: calls_of(folder, role) for role in ROLES}

    questions = pair(items, answers)
    suites = [_mmlu(spec, questions.pairs)] if questions.pairs else []
    lost = bool(suites) and suites[0].verdict == "regression"
    greedy = pair(items, answers, "greedy")
    if greedy.pairs:
        suites.append(_greedy(spec, greedy.pairs, answers))
    looked = inside(folder, spec)
    if looked.suite:
        suites.append(looked.suite)
    if accepted := compare_accepted(folder):
        suites.append(_accepted(spec, accepted))
    latency = timed(folder, spec, [suite.title for suite in suites if suite.verdict == "regression"])
    if latency.suite:
        suites.append(latency.suite)
    if latency.result and not servers:
        servers, counts = servers_of(folder)
    # What is named inside comes first: it is the cause of what the answers show.
    findings = [
        *looked.findings,
        *([_accuracy_finding(spec, manifest, questions.pairs)] if lost else []),
        *(latency.result.findings if latency.result else ()),
    ]

    argument_differences = (
        differences(servers["reference"].arguments, servers["candidate"].arguments) if len(servers) == 2 else {}
    )
    checks = _checks(folder, spec, items, answers, questions.pairs, servers, counts, argument_differences, looked.cells)
    scored = looked.result is not None and bool(looked.result.logits)
    checks += [*rules.check_logits(spec.suites, scored), *rules.check_answers(spec.suites)]
    ran = [*(suite.id for suite in suites), *(["logits"] if scored else [])]
    checks += [
        *latency.checks,
        *rules.check_required(spec.require, ran, spec.policy_line("require")),
    ]
    judgement = rules.judge(
        spec.candidate, [rules.SuiteVerdict(s.id, s.title, s.verdict, s.why) for s in suites], checks, progress.failure
    )
    return report.Report(
        run_id=manifest.run_id,
        created=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        seconds=progress.seconds,
        verdict=judgement.verdict,
        exit_code=judgement.exit_code,
        headline=judgement.headline,
        reasons=judgement.reasons,
        reference=_server(spec.reference, servers.get("reference"), counts["reference"]),
        candidate=_server(
            spec.candidate,
            servers.get("candidate"),
            counts["candidate"],
            instead="in the reference's shadow" if looked.cells else "never ready",
        ),
        environment=report.Environment(
            device=spec.device,
            hardware=manifest.hardware,
            python=manifest.python,
            packages=manifest.packages,
            git=manifest.git,
            model=manifest.model,
            model_hash=manifest.model_hash,
            argument_differences=argument_differences,
        ),
        checks=tuple(checks),
        suites=tuple(suites),
        findings=tuple(findings),
        reproduce=manifest.command,
        layers=looked.result,
        latency=latency.result,
    )


def _checks(
    folder: RunFolder,
    spec: RunSpec,
    items: Sequence[Item],
    answers: Sequence[Answer],
    pairs: Sequence[Pair],
    servers: dict[Role, ServerManifest],
    counts: dict[Role, list[CallCount]],
    argument_differences: dict[str, tuple[str, str]],
    cells: ShadowErrors | None,
) -> list[Check]:
    started = not (Backend.parse(spec.reference).is_url or Backend.parse(spec.candidate).is_url)
    compared = {suite for suite in ("mmlu", "greedy") if suite in spec.suites}
    asked = [(item.suite, role, item.id) for item in items if item.suite in compared for role in ROLES]
    answered = {(answer.suite, answer.role, answer.item) for answer in answers if answer.repeat == 0}
    layers_there = {layer for role in ROLES for count in counts[role] for layer in count.calls_by_layer}
    # As the server said, for a report can be made where the kernel cannot be imported.
    claimed = (
        servers["candidate"].claimed_phases if "candidate" in servers else cells.headers[0].phases if cells else ()
    )
    checks = []
    if compared:
        checks += [
            *rules.check_kernel_ran(servers.get("candidate"), counts["candidate"], counts["reference"]),
            *rules.check_compiled(servers, counts),
            rules.check_same_servers(
                servers, argument_differences, started, stored="reference" not in measured_roles(folder)
            ),
            rules.check_all_asked(len(asked), sum(key in answered for key in asked)),
        ]
    if "mmlu" in compared or not cells:
        checks.append(rules.check_cached_prefix([p.candidate for p in pairs]))
    else:
        checks.append(rules.check_cached_prefix_inside(cells))
    checks.append(rules.check_layers(spec.suites, cells, claimed, layers_there))
    if (status := status_of(folder)) is not None:
        checks += check_baselines(spec, status)
    return [*checks, *rules.NOT_CHECKED]


def _held(spec: RunSpec, *lines: str) -> str:
    """The lines of policy that a suite was held against, as a sentence; empty for none."""
    return f"Held against {' and '.join(map(spec.policy_line, lines))}." if lines else ""


def _accepted(spec: RunSpec, accepted: Comparison) -> report.SuiteResult:
    compared = {"margin": accepted.decision, "growth": accepted.growth}
    lines = [name for name, number in compared.items() if number is not None]
    metrics = []
    if accepted.decision is not None:
        d = accepted.decision
        metrics.append(
            report.Metric(
                name="loss of accuracy since it was accepted",
                value=100 * d.loss,
                text=f"{100 * d.loss:.1f} points",
                low=100 * d.interval.low,
                high=100 * d.interval.high,
                bound=100 * spec.margin,
                bound_is="most",
                explain=f"accepted minus now, {d.interval.level:.0%} Tango score interval",
                policy=spec.policy_line("margin"),
            )
        )
    if accepted.growth is not None:
        metrics.append(
            report.Metric(
                name="growth of own error",
                value=accepted.growth,
                text=f"{accepted.growth:.2g} times",
                bound=spec.growth,
                bound_is="most",
                explain="largest over layers and conditions",
                policy=spec.policy_line("growth"),
            )
        )
    return report.SuiteResult(
        id=rules.BASELINE,
        title="Accepted baseline",
        synthetic=spec.synthetic,
        verdict=accepted.verdict,
        why=" ".join([accepted.why, _held(spec, *lines)]),
        metrics=tuple(metrics),
    )


def _server(
    backend: str, server: ServerManifest | None, counts: Sequence[CallCount], instead: str = "never ready"
) -> report.ServerSummary:
    if server is None:
        return report.ServerSummary(backend=backend, engine=instead, claimed_phases=(), calls=())
    return report.ServerSummary(
        backend=server.backend,
        engine=server.engine,
        claimed_phases=server.claimed_phases,
        calls=call_summaries(counts),
        startup_s=server.startup_s,
        launch_command=server.launch_command,
    )


def _mmlu(spec: RunSpec, pairs: Sequence[Pair]) -> report.SuiteResult:
    flipped = flips(pairs)
    decision = decide_accuracy(
        n=len(pairs),
        both_right=flipped.both_right,
        lost=len(flipped.lost),
        gained=len(flipped.gained),
        both_wrong=flipped.both_wrong,
        margin=spec.margin,
        alpha=spec.alpha,
    )
    tallies = (tally(pairs, "reference"), tally(pairs, "candidate"))
    kind = "Synthetic multiple-choice questions" if spec.synthetic else f"Multiple-choice questions of {spec.data}"
    return report.SuiteResult(
        id="mmlu",
        title=kind,
        synthetic=spec.synthetic,
        verdict=decision.verdict,
        why=f"{decision.why} {_held(spec, 'margin')}",
        metrics=_accuracy_metrics(spec, decision, tallies, flipped),
        tallies=tuple(report.Tally(**vars(t)) for t in tallies),
        conditions=tuple(_condition(row) for row in by_condition(pairs)),
        flips=tuple(_flip(p, "lost" if p.right("reference") else "gained") for p in (*flipped.lost, *flipped.gained)),
    )


def _accuracy_metrics(
    spec: RunSpec, decision: Decision, tallies: tuple[Tally, Tally], flipped: Flips
) -> tuple[report.Metric, ...]:
    n = decision.n
    accuracies = [
        report.Metric(
            name=f"{t.role} accuracy", value=t.right / n, text=f"{t.right / n:.3f}", explain=f"{t.right} of {n}"
        )
        for t in tallies
    ]
    least = decision.smallest_detectable
    return (
        *accuracies,
        report.Metric(
            name="loss of accuracy",
            value=100 * decision.loss,
            text=f"{100 * decision.loss:.1f} points",
            low=100 * decision.interval.low,
            high=100 * decision.interval.high,
            bound=100 * spec.margin,
            bound_is="most",
            policy=spec.policy_line("margin"),
            explain=f"reference minus candidate, {decision.interval.level:.0%} Tango score interval, against the margin",
        ),
        report.Metric(
            name="flips",
            value=len(flipped.lost) + len(flipped.gained),
            text=f"{len(flipped.lost)} lost, {len(flipped.gained)} gained",
            explain=f"exact McNemar p = {decision.p_two_sided:.2g}",
        ),
        report.Metric(
            name="smallest detectable loss",
            value=None if least is None else 100 * least,
            text="none" if least is None else f"{100 * least:.1f} points",
            explain=f"what {n} questions would have shown with a power of 0.8",
        ),
    )


def _condition(row: ConditionRow) -> report.ConditionRow:
    return report.ConditionRow(
        by=row.title,
        bucket=row.bucket,
        items=row.n,
        reference_right=row.reference_right,
        candidate_right=row.candidate_right,
        candidate_unparsed=row.candidate_unparsed,
    )


def _flip(p: Pair, direction: str) -> report.Flip:
    return report.Flip(
        item=p.item.id,
        group=p.item.group,
        direction="lost" if direction == "lost" else "gained",
        prompt=p.item.prompt,
        expected=p.item.expected or "",
        reference_text=p.reference.text,
        candidate_text=p.candidate.text,
        reference_parsed=p.reference.parsed,
        candidate_parsed=p.candidate.parsed,
        candidate_cached_tokens=p.candidate.cached_tokens,
    )


def _accuracy_finding(spec: RunSpec, manifest: Manifest, pairs: Sequence[Pair]) -> Finding:
    rows = by_condition(pairs)
    telling = most_telling(rows)
    unparsed = tally(pairs, "candidate").unparsed
    lost = flips(pairs).lost
    evidence = [f"{len(lost)} questions lost, such as {', '.join(p.item.id for p in lost[:3])}"]
    if unparsed:
        evidence.append(f"{unparsed} of {len(pairs)} answers of the candidate could not be parsed")
    if telling is None:
        where, diagnosis = "under every condition that was seen", "No condition separates right from wrong answers."
    else:
        where = f"{telling.title} {', '.join(row.bucket for row in telling.broken)}"
        diagnosis = f"Split {telling.summary}."
        if telling.by == CACHED_PREFIX.id:
            diagnosis += (
                " The kernel is right until a prefix is cached: look at how its causal mask is aligned when there are more keys"
                " than queries (query i must see keys j <= i + len_k - len_q)."
            )
    return Finding(
        id="accuracy",
        title="loss of accuracy",
        severity="serious",
        where=where,
        diagnosis=diagnosis,
        evidence=tuple(evidence),
        reproduce=manifest.command,
    )


def _greedy(spec: RunSpec, pairs: Sequence[Pair], answers: Sequence[Answer]) -> report.SuiteResult:
    again = {a.item: a for a in answers if a.suite == "greedy" and a.role == "reference" and a.repeat > 0}
    floors = [floor_between(p.reference.tokens, again[p.item.id].tokens) for p in pairs if p.item.id in again]
    floor = max(floors, default=0.0)
    parted = [(p, d) for p in pairs if (d := compare_text(p.reference.tokens, p.candidate.tokens, floor))]
    kinds = [d.kind for _, d in parted]
    decision = decide_share(
        kinds.count("apart"), len(pairs), spec.greedy_margin, spec.alpha, items="greedy prompts apart"
    )
    first = min((d.position for _, d in parted), default=None)
    return report.SuiteResult(
        id="greedy",
        title="Greedy texts",
        synthetic=spec.synthetic,
        verdict=decision.verdict,
        why=f"Texts that come apart: {decision.why} {_held(spec, 'greedy_margin')}",
        metrics=(
            report.Metric(
                name="texts apart",
                value=100 * decision.share,
                text=f"{100 * decision.share:.1f} %",
                low=100 * decision.interval.low,
                high=100 * decision.interval.high,
                bound=100 * spec.greedy_margin,
                bound_is="most",
                policy=spec.policy_line("greedy_margin"),
                explain=f"{kinds.count('apart')} of {len(pairs)} prompts: a role's token is not among the other's best five",
            ),
            report.Metric(
                name="texts equal",
                value=float(len(pairs) - len(parted)),
                text=f"{len(pairs) - len(parted)} of {len(pairs)}",
                explain=f"{kinds.count('tie')} parted at a tie, {kinds.count('close')} among near-equal tokens"
                + ("" if first is None else f"; the first at token {first}"),
            ),
            report.Metric(
                name="reference's own floor",
                value=floor if floors else None,
                text=f"{floor:.2g} nats" if floors else "not measured",
                explain=f"largest log-probability change of the reference asked twice, over {len(floors)} prompts",
            ),
        ),
        divergences=tuple(_divergence(p, d) for p, d in parted),
    )


def _divergence(p: Pair, divergence: TextDivergence) -> report.DivergenceRow:
    return report.DivergenceRow(
        item=p.item.id,
        kind=divergence.kind,
        position=divergence.position,
        gap=divergence.gap.nats,
        prompt=p.item.prompt,
        reference_text=p.reference.text,
        candidate_text=p.candidate.text,
        candidate_cached_tokens=p.candidate.cached_tokens,
    )
