"""The page of ``assay compare RUN RUN…``: runs side by side."""

from __future__ import annotations

from pathlib import Path

from assay.harness.files import write_whole
from assay.harness.ingest.results.runs_comparison import HeadMaps, RunsComparison
from assay.harness.judge.report import ErrorGrid
from assay.reports.layer_diff_view import GridView, grid_data, grid_views
from assay.reports.page import to_page
from assay.reports.runs_text import worst_text
from assay.reports.summary import VERDICTS

MOST_MAPS = 24
"""Heat maps that the page draws."""


def write_runs_compared(result: RunsComparison, path: Path) -> None:
    """Write the page.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    write_whole(path, to_html(result))


def to_html(result: RunsComparison) -> str:
    """The comparison as one self-contained HTML page."""
    grids = [grid for maps in result.maps for grid in _named(result, maps)][:MOST_MAPS]
    return to_page(
        "runs_compared.html.jinja",
        result.verdict,
        scripts=("page.js", "layer_diff.js"),
        mark=VERDICTS[result.verdict],
        result=result,
        groups=list(dict.fromkeys(row.group for row in result.rows)),
        maps=_by_condition(result, grid_views(grids)),
        data=grid_data(grids),
        left_out=sum(grid is not None for maps in result.maps for grid in maps.grids) - len(grids),
        worst_text=worst_text,
    )


def _named(result: RunsComparison, maps: HeadMaps) -> list[ErrorGrid]:
    """The heat maps of a condition, each titled by its run."""
    return [
        grid.model_copy(update={"title": f"{run.name}: {grid.title}"})
        for run, grid in zip(result.runs, maps.grids, strict=True)
        if grid is not None
    ]


def _by_condition(result: RunsComparison, views: list[GridView]) -> list[tuple[str, list[GridView]]]:
    found: dict[str, list[GridView]] = {maps.where: [] for maps in result.maps}
    for view in views:
        found[view.grid.where].append(view)
    return [(where, here) for where, here in found.items() if here]
