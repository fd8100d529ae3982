"""The section of a report on latency."""

from __future__ import annotations

from assay.harness.judge.call_counts import CallSummary
from assay.harness.judge.latency_result import LatencyResult, LatencyRow, LoadRow, worst_ratio
from assay.harness.text import counted, one_line
from assay.reports.document import (
    Block,
    Cell,
    Checks,
    Code,
    Drawing,
    Line,
    Section,
    Table,
    Words,
)
from assay.reports.summary import latency_lines
from assay.reports.svg import interval_chart
from assay.reports.wording.latency import TIMES, ratio_text

_COLUMNS = ("load", "metric", "reference", "candidate", "ratio", "reference / reference", "verdict")
_CALLS = ("phase", "kernel", "calls", "cached prefix", "in graphs", "compiled", "layers")


def latency_section(result: LatencyResult) -> Section:
    """Build the section on latency: sentences, the ratios of all loads, checks, and the calls counted."""
    first, *lines = latency_lines(result)
    titles = "; ".join(f"{metric}: {TIMES[metric]}" for metric in dict.fromkeys(row.metric for row in result.rows))
    about = (
        "A ratio is the candidate’s time divided by the reference’s on the same prompts: above 1 is slower. "
        f"{result.rounds} rounds side by side in random order, the first {result.warm_up_rounds} discarded as warm-up; "
        f"{_graphs(result)}. Timed on separate servers without a layer diff. {titles[:1].upper()}{titles[1:]}."
    )
    table = Table(_COLUMNS, list(map(_row, result.rows)), numbers=(2, 3, 4, 5), style="stacked", most=24)
    blocks: list[Block] = [*_interval(result), *(Line(line, "quiet") for line in [*lines, about]), table]
    details: list[Block] = [Section("", list(map(_load, result.loads)), style="split")]
    if result.reference_calls or result.candidate_calls:
        tables: list[Block] = [
            Section("", [Line((Cell(role, role),)), calls_table(calls)])
            for role, calls in (("reference", result.reference_calls), ("candidate", result.candidate_calls))
        ]
        details.append(Section("Attention calls counted during timing", [Section("", tables, style="pair")]))
    details.append(Code(result.reproduce, "Repeat this timing"))
    unmet = any(check.status != "ok" for check in result.checks)
    checks = Section("Checks of the timing", [Checks(result.checks)], detail=not unmet)
    body = [*blocks, checks, Section("", details, detail=True)]
    return Section("Latency", body, "latency", lead=first, style="latency")


def _interval(result: LatencyResult) -> list[Block]:
    """The worst ratio, drawn with its bound."""
    worst = worst_ratio(result)
    if worst is None:
        return []
    says = (
        f"candidate / reference, {TIMES[worst.metric]}, {worst.where}: {ratio_text(worst.ratio, worst.low, worst.high)}"
    )
    return [Drawing(interval_chart(says, worst.ratio, worst.low, worst.high, result.bound))]


def _load(load: LoadRow) -> Section:
    shared = f", {load.shared_tokens} of them shared" if load.shared_tokens else ""
    least = f"{load.shortest_tokens} to " if load.shortest_tokens else ""
    asked = (
        f"{least}{load.prompt_tokens} tokens in{shared}, {load.output_tokens} out; {counted(load.rounds, 'round')}. "
    )
    words = Line(f"{asked}Reference vs candidate: {_throughputs(load)}.", "quiet")
    return Section(load.where, [words], style="condition")


def calls_table(calls: tuple[CallSummary, ...]) -> Block:
    """Build the table of the attention calls counted in a server."""
    rows: list[tuple[Words, ...]] = []
    for call in calls:
        kernel = Cell(call.kernel, note=f"delegated by {call.delegated_by}" if call.delegated_by else "")
        counts = (call.calls, call.calls_with_cached_prefix, call.calls_in_graphs, call.calls_compiled, call.layers)
        rows.append((call.phase, kernel, *(f"{count:,}" for count in counts)))
    none = Line("None were counted, so it is unknown which kernel ran here.", "empty")
    return Table(_CALLS, rows, numbers=range(2, 7), style="calls") if rows else none


def _row(row: LatencyRow) -> tuple[Words, ...]:
    return (
        one_line(row.where),
        row.metric,
        _time(row, row.reference_s),
        _time(row, row.candidate_s),
        Cell(ratio_text(row.ratio, row.low, row.high), "beyond" if row.verdict == "regression" else ""),
        ratio_text(row.floor, row.floor_low, row.floor_high),
        Cell(row.verdict, row.verdict),
    )


def _time(row: LatencyRow, seconds: float) -> str:
    """A time in milliseconds; for the metric throughput, tokens per second."""
    if row.metric == "throughput":
        return f"{1 / seconds:,.0f} tok/s" if seconds else "-"
    return f"{1e3 * seconds:.2f} ms"


def _graphs(result: LatencyResult) -> str:
    """Describe whether decode ran in CUDA graphs."""
    if result.device == "cpu":
        return "on the CPU"
    return "without CUDA graphs" if result.eager else "CUDA graphs as the engine configures them"


def _throughputs(load: LoadRow) -> str:
    """Throughputs, 99th percentile of inter-token latency and cached share of a load, reference vs candidate."""
    parts = [
        f"{load.reference_output_throughput:,.0f} vs {load.candidate_output_throughput:,.0f} answer tokens/s",
        f"99th percentile of inter-token latency {1e3 * load.reference_itl_p99_s:.2f} vs {1e3 * load.candidate_itl_p99_s:.2f} ms",
    ]
    if load.shared_tokens and load.reference_cached is not None and load.candidate_cached is not None:
        shares = f"{100 * load.reference_cached:.0f} % vs {100 * load.candidate_cached:.0f} %"
        parts.append(f"{shares} of the prompt tokens cached")
    return "; ".join(parts)
