"""The section "Layer diff" of a run's page."""

from __future__ import annotations

from collections import defaultdict

from assay.harness.evidence.pack import replay_command
from assay.harness.judge.report import DepthRow, LayersResult, OwnError, TruthRow, excess, out_of_bounds
from assay.harness.text import counted, one_line
from assay.reports.document import Block, Cell, Code, Drawing, Items, Line, Section, Table, Words
from assay.reports.summary import error_percent, layer_diff_lines, worst_cells
from assay.reports.wording.say import say

_SHOWN, _LAYERS = 10, 12
_TRUTH = ("Layer", "Phase", "Cells", "Own error", "Bound", "Gain", "Bound", "Reference’s own error", "Bound")


def layer_diff_section(layers: LayersResult) -> Section:
    """Build the section on each layer's distance from the truth or the reference: maps, tables, and the worst cells."""
    judged = any(row.bound is not None for row in layers.depth)
    lead, *lines = layer_diff_lines(layers)
    details: list[Block] = [Line(_about(layers, judged), "quiet after"), *_maps(layers), *_truth(layers)]
    details.append(Section("Worst cells", _cells(layers), folded=True))
    if layers.not_observed:
        details.append(Section("Not observed", [Items(tuple(map(say, layers.not_observed)))]))
    if layers.candidate_errors:
        errors = [one_line(say(failed), 400) for failed in layers.candidate_errors[:_SHOWN]]
        details.append(Section("Calls that the candidate failed to compute", [Items(errors)]))
    if layers.pack:
        about = "Run another kernel over the recorded calls, without a server or a model"
        details.append(Code(replay_command(layers.pack), about))
    blocks = [*map(Line, lines), *_by_prefix(layers), Section("", [*details, *_depth(layers)], detail=True)]
    return Section(
        "Layer diff", blocks, "layer-diff", folded=judged and not layers.sources, lead=lead, style="layer-diff",
    )  # fmt: skip


def _by_prefix(layers: LayersResult) -> list[Block]:
    """Tabulate errors by layer and cached prefix, the layers farthest beyond their bounds first."""
    grids = [grid for grid in layers.grids if grid.columns == "prefix"]
    columns: dict[str, None] = {}
    cells: dict[str, dict[str, Cell]] = defaultdict(dict)
    worst: dict[str, float] = defaultdict(lambda: -1.0)
    for grid in grids:
        for layer, prefix, error, bound in grid.observed():
            column = one_line(f"{grid.where}, prefix {prefix}", 60)
            columns[column] = None
            beyond = out_of_bounds(error, bound)
            note = "out of bounds" if beyond else ""
            cells[layer][column] = Cell(error_percent(error), "beyond" if beyond else "", note=note)
            worst[layer] = max(worst[layer], excess(error, bound))
    order = sorted(cells, key=lambda layer: -worst[layer])
    rows: list[list[Words]] = [
        [one_line(layer), *(cells[layer].get(column, Cell("–")) for column in columns)] for layer in order
    ]
    table = Table(("Layer", *columns), rows, numbers=range(1, len(columns) + 1), style="cells", most=_LAYERS)
    return [Section("By layer and cached prefix, the worst first", [table], folded=True)] if rows else []


def _about(layers: LayersResult, judged: bool) -> str:
    against = (
        "Its output is compared with the truth (attention in float64) on sampled queries, and with the reference’s output on all "
        "of them. Relative L1, Σ|candidate − expected| / Σ|expected|."
        if layers.against_truth
        else "The outputs are compared. Relative L1, Σ|candidate − reference| / Σ|reference|."
    )
    bound = "A bound is the error that rounding explains at the worst cell." if judged else "No bound applies."
    return (
        f"Error: {layers.candidate} computes each attention call of {layers.reference} from the same q, k and v. {against} "
        f"{counted(layers.layers, 'layer')}, {counted(layers.heads, 'head')}, {layers.passes:,} forward passes. {bound}"
    )


def _depth(layers: LayersResult) -> list[Block]:
    """Tabulate each layer's worst cell, and its own, inherited and total error if a free-running candidate was traced."""
    traced = any(row.total is not None and row.whole is not None for row in layers.depth)
    note = (
        "Total: a layer’s output where the candidate serves, against the reference’s. Earlier layers: the part that comes from the "
        "layers before. This layer: the rest. A cell is a part of a layer, so its error may be larger."
    )
    columns = ("Layer", "Worst cell", "Bound", *(("This layer", "Earlier layers", "Total") if traced else ()))
    rows = [_depth_row(row, traced) for row in layers.depth]
    table = Table(columns, rows, note=note if traced else "", numbers=range(len(columns)), style="cells")
    return [Section("Errors by layer", [table], folded=True)] if rows else []


def _depth_row(row: DepthRow, traced: bool) -> tuple[Words, ...]:
    whole = map(error_percent, (row.whole, row.inherited, row.total)) if traced else ()
    return (str(row.layer), _error(row.own, row.out_of_bounds), error_percent(row.bound), *whole)


def _truth(layers: LayersResult) -> list[Block]:
    note = (
        "Each error is that of the cell nearest to its bound or farthest beyond it. The gain is over all heads, without its "
        "sign. Marked: a cell, or the gain of a head, is out of bounds."
    )
    table = Table(
        _TRUTH, list(map(_truth_row, layers.against_truth)), note=note, numbers=(0, *range(2, 9)), style="cells"
    )
    return [Section("Against the truth, by layer and phase", [table], folded=True)] if layers.against_truth else []


def _truth_row(row: TruthRow) -> tuple[Words, ...]:
    errors = (row.bound, row.gain, row.gain_bound, row.reference_own, row.reference_bound)
    own = _error(row.own, row.out_of_bounds)
    return (str(row.layer), one_line(row.phase), f"{row.cells:,}", own, *map(error_percent, errors))


def _error(error: OwnError, beyond: bool) -> Cell:
    return Cell(error_percent(error), "beyond" if beyond else "")


def _maps(layers: LayersResult) -> list[Block]:
    heads = [grid for grid in layers.grids if grid.columns == "head"]
    others = [grid for grid in layers.grids if grid.columns != "head"]
    if not heads:
        return []
    title = f"Difference from {layers.reference}" if layers.against_truth else "Error"
    about = Line("Each cell is the worst over query positions and places in the batch, not the average.", "quiet")
    by = "By cached prefix, position and place in the batch"
    small: list[Block] = [Section(by, [Drawing(others, "small")], folded=True)] if others else []
    return [Section(f"{title} by layer and head", [about, Drawing(heads), *small])]


def _cells(layers: LayersResult) -> list[Block]:
    error = "Difference" if layers.against_truth else "Error"
    rows: list[tuple[Words, ...]] = []
    for *place, own, bound in worst_cells(layers, _SHOWN):
        rows.append((*map(one_line, place), _error(own, out_of_bounds(own, bound)), error_percent(bound)))
    table = Table(("Layer", "Head", "Calls", error, "Bound"), rows, numbers=(0, 1, 3, 4), style="cells")
    return [table] if rows else []
