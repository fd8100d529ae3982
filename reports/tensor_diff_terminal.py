"""Two dumps compared, on the terminal."""

from __future__ import annotations

from rich.console import Console

from assay.harness.ingest.tensors.diff import CellAt, TensorDiff, TensorRow, cell_text
from assay.harness.ingest.tensors.imported import Imported
from assay.harness.text import counted, one_line
from assay.reports.summary import own_error_text
from assay.reports.terminal import print_rows, say

ROWS_SHOWN = 12
NAMES_SHOWN = 8


def render_tensor_diff(result: TensorDiff, console: Console) -> None:
    """Print the result: the first and the worst difference, the tensors that differ, and what could not be compared."""
    say(console, f"{one_line(result.headline, 400)}.")
    mode = "bit for bit" if result.exact else "each token and head"
    speed = f", {result.bytes / 1e9 / result.seconds:.1f} GB/s" if result.seconds > 0 else ""
    took = f"in {result.seconds:.2f} s{speed}"
    counts = f"{result.identical} identical, {result.within} within bounds, {result.differing} out of bounds"
    pairs = counted(result.compared, "pair")
    empty = f" {counted(result.empty, 'pair')} without an element: not counted." if result.empty else ""
    say(console, f"Compared {pairs}, {result.bytes / 1e6:,.1f} MB, {mode}, {took}: {counts}.{empty}")
    same = result.first == result.worst
    cells = {"First and worst": result.first} if same else {"First": result.first, "Worst": result.worst}
    for name, cell in cells.items():
        if cell is not None:
            say(console, f"{name}: {where(cell)}: {error(cell)}")
    rows = [_row(row) for row in result.tensors if row.out_of_bounds]
    if rows:
        columns = ("layer", "boundary", "tensor", "cells out of bounds", "worst error", "at")
        print_rows(console, "Tensors that differ, in depth order", columns, rows[:ROWS_SHOWN])
        if result.differing > ROWS_SHOWN:
            say(console, f"and {result.differing - ROWS_SHOWN} more")
    for line in result.not_compared[:NAMES_SHOWN]:
        say(console, f"Not compared: {one_line(line, 300)}")
    if result.not_compared_count > NAMES_SHOWN:
        say(console, f"and {result.not_compared_count - NAMES_SHOWN} more")


def _row(row: TensorRow) -> tuple[str, ...]:
    layer = "" if row.layer is None else str(row.layer)
    count = f"{row.out_of_bounds:,} of {row.cells:,}"
    at = cell_text(row.worst.head, row.worst.token, row.worst.batch).removeprefix(", ")
    return layer, row.boundary, one_line(row.tensor, 90), count, own_error_text(row.worst.error), at


def where(cell: CellAt) -> str:
    """Such as "layer 3, attention, head 2, token 17 of model.layers.3.self_attn.attn"."""
    layer = f"layer {cell.layer}" if cell.layer is not None else "outside of the layers"
    step = f", pass {cell.step}" if cell.step else ""
    return one_line(
        f"{layer}, {cell.boundary}{cell_text(cell.head, cell.token, cell.batch)}{step}, of {cell.tensor}", 400
    )


def error(cell: CellAt) -> str:
    """Such as "error 0.31, bound 0.031"."""
    bound = "every bit must be equal" if cell.bound is None else f"bound {cell.bound:.2g}"
    if isinstance(cell.error, str):
        return f"{cell.error}, {bound}"
    return f"error {cell.error:.2g}, {bound}"


def import_lines(made: Imported) -> list[str]:
    """What became of a dump that was made a pack, in sentences."""
    calls = len(made.manifest.calls)
    checked = (
        f"{made.checked} dumped outputs were checked: they are the attention of their q, k and v."
        if made.checked
        else "No output was dumped: the reference is attention in float64."
    )
    lines = [
        f"{made.passes} passes or calls read; {calls} calls in the pack, {made.with_prefix} with a cached prefix. {checked}"
    ]
    return lines + [f"Refused, {count} x: {one_line(reason, 300)}." for reason, count in made.refused]
