"""The result of a bench on the terminal."""

from __future__ import annotations

from rich.console import Console

from assay.harness.judge.latency_result import LatencyResult, LatencyRow, LoadRow, ratio_text
from assay.harness.text import one_line
from assay.reports.terminal import finding_lines, print_rows, say, verdict_line


def render_latency(result: LatencyResult, console: Console) -> None:
    """Print times, ratios with intervals and floors, counted calls, verdict, reasons and findings."""
    title = (
        f"{result.candidate} / {result.reference}: ratios of times, above 1 is slower; "
        f"bound {result.bound:g}, set by {result.policy}"
    )
    print_rows(console, title, _COLUMNS, [_cells(row) for row in result.rows])
    lines = [f"{load.where}, reference vs candidate: {load_text(load)}" for load in result.loads]
    lines.append(
        f"{result.rounds} rounds, the first {result.warm_up_rounds} discarded as warm-up; {graphs_text(result)}."
    )
    for role, calls in (("reference", result.reference_calls), ("candidate", result.candidate_calls)):
        if calls:
            lines.append(f"{role}: {'; '.join(call.sentence for call in calls)}")
    lines.append(verdict_line(result.verdict, result.headline))
    for line in lines:
        say(console, one_line(line, 600))
    for reason in result.reasons if result.verdict != "pass" else ():
        say(console, f"  - {one_line(reason, 600)}")
    for finding in result.findings:
        for line in finding_lines(finding):
            say(console, f"  {line}")


_COLUMNS = ("shape", "in flight", "metric", "reference", "candidate", "ratio", "reference / reference", "verdict")


def _cells(row: LatencyRow) -> tuple[str, ...]:
    return (
        one_line(row.shape),
        str(row.concurrency),
        row.metric,
        time_text(row, row.reference_s),
        time_text(row, row.candidate_s),
        ratio_text(row.ratio, row.low, row.high),
        ratio_text(row.floor, row.floor_low, row.floor_high),
        row.verdict,
    )


def time_text(row: LatencyRow, seconds: float) -> str:
    """A time in milliseconds; for the metric throughput, tokens per second."""
    if row.metric == "throughput":
        return f"{1 / seconds:,.0f} tok/s" if seconds else "-"
    return f"{1e3 * seconds:.2f} ms"


def graphs_text(result: LatencyResult) -> str:
    """Whether decode ran in CUDA graphs, in words."""
    if result.device == "cpu":
        return "on the CPU"
    return "without CUDA graphs" if result.eager else "CUDA graphs as the engine configures them"


def load_text(load: LoadRow) -> str:
    """Throughputs, 99th percentile of inter-token latency and cached share of a load, reference vs candidate."""
    parts = [
        f"{load.reference_input_throughput:,.0f} vs {load.candidate_input_throughput:,.0f} prompt tokens/s",
        f"{load.reference_output_throughput:,.0f} vs {load.candidate_output_throughput:,.0f} answer tokens/s",
        f"99th percentile of inter-token latency {1e3 * load.reference_itl_p99_s:.2f} vs {1e3 * load.candidate_itl_p99_s:.2f} ms",
    ]
    if load.shared_tokens and load.reference_cached is not None and load.candidate_cached is not None:
        shares = f"{100 * load.reference_cached:.0f} % vs {100 * load.candidate_cached:.0f} %"
        parts.append(f"{shares} of the prompt tokens cached")
    return "; ".join(parts)
