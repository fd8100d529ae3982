"""A bench's evidence -> `LatencyResult`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from assay.evals.loads import Shape
from assay.harness.conditions import MIN_CACHED_SHARE
from assay.harness.config import recorded_spec
from assay.harness.engines import registry
from assay.harness.errors import EvidenceError
from assay.harness.evidence.bench_folder import TIMINGS, BenchFolder, BenchManifest, Timing, bench_folder
from assay.harness.evidence.counters import CallCount
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.judge.blocks import (
    METRICS,
    Block,
    Load,
    SideBySide,
    blocks_of,
    first_warm,
    side_by_side,
    throughput,
)
from assay.harness.judge.call_counts import call_summaries
from assay.harness.judge.decide import decide
from assay.harness.judge.evidence import Judged, sorted_differences
from assay.harness.judge.executed_kernels import check_compiled, check_kernel_ran
from assay.harness.judge.judgement import Metric, measure
from assay.harness.judge.latency_result import LatencyResult, LatencyRow, LoadRow, worst_ratio
from assay.harness.judge.report import SuiteResult
from assay.harness.judge.same_servers import check_same_servers
from assay.harness.policy import Policy
from assay.harness.sides import ROLES, Role
from assay.harness.statement import Statement, state
from assay.harness.stats.ratio import MIN_RATIOS, RatioDecision, decide_ratios
from assay.harness.verdict import Check, Finding, Requirement


def judge_bench(folder: BenchFolder) -> LatencyResult:
    """Read a bench's folder and decide."""
    if not folder.complete:
        raise EvidenceError(f"{folder.path} has no bench that was played to its end.", "its end.json", "time again")
    folder.check_sealed()
    manifest = folder.manifest()
    spec = recorded_spec(manifest.spec)
    blocks = blocks_of(folder.lines(TIMINGS, Timing))
    played = side_by_side(blocks)
    if not any(played.values()):
        raise EvidenceError(f"{folder.path} holds no timings.", "at least one round", "time again with more --seconds")
    first = first_warm(played)
    shapes = {shape.name: shape for shape in manifest.shapes}
    loads = sorted(played, key=lambda load: (list(shapes).index(load[0]), load[1]))
    measured = {load: [rounds for rounds in played[load] if rounds.round >= first] for load in loads}
    rows = _rows(measured, loads, spec.policy)
    load_rows = tuple(
        _load_row(shapes[shape], concurrency, measured[shape, concurrency]) for shape, concurrency in loads
    )
    calls: dict[Role, list[CallCount]] = {role: folder.counters(role) for role in ROLES}
    servers = {server.role: server for server in manifest.servers}
    undeclared, derived = sorted_differences(folder, servers, spec.treatment)
    same = check_same_servers(spec.sides, servers, undeclared, folder.fingerprints(), derived=derived)
    checks = (
        *_server_checks(servers, calls, same),
        *(
            _check_chunked(manifest, shapes[name])
            for name in dict.fromkeys(name for name, _ in loads)
            if shapes[name].chunked
        ),
        *(_check_shared_prefix(load) for load in load_rows if load.shared_tokens and load.rounds),
    )
    return LatencyResult(
        verdict=decide([row.verdict for row in rows], checks),
        device=spec.device,
        eager=manifest.eager,
        bound=spec.policy.latency_bound,
        policy=spec.policy.line("latency_bound"),
        rounds=max(block.round for block in blocks) + 1,
        warm_up_rounds=first,
        seconds=sum(block.seconds for block in blocks),
        loads=load_rows,
        rows=tuple(rows),
        reference_calls=call_summaries(calls["reference"]),
        candidate_calls=call_summaries(calls["candidate"]),
        checks=checks,
        findings=tuple(_findings(manifest, rows)),
        reproduce=manifest.command,
    )


