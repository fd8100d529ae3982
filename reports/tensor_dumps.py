"""The document of two dumps compared."""

from __future__ import annotations

from assay.harness.ingest.tensors.tensor_diff import CellAt, TensorDiff, TensorRow, cell_text
from assay.harness.text import counted, one_line
from assay.harness.verdict import Verdict
from assay.reports.document import Block, Cell, Document, Facts, HeatMaps, Items, Line, Only, Section, Table, Words
from assay.reports.summary import number

_TENSORS_SHOWN, _NAMES_SHOWN = 100, 100
"""Most rows of the page; a terminal shows fewer."""
_WORDS: dict[Verdict, str] = {"pass": "Equal", "regression": "Different", "inconclusive": "Not compared"}
_COLUMNS = ("layer", "boundary", "tensor", "cells out of bounds", "worst error", "bound", "first", "worst")


def tensor_diff_document(result: TensorDiff) -> Document:
    """The first and the worst difference, heat maps by layer and head, the tensors that differ, and what was not compared."""
    return Document(
        command="tensors diff",
        title="two dumps",
        verdict=result.verdict,
        word=_WORDS[result.verdict],
        headline=f"{one_line(result.headline, 400)}.",
        crumbs=[f"{result.seconds:.2f} s"],
        body=[_what(result), *_differences(result), *_maps(result), *_tensors(result), *_not_compared(result)],
        result=result,
    )


def _what(result: TensorDiff) -> Facts:
    speed = f", {result.bytes / 1e9 / result.seconds:.1f} GB/s" if result.seconds > 0 else ""
    empty = f"; {counted(result.empty, 'pair')} without an element: not counted" if result.empty else ""
    pairs = (
        f"{result.compared:,}: {result.identical:,} identical, {result.within:,} within bounds, {result.differing:,} out of "
        f"bounds{empty}"
    )
    mode = "bit for bit" if result.exact else "each token and head"
    return Facts([
        ("A, the reference", Cell(one_line(result.a), code=True)),
        ("B, the candidate", Cell(one_line(result.b), code=True)),
        ("format", result.format),
        ("pairs", pairs),
        ("compared", f"{result.bytes / 1e6:,.1f} MB, {mode}, in {result.seconds:.2f} s{speed}"),
    ])  # fmt: skip


def _differences(result: TensorDiff) -> list[Block]:
    same = result.first == result.worst
    cells = {"First and worst": result.first} if same else {"First": result.first, "Worst": result.worst}
    lines = [Line((Cell(name, "strong"), f": {_where(cell)}: {_error(cell)}")) for name, cell in cells.items() if cell]
    return [Section("differences", "Differences", lines)] if lines else []


def _maps(result: TensorDiff) -> list[Block]:
    explained = "A bound is what rounding to the tensors’ dtype explains, or the tolerance that was given."
    about = (
        "Each cell is the worst token of all tensors of this boundary in the layer. Σ|B − A| / Σ|A| over one token of one head. "
        f"{'Every bit must be equal.' if result.exact else explained} "
        "An error in an early boundary is inherited by those after it."
    )
    maps = Section("maps", "By layer and head", [Line(about, "quiet"), HeatMaps(result.grids)])
    return [Only("page", [maps])] if result.grids else []


def _tensors(result: TensorDiff) -> list[Block]:
    rows = [_row(row) for row in result.tensors if row.out_of_bounds][:_TENSORS_SHOWN]
    if not rows:
        return []
    table = Table(_COLUMNS, rows, numbers=(0, 3, 4, 5), most=12)
    left = result.differing - len(rows)
    more: list[Block] = [Line(f"and {left:,} more", "quiet")] if left > 0 else []
    return [Section("tensors", "Tensors that differ, in depth order", [table, *more], announced=True)]


def _not_compared(result: TensorDiff) -> list[Block]:
    lines = [one_line(line, 300) for line in result.not_compared[:_NAMES_SHOWN]]
    left = result.not_compared_count - len(lines)
    more: list[Block] = [Line(f"and {left:,} more", "quiet")] if left > 0 else []
    return [Section("not-compared", "Not compared", [Items(lines, most=8), *more], announced=True)] if lines else []


def _row(row: TensorRow) -> tuple[Words, ...]:
    return (
        "" if row.layer is None else str(row.layer),
        row.boundary,
        Cell(one_line(row.tensor, 90), code=True),
        f"{row.out_of_bounds:,} of {row.cells:,}",
        Cell(row.worst.error if isinstance(row.worst.error, str) else number(row.worst.error), "beyond"),
        number(row.worst.bound),
        _place(row.first),
        _place(row.worst),
    )


def _place(cell: CellAt | None) -> str:
    return cell_text(cell.head, cell.token, cell.batch).removeprefix(", ") if cell else ""


def _where(cell: CellAt) -> str:
    """Such as "layer 3, attention, head 2, token 17, of model.layers.3.self_attn.attn"."""
    layer = f"layer {cell.layer}" if cell.layer is not None else "outside of the layers"
    step = f", pass {cell.step}" if cell.step else ""
    return one_line(
        f"{layer}, {cell.boundary}{cell_text(cell.head, cell.token, cell.batch)}{step}, of {cell.tensor}", 400
    )


def _error(cell: CellAt) -> str:
    """Such as "error 0.31, bound 0.031"."""
    bound = "every bit must be equal" if cell.bound is None else f"bound {cell.bound:.2g}"
    return f"{cell.error if isinstance(cell.error, str) else f'error {cell.error:.2g}'}, {bound}"
