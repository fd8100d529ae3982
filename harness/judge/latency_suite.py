"""What a run's folder holds of its bench -> the parts of its report: the suite's verdict, all ratios, the condition of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from assay.harness.bench.evidence import bench_folder
from assay.harness.config import RunSpec
from assay.harness.errors import EvidenceError, ExitCode
from assay.harness.evidence.counters import CallCount
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.evidence.records import Role
from assay.harness.judge import report
from assay.harness.judge.bench import judge_bench
from assay.harness.judge.latency_result import LatencyResult
from assay.harness.verdict import Check
from assay.reports.latency_terminal import build_latency
from assay.reports.summary import latency_ratio, worst_ratio

TIMED = "both servers were timed"


@dataclass(frozen=True)
class Timed:
    """What the latency suite of a run came to.

    Attributes:
        result: all ratios; None where nothing was timed to the end.
        suite: the suite's outcome; None likewise.
        checks: whether it was timed, where it was asked for.
    """

    result: LatencyResult | None = None
    suite: report.SuiteResult | None = None
    checks: tuple[Check, ...] = ()


def timed(folder: RunFolder, spec: RunSpec, wrong: Sequence[str]) -> Timed:
    """Read what the latency suite left.

    Args:
        folder: the run's.
        spec: of the run.
        wrong: titles of the suites that found the candidate's answers or outputs wrong: its times are then no gain.
    """
    if "latency" not in spec.suites:
        return Timed()
    bench = bench_folder(folder)
    if not bench.whole:
        return Timed(checks=(_missing("no bench was played to its end"),))
    try:
        result = build_latency(judge_bench(bench))
    except EvidenceError as error:
        return Timed(checks=(_missing(str(error)),))
    if wrong and result.verdict == "pass":
        note = disbelief(result, wrong)
        result = result.model_copy(
            update={"verdict": "inconclusive", "exit_code": ExitCode.NO_VERDICT, "headline": note, "note": note}
        )
    found = f"{result.rounds} rounds of {len(result.loads)} loads in {result.seconds:.0f} s"
    return Timed(result, _suite(spec, result), (Check(id="servers-timed", title=TIMED, status="ok", found=found),))


def servers_of(folder: RunFolder) -> tuple[dict[Role, ServerManifest], dict[Role, list[CallCount]]]:
    """Both servers that were timed, and the calls counted in them: for a run that asked nothing else."""
    bench = bench_folder(folder)
    servers = {server.role: server for server in bench.manifest().servers}
    return servers, {role: bench.counters(role) for role in servers}


def disbelief(result: LatencyResult, wrong: Sequence[str]) -> str:
    """Why times of a candidate that computes something else are no gain."""
    faster = any(row.high is not None and row.high < 1 for row in result.rows)
    told = f"wrong answers ({', '.join(wrong)})"
    return f"No speed-up: {told}." if faster else f"{told[0].upper()}{told[1:]}: their times prove nothing."


def _missing(found: str) -> Check:
    return Check(
        id="servers-timed",
        title=TIMED,
        status="missing",
        found=found,
        settles="the same command again, which times them anew",
    )


def _suite(spec: RunSpec, result: LatencyResult) -> report.SuiteResult:
    return report.SuiteResult(
        id="latency",
        title="Latency",
        synthetic=False,
        verdict=result.verdict,
        why=_why(result),
        metrics=_metrics(spec, result),
    )


def _why(result: LatencyResult) -> str:
    worst = worst_ratio(result)
    if worst is None:
        return "No ratio was measured."
    ratio = f"{worst.title[0].upper()}{worst.title[1:]}, {worst.shape}, {worst.concurrency} in flight: {worst.why}"
    # The ratios may be sound while a condition is not, such as kernels that are interpreted.
    unmet = (
        result.reasons[0] if result.verdict == "inconclusive" and worst.verdict == "pass" and not result.note else ""
    )
    return " ".join(part for part in (result.note, unmet, ratio, f"Held against {result.policy}.") if part)


def _metrics(spec: RunSpec, result: LatencyResult) -> tuple[report.Metric, ...]:
    worst = worst_ratio(result)
    if worst is None:
        return ()
    where = f"{worst.title}, {worst.shape}, {worst.concurrency} in flight"
    return (
        report.Metric(
            name="worst ratio of times",
            value=worst.ratio,
            text="not measured" if worst.ratio is None else f"{worst.ratio:.3f} times",
            low=None if worst.high is None else worst.low,
            high=worst.high,
            bound=result.bound,
            bound_is="most",
            policy=spec.policy_line("latency_bound"),
            explain=f"{result.note} Candidate over reference: {where}; the worst of {len(result.rows)} ratios".strip(),
        ),
        report.Metric(
            name="reference over itself",
            value=worst.floor,
            text="not measured" if worst.floor is None else f"{worst.floor:.3f} times",
            low=None if worst.floor_high is None else worst.floor_low,
            high=worst.floor_high,
            explain=f"the floor of that ratio: {latency_ratio(worst.floor, worst.floor_low, worst.floor_high)}",
        ),
    )
