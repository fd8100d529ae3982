"""The page of two dumps compared: the first and the worst difference, heat maps by layer and head, the tensors that differ."""

from __future__ import annotations

from pathlib import Path

from assay.harness.files import write_whole
from assay.harness.ingest.tensors.diff import TensorDiff, cell_text
from assay.reports.layer_diff_view import grid_data, grid_views, worst_view
from assay.reports.page import to_page
from assay.reports.tensor_diff_terminal import error, where

ROWS_SHOWN = 100
WORDS = {"pass": "Equal", "regression": "Different", "inconclusive": "Not compared", "error": "Not compared"}


def write_tensor_diff(result: TensorDiff, path: Path) -> None:
    """Write the page.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(path, to_html(result))


def to_html(result: TensorDiff) -> str:
    """The result as one self-contained HTML page."""
    views = tuple(grid_views(result.grids))
    return to_page(
        "tensor_diff.html.jinja",
        result.verdict,
        scripts=("page.js", "layer_diff.js"),
        result=result,
        word=WORDS[result.verdict],
        views=views,
        worst=worst_view(views),
        data=grid_data(result.grids),
        cells=[
            (name, where(cell), error(cell))
            for name, cell in (("First", result.first), ("Worst", result.worst))
            if cell
        ],
        rows=[row for row in result.tensors if row.out_of_bounds][:ROWS_SHOWN],
        place=lambda cell: cell_text(cell.head, cell.token, cell.batch).removeprefix(", "),
    )
