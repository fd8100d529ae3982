"""The result of timing a kernel: as JSON, and on the terminal, where every time comes with the own error."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from assay.harness.files import write_whole
from assay.harness.offline.timing_result import KernelTiming, ShapeTiming
from assay.harness.text import one_line, two_digits
from assay.reports.terminal import finding_lines, print_rows, say


def write_timing(result: KernelTiming, path: Path) -> None:
    """Write the result as JSON.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(path, result.model_dump_json(indent=2) + "\n")


def render_timing(result: KernelTiming, console: Console) -> None:
    """Print a line per shape, refusals, findings, and the verdict."""
    title = f"{result.candidate} / {result.reference} on {result.device}: ratios of times, above 1 is slower"
    print_rows(console, title, _COLUMNS, [_cells(row) for row in result.shapes])
    for refused in result.refused:
        say(console, one_line(f"refused: {refused}", 400))
    for finding in result.findings:
        for line in finding_lines(finding):
            say(console, line)
    say(console, f"{result.verdict.upper()} (exit code {result.exit_code}).")


_COLUMNS = ("phase", "new", "prefix", "reference", "candidate", "ratio", "TFLOP/s", "of the limit", "own error")


def _cells(row: ShapeTiming) -> tuple[str, ...]:
    error = "not finite" if row.own_error is None else f"{two_digits(row.own_error)} times its bound"
    return (
        row.phase,
        _lens(row.new),
        _lens(row.prefix),
        _time(row.reference_s),
        _time(row.candidate_s),
        f"{row.ratio:.3f} ({row.low:.3f} - {row.high:.3f})" if row.right else "not reported: wrong output",
        f"{row.reference_tflops:.3g} and {row.candidate_tflops:.3g}",
        f"{_share(row.reference_share)} and {_share(row.candidate_share)}",
        error if row.right else f"{error}: WRONG",
    )


def _lens(lens: tuple[int, ...]) -> str:
    """For example "200" or "16 x 1-40"."""
    if len(set(lens)) == 1:
        return f"{lens[0]}" if len(lens) == 1 else f"{len(lens)} x {lens[0]}"
    return f"{len(lens)} x {min(lens)}-{max(lens)}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _share(share: float | None) -> str:
    return "not known" if share is None else f"{100 * share:.0f} %"