def _rows(measured: Mapping[Load, Sequence[SideBySide]], loads: Sequence[Load], policy: Policy) -> list[LatencyRow]:
    """Decide on all ratios together."""
    keys = [(load, metric) for load in loads for metric in METRICS]
    logs = [
        (
            [log for rounds in measured[load] for log in rounds.slowdowns(metric)],
            [rounds.floor(metric) for rounds in measured[load]],
        )
        for load, metric in keys
    ]
    rows = []
    means = [[rounds.means(metric) for rounds in measured[load]] for load, metric in keys]
    decisions = decide_ratios(logs, policy.latency_bound, policy.alpha, means)
    for ((shape, concurrency), metric), decision in zip(keys, decisions, strict=True):
        blocks, ratio, floor = measured[shape, concurrency], decision.ratio, decision.floor
        rows.append(
            LatencyRow(
                shape=shape,
                concurrency=concurrency,
                metric=metric,
                reference_s=_median([block.time(metric) for rounds in blocks for block in rounds.reference]),
                candidate_s=_median([block.time(metric) for rounds in blocks for block in rounds.candidate]),
                ratio=_finite(ratio.value),
                low=_finite(ratio.interval.low),
                high=_finite(ratio.interval.high),
                floor=_finite(floor.value),
                floor_low=_finite(floor.interval.low),
                floor_high=_finite(floor.interval.high),
                mean=_finite(decision.mean),
                verdict=decision.verdict,
                why=_state_ratio(decision, policy.latency_bound),
            )
        )
    return rows


def _state_ratio(decision: RatioDecision, bound: float) -> Statement:
    ratio, floor = decision.ratio, decision.floor
    return state(
        "time-ratio", reason=decision.reason, ratio=_finite(ratio.value), low=ratio.interval.low, high=ratio.interval.high,
        level=ratio.interval.level, ratios=ratio.n, floor=_finite(floor.value), floor_low=floor.interval.low,
        floor_high=floor.interval.high, floor_ratios=floor.n, least=MIN_RATIOS, bound=bound, p=decision.p,
        mean=_finite(decision.mean),
    )  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _load_row(shape: Shape, concurrency: int, measured: Sequence[SideBySide]) -> LoadRow:
    ours = [block for rounds in measured for block in rounds.reference]
    theirs = [block for rounds in measured for block in rounds.candidate]
    return LoadRow(
        shape=shape.name,
        prompt_tokens=shape.prompt,
        shortest_tokens=shape.shortest,
        output_tokens=shape.output,
        shared_tokens=shape.shared,
        concurrency=concurrency,
        rounds=len(measured),
        reference_output_throughput=throughput(ours),
        candidate_output_throughput=throughput(theirs),
        reference_itl_p99_s=_median([block.itl_p99_s for block in ours]),
        candidate_itl_p99_s=_median([block.itl_p99_s for block in theirs]),
        reference_cached=_cached(ours),
        candidate_cached=_cached(theirs),
    )


def _cached(blocks: Sequence[Block]) -> float | None:
    """Compute the share of the prompt tokens that came from the cache, over the blocks for which the server reports it."""
    reported = [block for block in blocks if block.cached_tokens is not None]
    prompt_tokens = sum(block.input_tokens for block in reported)
    return sum(block.cached_tokens or 0 for block in reported) / prompt_tokens if prompt_tokens else None


def _server_checks(
    servers: Mapping[Role, ServerManifest], calls: Mapping[Role, Sequence[CallCount]], same: Check
) -> list[Check]:
    checks = [*check_kernel_ran(servers.get("candidate"), calls["candidate"], calls["reference"])]
    checks += check_compiled(servers, calls)
    checks.append(same)
    interpreted = sorted({count.kernel for role in ROLES for count in calls[role] if count.interpreted})
    if interpreted:
        checks.append(Requirement("device-kernels").check("failed", state("interpreted", kernels=interpreted)))
    return checks


def _check_chunked(manifest: BenchManifest, shape: Shape) -> Check:
    sizes = {
        server.role: registry.arguments(server.kind).limits_of(server.arguments, shape.prompt).chunk_tokens
        for server in manifest.servers
    }
    chunked = all(size is not None and size < shape.prompt for size in sizes.values())
    chunks = state("chunks", prompt=shape.prompt, sizes=[(role, str(size)) for role, size in sizes.items()])
    return Requirement("chunked").of(shape.name).met(chunked, chunks)


