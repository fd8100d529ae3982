"""The document of a timed kernel, in which every time comes with the own error."""

from __future__ import annotations

from assay.harness.offline.timing_result import KernelTiming, ShapeTiming
from assay.harness.text import one_line, two_digits
from assay.reports.document import Document, Findings, Line, Table


def timing_document(result: KernelTiming) -> Document:
    """A row per shape, refusals and findings."""
    limited = any(row.reference_share is not None or row.candidate_share is not None for row in result.shapes)
    rows = [_cells(row) if limited else (*_cells(row)[:-2], _cells(row)[-1]) for row in result.shapes]
    return Document(
        command="bench kernel",
        title=result.candidate,
        verdict=result.verdict,
        headline=f"{_why(result)}.",
        body=[
            Table(
                (*_COLUMNS, "of the limit", "own error") if limited else (*_COLUMNS, "own error"),
                rows,
                f"{result.candidate} / {result.reference} on {result.device}: ratios of times, above 1 is slower",
            ),
            *(Line(one_line(f"refused: {refused}", 400)) for refused in result.refused),
            Findings(result.findings),
        ],
        result=result,
    )


_COLUMNS = ("phase", "new", "prefix", "reference", "candidate", "ratio", "TFLOP/s")


def _why(result: KernelTiming) -> str:
    """Return which shapes decided, in words."""
    shapes, bound = result.shapes, f"the bound of {result.bound:g}"
    timed = [row.verdict for row in shapes if row.right]
    counted = (
        ("the candidate is wrong", len(shapes) - len(timed)),
        (f"its ratio is above {bound}", timed.count("regression")),
        (f"its ratio is shown neither to be below {bound} nor above it", timed.count("inconclusive")),
    )
    parts = [f"{what} on {count} of {len(shapes)} shapes" for what, count in counted if count]
    parts += [f"further shapes that were refused: {len(result.refused)}"] if result.refused else []
    return "; ".join(parts) or f"the candidate is right, and its ratio below {bound}, on all {len(shapes)} shapes"


def _cells(row: ShapeTiming) -> tuple[str, ...]:
    error = "not finite" if row.own_error is None else f"{two_digits(row.own_error)}x its bound"
    return (
        row.phase,
        _lens(row.new),
        _lens(row.prefix),
        _time(row.reference_s),
        _time(row.candidate_s),
        f"{row.ratio:.3f} ({row.low:.3f} to {row.high:.3f})" if row.right else "not reported: wrong output",
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
