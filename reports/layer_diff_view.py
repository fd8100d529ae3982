"""The section "Layer diff" of the page: the variables of its template and its script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup

from assay.harness.evidence.pack import replay_command
from assay.harness.judge.report import ErrorGrid, LayersResult, WorstCall, excess, out_of_bounds
from assay.harness.text import one_line
from assay.reports import charts
from assay.reports.summary import WorstCell, layer_diff_lines, worst_cells

CELLS_SHOWN = CALLS_SHOWN = 10


@dataclass(frozen=True)
class GridView:
    """A heat map: its index in the page's data, and in words how many of its cells are out of bounds."""

    number: int
    grid: ErrorGrid
    says: str


@dataclass(frozen=True)
class LayerDiffView:
    """A layer diff, with everything that its template needs computed.

    Attributes:
        heads: the large heat maps, of which the reader selects one.
        worst_heads: the one with the worst cell; None if there is no heat map.
        others: the small heat maps.
        data: all grids as JSON that is safe within a script element.
        lines: a summary in sentences.
        judged: whether a bound applies to any layer.
        replay: command that runs another kernel over the pack.
    """

    layers: LayersResult
    heads: tuple[GridView, ...]
    worst_heads: GridView | None
    others: tuple[GridView, ...]
    data: Markup
    cells_chart: Markup
    layers_chart: Markup
    lines: tuple[str, ...]
    cells: tuple[WorstCell, ...]
    calls: tuple[WorstCall, ...]
    replay: str
    judged: bool


def layer_diff_view(layers: LayersResult) -> LayerDiffView:
    """The view of a layer diff."""
    views = grid_views(layers.grids)
    heads = tuple(view for view in views if view.grid.columns == "head")
    return LayerDiffView(
        layers=layers,
        heads=heads,
        worst_heads=worst_view(heads),
        others=tuple(view for view in views if view.grid.columns != "head"),
        data=grid_data(layers.grids),
        cells_chart=Markup(charts.cells_chart(layers.depth)),
        layers_chart=Markup(charts.layers_chart(layers.depth)),
        lines=tuple(layer_diff_lines(layers)),
        cells=tuple(worst_cells(layers, CELLS_SHOWN)),
        calls=layers.worst[:CALLS_SHOWN],
        judged=any(row.bound is not None for row in layers.depth),
        replay=replay_command(layers.pack) if layers.pack else "",
    )


def grid_views(grids: Sequence[ErrorGrid]) -> list[GridView]:
    """The views of some heat maps, numbered as in `grid_data`."""
    return [GridView(number, grid, _says(grid)) for number, grid in enumerate(grids)]


def worst_view(views: Sequence[GridView]) -> GridView | None:
    """The heat map with the worst cell; None if there is none."""
    return max(views, key=lambda view: _worst(view.grid)[0], default=None)


def grid_data(grids: Sequence[ErrorGrid]) -> Markup:
    """What layer_diff.js draws, as JSON that is safe within a script element."""
    return htmlsafe_json_dumps([_payload(grid) for grid in grids], separators=(",", ":"))


def _payload(grid: ErrorGrid) -> dict[str, object]:
    return {
        "title": one_line(f"{grid.title}: {grid.where}"),
        "column": grid.columns,
        "rows": [one_line(label, 40) for label in grid.row_labels],
        "columns": [one_line(label, 40) for label in grid.column_labels],
        "bounds": grid.bounds,
        "values": grid.values,
        "beyond": _beyond(grid),
        "worst": _worst(grid)[1],
    }


def _beyond(grid: ErrorGrid) -> list[list[int]]:
    """Which cells are out of bounds: 1 or 0, rows x columns."""
    rows = zip(grid.values, grid.bounds, strict=True)
    return [[int(out_of_bounds(error, bound)) for error in row] for row, bound in rows]


def _worst(grid: ErrorGrid) -> tuple[float, tuple[int, int]]:
    """The largest excess, and the row and column of the first cell that has it."""
    rows = enumerate(zip(grid.values, grid.bounds, strict=True))
    cells = ((excess(error, bound), (r, c)) for r, (row, bound) in rows for c, error in enumerate(row))
    return max(cells, key=lambda cell: cell[0], default=(-1.0, (0, 0)))


def _says(grid: ErrorGrid) -> str:
    if all(bound is None for bound in grid.bounds):
        return "no bound"
    count = sum(map(sum, _beyond(grid)))
    return f"{count:,} out of bounds" if count else "within bounds"