def _check_shared_prefix(load: LoadRow) -> Check:
    least = MIN_CACHED_SHARE * load.shared_tokens / load.prompt_tokens
    shares = {"reference": load.reference_cached, "candidate": load.candidate_cached}
    met = all(share is not None and share >= least for share in shares.values())
    required = Requirement("shared-prefix").of(f"{load.shape}-{load.concurrency}", load.where)
    return required.met(met, state("prompt-tokens-cached", **shares))


def _findings(manifest: BenchManifest, rows: Sequence[LatencyRow]) -> list[Finding]:
    return [
        Finding(
            id="latency",
            title="slower than the bound allows",
            severity="serious",
            where=row.where,
            claim=state("slower", time=row.metric, why=row.why),
            shown_by=(
                state("median-times", candidate=row.candidate_s, reference=row.reference_s),
                state("reference-against-itself", ratio=row.floor, low=row.floor_low, high=row.floor_high),
            ),
            reproduce=manifest.command,
        )
        for row in rows
        if row.verdict == "regression"
    ]


_WORST = "worst-time-ratio"


def timed(folder: RunFolder) -> LatencyResult | str:
    """Judge the times in a run's folder.

    Returns:
        All ratios, or the message of an error that prevents them.
    """
    try:
        return judge_bench(bench_folder(folder))
    except EvidenceError as error:
        return str(error)


def claim(result: LatencyResult | str, wrong: Sequence[SuiteResult]) -> Judged:
    """Judge the latency of a run, and check that it was timed.

    Args:
        result: the result of `timed`, or empty if no times were requested.
        wrong: the suites that found the candidate's answers or outputs wrong: the times of another computation prove nothing.
    """
    if not result:
        return Judged()
    if isinstance(result, str):
        return Judged(checks=[Requirement("servers-timed").check("missing", state("not-timed", said=result))])
    if wrong and result.verdict == "pass":
        faster = any(row.high is not None and row.high < 1 for row in result.rows)
        note = state("no-gain", faster=faster, wrong=[(suite.id, suite.asked) for suite in wrong])
        result = result.model_copy(update={"verdict": "inconclusive", "note": note})
    observed = state("timed", rounds=result.rounds, loads=len(result.loads), seconds=result.seconds)
    return Judged(
        suite=_suite(result),
        checks=[Requirement("servers-timed").check("ok", observed)],
        findings=result.findings,
        parts={"latency": result},
    )


def _suite(result: LatencyResult) -> SuiteResult:
    return SuiteResult(
        id="latency",
        synthetic=False,
        verdict=result.verdict,
        why=_why(result),
        metrics=_metrics(result),
        decided_by=_WORST if result.rows else "",
    )


def _why(result: LatencyResult) -> tuple[Statement, ...]:
    worst = worst_ratio(result)
    if worst is None:
        return (state("no-ratio"),)
    why = [state("of-time", time=worst.metric, load=worst.where, why=worst.why), state("policy", lines=[result.policy])]
    if result.note:
        why.insert(0, result.note)
    elif result.verdict == "inconclusive" and worst.verdict == "pass":
        # The ratios are sound, but a check is not met: kernels may have been interpreted.
        unmet = next(check for check in result.checks if check.status in ("failed", "missing"))
        why.insert(0, state("overruled", **unmet.model_dump()))
    return tuple(why)


def _metrics(result: LatencyResult) -> tuple[Metric, ...]:
    worst = worst_ratio(result)
    if worst is None:
        return ()
    low, floor_low = None if worst.high is None else worst.low, None if worst.floor_high is None else worst.floor_low
    return (
        measure(
            _WORST, worst.ratio, low=low, high=worst.high, bound=result.bound, policy=result.policy, time=worst.metric,
            load=worst.where, ratios=len(result.rows), note=result.note,
        ),
        measure("reference-over-itself", worst.floor, low=floor_low, high=worst.floor_high),
    )  # fmt: skip
