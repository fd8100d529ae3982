"""The bench in a run's folder -> its part of the report: the suite's verdict, all ratios, the check that it was timed."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.errors import EvidenceError
from assay.harness.evidence.bench_folder import bench_folder
from assay.harness.evidence.folder import RunFolder
from assay.harness.judge.evidence import Judged
from assay.harness.judge.latency import judge_bench
from assay.harness.judge.latency_result import LatencyResult, ratio_text, worst_ratio
from assay.harness.judge.report import Metric, SuiteResult
from assay.harness.verdict import Requirement

_TIMED = Requirement("servers-timed", "both servers were timed")
_WORST = "worst-time-ratio"


def timed(folder: RunFolder) -> LatencyResult | str:
    """Judge the times that a run's folder holds.

    Returns:
        All ratios; in words, why there are none.
    """
    try:
        return judge_bench(bench_folder(folder))
    except EvidenceError as error:
        return str(error)


def claim(result: LatencyResult | str, wrong: Sequence[SuiteResult]) -> Judged:
    """Judge the latency of a run, and check that it was timed.

    Args:
        result: what `timed` returned; empty if no times were asked for.
        wrong: the suites that found the candidate's answers or outputs wrong: the times of another computation prove nothing.
    """
    if not result:
        return Judged()
    if isinstance(result, str):
        return Judged(checks=[_TIMED.check("missing", result, "repeat the command, which times both again")])
    if wrong and result.verdict == "pass":
        note = _no_gain(result, wrong)
        result = result.model_copy(update={"verdict": "inconclusive", "headline": note, "note": note})
    observed = f"{result.rounds} rounds of {len(result.loads)} loads in {result.seconds:.0f} s"
    return Judged(
        suite=_suite(result),
        checks=[_TIMED.check("ok", observed)],
        findings=result.findings,
        parts={"latency": result},
    )


def _no_gain(result: LatencyResult, wrong: Sequence[SuiteResult]) -> str:
    """Explain why the times of a candidate that computes something else are no gain."""
    faster = any(row.high is not None and row.high < 1 for row in result.rows)
    suites = f"wrong answers ({', '.join(suite.title for suite in wrong)})"
    return f"No speed-up: {suites}." if faster else f"{suites[0].upper()}{suites[1:]}: the times prove nothing."


def _suite(result: LatencyResult) -> SuiteResult:
    return SuiteResult(
        id="latency",
        title="Latency",
        synthetic=False,
        verdict=result.verdict,
        why=_why(result),
        metrics=_metrics(result),
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


def _metrics(result: LatencyResult) -> tuple[Metric, ...]:
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
            policy=result.policy,
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
