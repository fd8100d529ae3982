"""The latency verdict as data, and on the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from assay.harness.compare.blocks import METRICS
from assay.harness.config import RunSpec
from assay.harness.judge.bench import BenchResult, CellResult
from assay.harness.judge.calls import call_summaries
from assay.harness.judge.latency_result import LatencyResult, LatencyRow, LengthRow, LoadRow
from assay.harness.text import one_line


def build_latency(result: BenchResult) -> LatencyResult:
    """The result as it is written and shown."""
    manifest, lengths = result.manifest, result.lengths
    return LatencyResult(
        created=manifest.created,
        verdict=result.judgement.verdict,
        exit_code=result.judgement.exit_code,
        headline=result.judgement.headline,
        reasons=result.judgement.reasons,
        reference=manifest.spec["reference"],
        candidate=manifest.spec["candidate"],
        device=manifest.spec["device"],
        hardware=manifest.hardware,
        packages=manifest.packages,
        git=manifest.git,
        model=manifest.spec["model"],
        eager=manifest.eager,
        engine_args=tuple(manifest.spec["engine_arg"]),
        bound=result.policy.bound,
        policy=RunSpec(**manifest.spec).policy_line("latency_bound"),
        alpha=result.policy.alpha,
        rounds=result.rounds,
        warm_up_rounds=result.warm_up,
        seconds=result.seconds,
        loads=tuple(_load(cell) for cell in result.cells),
        rows=tuple(row for cell in result.cells for row in _rows(cell, result.policy.bound)),
        lengths=LengthRow(
            prompts=lengths.n,
            reference=lengths.reference,
            candidate=lengths.candidate,
            longer=lengths.longer,
            shorter=lengths.shorter,
            reference_cut=lengths.reference_cut,
            candidate_cut=lengths.candidate_cut,
            p=lengths.p,
            differ=lengths.differ,
        )
        if lengths
        else None,
        reference_calls=call_summaries(result.calls["reference"]),
        candidate_calls=call_summaries(result.calls["candidate"]),
        checks=result.checks,
        findings=result.findings,
        reproduce=manifest.command,
    )


def _load(cell: CellResult) -> LoadRow:
    ours, theirs = cell.reference, cell.candidate
    return LoadRow(
        shape=cell.shape.name,
        prompt_tokens=cell.shape.prompt,
        output_tokens=cell.shape.output,
        shared_tokens=cell.shape.shared,
        concurrency=cell.concurrency,
        rounds=cell.rounds,
        reference_input_throughput=ours.input_throughput,
        candidate_input_throughput=theirs.input_throughput,
        reference_output_throughput=ours.output_throughput,
        candidate_output_throughput=theirs.output_throughput,
        reference_itl_p99_s=ours.itl_p99_s,
        candidate_itl_p99_s=theirs.itl_p99_s,
        reference_cached=ours.cached,
        candidate_cached=theirs.cached,
    )


def _rows(cell: CellResult, bound: float) -> list[LatencyRow]:
    return [
        LatencyRow(
            shape=cell.shape.name,
            concurrency=cell.concurrency,
            metric=metric,
            title=METRICS[metric],
            reference_s=cell.reference.seconds[metric],
            candidate_s=cell.candidate.seconds[metric],
            ratio=_finite(decision.ratio.value),
            low=_finite(decision.ratio.interval.low),
            high=_finite(decision.ratio.interval.high),
            floor=_finite(decision.floor.value),
            floor_low=_finite(decision.floor.interval.low),
            floor_high=_finite(decision.floor.interval.high),
            p=decision.p,
            bound=bound,
            verdict=decision.verdict,
            why=decision.why,
            ratios=decision.ratio.n,
            ratios_effective=decision.ratio.effective,
            ratios_needed=decision.needed,
        )
        for metric, decision in cell.decisions.items()
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def render_latency(result: LatencyResult, console: Console) -> None:
    """Print verdict, times, ratios with their intervals and floors, unmet conditions and findings."""

    def say(text: str, indent: int = 0) -> None:
        console.print(" " * indent + one_line(text, 600), markup=False, highlight=False, soft_wrap=True)

    title = (
        f"{result.candidate} over {result.reference}: ratios of times, above 1 is slower; "
        f"bound {result.bound:g}, by {result.policy}"
    )
    print_rows(console, title, _COLUMNS, [_cells(row) for row in result.rows])
    for load in result.loads:
        say(f"{load.shape}, {load.concurrency} in flight: {load_text(load)}")
    say(f"{result.rounds} rounds played, the first {result.warm_up_rounds} left out as warm-up; {graphs_text(result)}.")
    for role, calls in (("reference", result.reference_calls), ("candidate", result.candidate_calls)):
        if calls:
            say(f"{role}: {'; '.join(call.sentence for call in calls)}")
    say(f"{result.verdict.upper()} (exit code {result.exit_code}): {result.headline}")
    for reason in result.reasons if result.verdict != "pass" else ():
        say(f"- {reason}", 2)
    for finding in result.findings:
        say(f"{finding.severity}: {finding.where}: {finding.diagnosis}", 2)
        for line in finding.evidence:
            say(f"- {line}", 6)


_COLUMNS = ("load", "in flight", "metric", "reference", "candidate", "ratio", "reference over itself", "verdict")


def print_rows(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows as a table on a terminal that is wide enough, else each as one line that is never broken."""
    table = Table(title=one_line(title))
    for column in columns:
        table.add_column(column, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # a str would be read as markup
    if (
        console.is_terminal
        and Measurement.get(console, console.options.update(width=1_000), table).maximum <= console.width
    ):
        console.print(table)
        return
    console.print(one_line(title), markup=False, highlight=False, soft_wrap=True)
    for row in rows:
        told = "; ".join(f"{column} {cell}" for column, cell in zip(columns, row, strict=True))
        console.print(f"  {told}", markup=False, highlight=False, soft_wrap=True)


def _cells(row: LatencyRow) -> tuple[str, ...]:
    return (
        one_line(row.shape),
        str(row.concurrency),
        row.metric,
        time_text(row, row.reference_s),
        time_text(row, row.candidate_s),
        _interval(row.ratio, row.low, row.high),
        _interval(row.floor, row.floor_low, row.floor_high),
        row.verdict,
    )


def time_text(row: LatencyRow, seconds: float) -> str:
    """A time as a person reads it: milliseconds, or of throughput tokens a second."""
    if row.metric == "throughput":
        return f"{1 / seconds:,.0f} tok/s" if seconds else "-"
    return f"{1e3 * seconds:.2f} ms"


def graphs_text(result: LatencyResult) -> str:
    """Whether decode ran in CUDA graphs."""
    if result.device == "cpu":
        return "on the CPU"
    return "without CUDA graphs" if result.eager else "CUDA graphs as the engine has them"


def load_text(load: LoadRow) -> str:
    """Throughputs, slowest gaps and cached share of a load, the reference's first."""
    ours, theirs = load.reference_itl_p99_s, load.candidate_itl_p99_s
    told = [
        f"{load.reference_input_throughput:,.0f} : {load.candidate_input_throughput:,.0f} prompt tokens/s",
        f"{load.reference_output_throughput:,.0f} : {load.candidate_output_throughput:,.0f} answer tokens/s",
        f"99 % of the gaps below {1e3 * ours:.2f} : {1e3 * theirs:.2f} ms",
    ]
    if load.shared_tokens and None not in (load.reference_cached, load.candidate_cached):
        told.append(f"{load.reference_cached:.0%} : {load.candidate_cached:.0%} of the prompt tokens cached")
    return "; ".join(told)


def _interval(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3f} ({'?' if low is None else f'{low:.3f}'} - {'?' if high is None else f'{high:.3f}'})"
