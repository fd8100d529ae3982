"""The evidence of a bench -> what its ratios come to, and the verdict."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from assay.evals.loads import Shape
from assay.harness.bench.evidence import BenchFolder, BenchManifest, blocks_in, policy_of, shapes_in
from assay.harness.bench.lengths import Lengths, compare_lengths
from assay.harness.bench.policy import BenchPolicy
from assay.harness.compare.blocks import METRICS, Block, Cell, Metric, SideBySide, first_warm, side_by_side, throughputs
from assay.harness.engines.arguments import differences
from assay.harness.errors import EvidenceError
from assay.harness.evidence.counters import CallCount
from assay.harness.evidence.records import ROLES, Role
from assay.harness.judge.checks import (
    Judgement,
    SuiteVerdict,
    check_compiled,
    check_kernel_ran,
    check_same_servers,
    judge,
)
from assay.harness.stats.decision import StatOutcome
from assay.harness.stats.ratio import RatioDecision, decide_ratios
from assay.harness.verdict import Check, Finding

CACHED = 0.5
"""Share of a shape's shared tokens that must have come from the cache."""
_WORST: tuple[StatOutcome, ...] = ("regression", "inconclusive", "pass")


@dataclass(frozen=True)
class Side:
    """One role's times in a cell; medians over its blocks.

    Attributes:
        seconds: by metric; of `throughput` the seconds a token.
        itl_p99_s: 99th percentile of inter-token latency, the median over blocks.
        input_throughput: prompt tokens a second.
        output_throughput: answer tokens a second.
        cached: share of the prompt tokens that came from the cache; None where the server does not say.
    """

    seconds: dict[Metric, float]
    itl_p99_s: float
    input_throughput: float
    output_throughput: float
    cached: float | None


@dataclass(frozen=True)
class CellResult:
    """A shape at a concurrency: both sides' times, and the decision on each metric.

    Attributes:
        shape: lengths.
        concurrency: most requests in flight.
        rounds: rounds that count.
        reference: its times.
        candidate: its times.
        decisions: by metric.
    """

    shape: Shape
    concurrency: int
    rounds: int
    reference: Side
    candidate: Side
    decisions: dict[Metric, RatioDecision]

    @property
    def verdict(self) -> StatOutcome:
        """The worst of its metrics'."""
        return min((decision.verdict for decision in self.decisions.values()), key=_WORST.index)

    @property
    def why(self) -> str:
        """The metrics that made the verdict, or the one nearest to the bound, in words."""
        made = [(m, d) for m, d in self.decisions.items() if d.verdict == self.verdict]
        if self.verdict == "pass":
            made = [max(made, key=lambda pair: pair[1].ratio.interval.high)]
        return " ".join(f"{METRICS[metric].capitalize()}: {decision.why}" for metric, decision in made)


@dataclass(frozen=True)
class BenchResult:
    """What a bench came to.

    Attributes:
        manifest: what was timed.
        policy: bound and budget.
        judgement: verdict, exit code, reasons.
        cells: by shape and concurrency.
        rounds: rounds that were played in whole or in part.
        warm_up: rounds at the start that were left out.
        seconds: from the first request to the end of the last.
        lengths: of free answers; None where none were asked for.
        calls: attention calls counted in each server.
        checks: conditions of a pass.
        findings: what is wrong.
    """

    manifest: BenchManifest
    policy: BenchPolicy
    judgement: Judgement
    cells: tuple[CellResult, ...]
    rounds: int
    warm_up: int
    seconds: float
    lengths: Lengths | None
    calls: dict[Role, list[CallCount]]
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]


