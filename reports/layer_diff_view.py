"""The section "Layer diff" of the page: the variables of its template and its script."""

from __future__ import annotations

from dataclasses import dataclass

from markupsafe import Markup

from assay.harness.evidence.pack import replay_command
from assay.harness.judge.report import ErrorGrid, LayersResult, WorstCall
from assay.reports import charts
from assay.reports.heat_maps import grid_data, worst_grid
from assay.reports.summary import WorstCell, layer_diff_lines, worst_cells

CELLS_SHOWN = CALLS_SHOWN = 10


@dataclass(frozen=True)
class LayerDiffView:
    """A layer diff, with everything that its template needs computed.

    Attributes:
        heads: the large heat maps, of which the reader selects one.
        worst_heads: the one with the worst cell; None if there is no heat map.
        numbers: of the heat maps in the data, by id.
        others: the small heat maps.
        data: all grids as JSON that is safe within a script element.
        lines: a summary in sentences.
        judged: whether a bound applies to any layer.
        replay: command that runs another kernel over the pack.
    """

    layers: LayersResult
    heads: tuple[ErrorGrid, ...]
    worst_heads: ErrorGrid | None
    numbers: dict[int, int]
    others: tuple[ErrorGrid, ...]
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
    heads = tuple(grid for grid in layers.grids if grid.columns == "head")
    return LayerDiffView(
        layers=layers,
        heads=heads,
        worst_heads=worst_grid(heads),
        numbers={id(grid): number for number, grid in enumerate(layers.grids)},
        others=tuple(grid for grid in layers.grids if grid.columns != "head"),
        data=grid_data(layers.grids),
        cells_chart=Markup(charts.cells_chart(layers.depth)),
        layers_chart=Markup(charts.layers_chart(layers.depth)),
        lines=tuple(layer_diff_lines(layers)),
        cells=tuple(worst_cells(layers, CELLS_SHOWN)),
        calls=layers.worst[:CALLS_SHOWN],
        judged=any(row.bound is not None for row in layers.depth),
        replay=replay_command(layers.pack) if layers.pack else "",
    )
