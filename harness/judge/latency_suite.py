"""The bench in a run's folder -> its part of the report: the suite's verdict, all ratios, the check that it was timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from assay.harness.config import RunSpec
from assay.harness.errors import EvidenceError
from assay.harness.evidence.bench_folder import bench_folder
from assay.harness.evidence.counters import CallCount
from assay.harness.evidence.folder import RunFolder
from assay.harness.evidence.manifest import ServerManifest
from assay.harness.judge.latency import judge_bench
from assay.harness.judge.latency_result import LatencyResult, ratio_text, worst_ratio
from assay.harness.judge.report import Metric, SuiteResult
from assay.harness.sides import Role
from assay.harness.verdict import Check, Requirement

_TIMED = Requirement("servers-timed", "both servers were timed")
_AGAIN = "repeat the command, which times both again"
_WORST = "worst-time-ratio"


@dataclass(frozen=True)
class LatencySuite:
    """The latency suite of a run.

    Attributes:
        result: all ratios; None where nothing was timed to the end.
        suite: the suite's verdict; None with `result`.
        checks: whether it was timed; empty if the run did not ask for it.
    """

    result: LatencyResult | None = None
    suite: SuiteResult | None = None
    checks: tuple[Check, ...] = ()


def latency_suite(folder: RunFolder, spec: RunSpec) -> LatencySuite:
    """Judge what the latency suite left in a run's folder."""
    if "latency" not in spec.workload.suites:
        return LatencySuite()
    bench = bench_folder(folder)
    if not bench.complete:
        return LatencySuite(checks=(_TIMED.check("missing", "no bench was completed", _AGAIN),))
    try:
        result = judge_bench(bench)
    except EvidenceError as error:
        return LatencySuite(checks=(_TIMED.check("missing", str(error), _AGAIN),))
    found = f"{result.rounds} rounds of {len(result.loads)} loads in {result.seconds:.0f} s"
    return LatencySuite(result, _suite(spec, result), (_TIMED.check("ok", found),))


def disbelieve(latency: LatencySuite, spec: RunSpec, wrong: Sequence[SuiteResult]) -> LatencySuite:
    """Cap a pass of the latency suite, which proves nothing if the candidate computes something else.

    Args:
        latency: as judged without the other suites.
        spec: of the run.
        wrong: the suites that found the candidate's answers or outputs wrong.
    """
    if not wrong or latency.result is None or latency.result.verdict != "pass":
        return latency
    note = _no_gain(latency.result, wrong)
    result = latency.result.model_copy(update={"verdict": "inconclusive", "headline": note, "note": note})
    return replace(latency, result=result, suite=_suite(spec, result))


def servers_of(folder: RunFolder) -> tuple[dict[Role, ServerManifest], dict[Role, list[CallCount]]]:
    """Summarise both servers that were timed, and the calls counted in them: for a run of latency alone."""
    bench = bench_folder(folder)
    servers = {server.role: server for server in bench.manifest().servers}
    return servers, {role: bench.counters(role) for role in servers}


def _no_gain(result: LatencyResult, wrong: Sequence[SuiteResult]) -> str:
    """Explain why the times of a candidate that computes something else are no gain."""
    faster = any(row.high is not None and row.high < 1 for row in result.rows)
    suites = f"wrong answers ({', '.join(suite.title for suite in wrong)})"
    return f"No speed-up: {suites}." if faster else f"{suites[0].upper()}{suites[1:]}: the times prove nothing."


def _suite(spec: RunSpec, result: LatencyResult) -> SuiteResult:
    return SuiteResult(
        id="latency",
        title="Latency",
        synthetic=False,
        verdict=result.verdict,
        why=_why(result),
        metrics=_metrics(spec, result),
        decided_by=_WORST if result.rows else "",
    )


def _why(result: LatencyResult) -> str:
    worst = worst_ratio(result)
    if worst is None:
        return "No ratio was measured."
    ratio = f"{worst.title[0].upper()}{worst.title[1:]}, {worst.where}: {worst.why}"
    # The ratios may be sound while a check is not met: kernels may have been interpreted.
    overruled = result.verdict == "inconclusive" and worst.verdict == "pass" and not result.note
    unmet = result.reasons[0] if overruled else ""
    return " ".join(part for part in (result.note, unmet, ratio, f"Policy: {result.policy}.") if part)


def _metrics(spec: RunSpec, result: LatencyResult) -> tuple[Metric, ...]:
    worst = worst_ratio(result)
    if worst is None:
        return ()
    return (
        Metric(
            id=_WORST,
            title="worst ratio of times",
            value=worst.ratio,
            text="not measured" if worst.ratio is None else f"{worst.ratio:.3f} times",
            low=None if worst.high is None else worst.low,
            high=worst.high,
            bound=result.bound,
            bound_is="most",
            policy=spec.policy.line("latency_bound"),
            explain=f"{result.note}{' ' if result.note else ''}Candidate over reference: {worst.title}, {worst.where}; "
            f"the worst of {len(result.rows)} ratios",
        ),
        Metric(
            id="reference-over-itself",
            title="reference over itself",
            value=worst.floor,
            text="not measured" if worst.floor is None else f"{worst.floor:.3f} times",
            low=None if worst.floor_high is None else worst.floor_low,
            high=worst.floor_high,
            explain=f"The floor of that ratio: {ratio_text(worst.floor, worst.floor_low, worst.floor_high)}",
        ),
    )