def judge_bench(folder: BenchFolder, bound: float | None = None) -> BenchResult:
    """Read a bench's folder and decide.

    Args:
        folder: the bench's folder.
        bound: decide by this bound instead of the policy's.

    Raises:
        EvidenceError: the folder is damaged, or holds no whole round.
    """
    manifest = folder.manifest()
    policy = policy_of(manifest)
    if bound is not None:
        policy = policy.model_copy(update={"bound": bound})
    blocks = blocks_in(folder.timings(), folder.path)
    played = side_by_side(blocks)
    if not any(played.values()):
        raise EvidenceError(f"{folder.path} holds no timings.", "at least one round", "time again with more --seconds")
    first = first_warm(played)
    measured = {cell: [one for one in found if one.round >= first] for cell, found in played.items()}
    cells = _cells(measured, shapes_in(manifest), policy)
    lengths = compare_lengths(folder.lengths(), policy.alpha) if folder.lengths() else None
    calls: dict[Role, list[CallCount]] = {role: folder.counters(role) for role in ROLES}
    checks = (
        *_server_checks(manifest, calls),
        *_load_checks(manifest, cells),
        *([_check_lengths(lengths)] if lengths else []),
    )
    suites = [
        SuiteVerdict(
            f"{cell.shape.name}-{cell.concurrency}",
            f"{cell.shape.name}, {cell.concurrency} in flight",
            cell.verdict,
            cell.why,
        )
        for cell in cells
    ]
    return BenchResult(
        manifest=manifest,
        policy=policy,
        judgement=judge(manifest.spec["candidate"], suites, checks, None),
        cells=tuple(cells),
        rounds=max(block.round for block in blocks) + 1,
        warm_up=first,
        seconds=sum(block.seconds for block in blocks),
        lengths=lengths,
        calls=calls,
        checks=checks,
        findings=tuple(_findings(manifest, cells, lengths)),
    )


def _cells(
    measured: Mapping[Cell, Sequence[SideBySide]], shapes: Mapping[str, Shape], policy: BenchPolicy
) -> list[CellResult]:
    keys: list[tuple[Cell, Metric]] = [(cell, metric) for cell in sorted(measured) for metric in METRICS]
    logs = [
        (
            [log for one in measured[cell] for log in one.slowdowns(metric)],
            [one.floor(metric) for one in measured[cell]],
        )
        for cell, metric in keys
    ]
    decided = dict(zip(keys, decide_ratios(logs, policy.bound, policy.alpha), strict=True))
    order = list(shapes)
    return [
        CellResult(
            shape=shapes[cell[0]],
            concurrency=cell[1],
            rounds=len(found),
            reference=_side([block for one in found for block in one.reference]),
            candidate=_side([block for one in found for block in one.candidate]),
            decisions={metric: decided[cell, metric] for metric in METRICS},
        )
        for cell, found in sorted(measured.items(), key=lambda pair: (order.index(pair[0][0]), pair[0][1]))
    ]


def _side(blocks: Sequence[Block]) -> Side:
    def median(values: Sequence[float]) -> float:
        return statistics.median(values) if values else 0.0

    told = [block for block in blocks if block.cached_tokens is not None]
    asked = sum(block.input_tokens for block in told)
    into, out = throughputs(blocks)
    return Side(
        seconds={metric: median([block.time(metric) for block in blocks]) for metric in METRICS},
        itl_p99_s=median([block.itl_p99_s for block in blocks]),
        input_throughput=into,
        output_throughput=out,
        cached=sum(block.cached_tokens or 0 for block in told) / asked if asked else None,
    )


def _server_checks(manifest: BenchManifest, calls: Mapping[Role, Sequence[CallCount]]) -> list[Check]:
    servers = {server.role: server for server in manifest.servers}
    started = all(server.launch_command for server in manifest.servers)
    found: dict[str, tuple[str, str]] = {}
    if len(servers) == 2:
        found = differences(servers["reference"].arguments, servers["candidate"].arguments)
    checks = [*check_kernel_ran(servers.get("candidate"), calls["candidate"], calls["reference"])]
    checks += check_compiled(servers, calls)
    checks.append(check_same_servers(servers, found, started))
    interpreted = sorted({count.kernel for role in ROLES for count in calls[role] if "interpreter" in count.kernel})
    if interpreted:
        checks.append(
            Check(
                id="device-kernels",
                title="kernels ran as they do in service",
                status="failed",
                found=f"{', '.join(interpreted)}: its time is the interpreter's, and says nothing of the kernel's",
                settles="a run with --device cuda",
            )
        )
    return checks


def _load_checks(manifest: BenchManifest, cells: Sequence[CellResult]) -> list[Check]:
    """Whether chunked loads were prefilled in chunks, and shared prefixes came from the cache."""
    checks: list[Check] = []
    arguments = {server.role: server.arguments for server in manifest.servers}
    for shape in dict.fromkeys(cell.shape for cell in cells if cell.shape.chunked):
        sizes = {role: arguments[role].get("chunked_prefill_size") for role in arguments}
        whole = [role for role, size in sizes.items() if not isinstance(size, int) or not 0 < size < shape.prompt]
        checks.append(
            Check(
                id=f"chunked-{shape.name}",
                title=f"prompts of the shape {shape.name} were prefilled in chunks",
                status="missing" if whole else "ok",
                found=f"{shape.prompt} tokens; chunks of {', '.join(f'{size} ({role})' for role, size in sizes.items())}",
                settles="a chunk length below the prompt's; see --chunked-prefill-size" if whole else "",
            )
        )
    for cell in cells:
        if cell.shape.shared and cell.rounds:
            least = CACHED * cell.shape.shared / cell.shape.prompt
            shares: dict[Role, float | None] = {"reference": cell.reference.cached, "candidate": cell.candidate.cached}
            met = all(share is not None and share >= least for share in shares.values())
            told = ", ".join(
                f"{role} {'not said' if share is None else f'{100 * share:.0f} %'}" for role, share in shares.items()
            )
            checks.append(
                Check(
                    id=f"shared-prefix-{cell.shape.name}-{cell.concurrency}",
                    title=f"the shared prefix came from the cache: {cell.shape.name}, {cell.concurrency} in flight",
                    status="ok" if met else "missing",
                    found=f"{told} of the prompt tokens were cached",
                    settles="" if met else "a run with the prefix cache on, and servers that report cached tokens",
                )
            )
    return checks


def _check_lengths(lengths: Lengths) -> Check:
    name = "answers that may end when they like are as long as the reference's"
    if not lengths.told:
        return Check(
            id="answer-lengths",
            title=name,
            status="not checked",
            found=f"all {lengths.n} answers of both ran to the limit, so their lengths say nothing",
            settles="a model that ends its answers",
        )
    return Check(
        id="answer-lengths",
        title=name,
        status="missing" if lengths.differ else "ok",
        found=_told(lengths),
        settles="a candidate whose answers are the reference's; see assay run" if lengths.differ else "",
    )


def _told(lengths: Lengths) -> str:
    return (
        f"{lengths.candidate:.1f} tokens on average against {lengths.reference:.1f} over {lengths.n} prompts "
        f"({lengths.longer} longer, {lengths.shorter} shorter, p = {lengths.p:.2g}; cut at the limit: "
        f"{lengths.candidate_cut} against {lengths.reference_cut})"
    )


def _findings(manifest: BenchManifest, cells: Sequence[CellResult], lengths: Lengths | None) -> list[Finding]:
    found: list[Finding] = []
    for cell in cells:
        for metric, decision in cell.decisions.items():
            if decision.verdict == "regression":
                ours, theirs = cell.reference.seconds[metric], cell.candidate.seconds[metric]
                found.append(
                    Finding(
                        id="latency",
                        title="slower than the bound allows",
                        severity="serious",
                        where=f"{cell.shape.name}, {cell.concurrency} in flight",
                        diagnosis=f"{METRICS[metric]}: slower, {decision.why}",
                        evidence=(
                            f"{1e3 * theirs:.3g} ms against {1e3 * ours:.3g} ms in the median",
                            f"the reference against itself: {decision.floor.value:.3f} "
                            f"({decision.floor.interval.low:.3f} to {decision.floor.interval.high:.3f})",
                        ),
                        reproduce=manifest.command,
                    )
                )
    if lengths and lengths.differ:
        shorter = lengths.candidate < lengths.reference
        seems = "faster than it is" if shorter else "slower than it is"
        found.append(
            Finding(
                id="answer-lengths",
                title="answers of another length",
                severity="warning",
                where="answers that may end when they like",
                diagnosis=f"The candidate's answers are {'shorter' if shorter else 'longer'}: whoever times whole answers "
                f"finds it {seems}. The ratios here are of answers of one forced length.",
                evidence=(_told(lengths),),
                reproduce=manifest.command,
            )
        )
    return found
