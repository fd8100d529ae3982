"""The section "Layer diff" as text: what holds without a browser. `test_browser_layer_diff.py` has the rest."""

from __future__ import annotations

import json
import re
from types import ModuleType
from typing import Any

import pytest

from assay.harness.judge.report import Report, excess, out_of_bounds
from assay.harness.text import percent
from assay.reports import page
from assay.reports.document import Drawing, blocks_of
from assay.reports.layer_section import layer_diff_section
from assay.reports.page import _grid_says, _worst_grid
from assay.reports.run_report import run_document
from assay.reports.summary import worst_cells


def to_html(report: Report) -> str:
    return page.to_html(run_document(report))


@pytest.fixture
def report(examples: ModuleType, layer_diffs: ModuleType) -> Report:
    made: Report = examples.regression().model_copy(update={"layers": layer_diffs.seed_case()})
    return made


def _section(report: Report) -> str:
    [section] = re.findall(r'<section class="layer-diff".*?</section>', to_html(report), re.DOTALL)
    return str(section)


def _shown(page: str) -> str:
    without = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", without).split())


def test_the_embedded_numbers_are_those_of_the_report(report: Report) -> None:
    assert report.layers
    [data] = re.findall(r'<script type="application/json" id="grids">(.*?)</script>', to_html(report), re.DOTALL)
    grids = sorted(report.layers.grids, key=lambda grid: grid.columns != "head")  # in the order of the page
    for embedded, grid in zip(json.loads(data), grids, strict=True):
        assert embedded["values"] == [list(row) for row in grid.values]
        assert embedded["bounds"] == list(grid.bounds)
        beyond = [[out_of_bounds(error, bound) for error in row] for row, bound in zip(grid.values, grid.bounds, strict=True)]
        assert embedded["beyond"] == beyond
        r, c = embedded["worst"]
        worst = max(excess(e, bound) for row, bound in zip(grid.values, grid.bounds, strict=True) for e in row)
        assert excess(grid.values[r][c], grid.bounds[r]) == worst
        assert (embedded["rows"], embedded["columns"]) == (list(grid.row_labels), list(grid.column_labels))


def test_what_a_reader_without_scripts_sees(report: Report) -> None:
    assert report.layers
    section = _section(report)
    text = _shown(section)
    assert section.count('<figure class="heat') == section.count('hidden>\n  <div class="bar">')
    for layer, head, where, error, bound in worst_cells(report.layers, 10):
        assert f"{layer} {head} {where} {percent(error)} {percent(bound)}" in text
    assert "Worst error: layer 0, head 2, extend, cached prefix: 143 %, 31 × its bound 4.7 %." in text
    assert "Out of bounds: all 4 layers." in text
    assert "decode: sage_attn_as_shipped does not compute it" in text
    assert "assay replay runs/20261120-121002/inside/server/pack --candidate module:function" in text


def test_the_map_with_the_worst_cell_is_shown_first(layer_diffs: ModuleType) -> None:
    blocks = blocks_of(layer_diff_section(layer_diffs.one_head(8, 8)).blocks)
    grids: Any = next(block.drawn for block in blocks if isinstance(block, Drawing) and not block.style)
    worst = _worst_grid(grids)
    assert worst is not None
    assert worst.id == "extend-cached-prefix-by-head"
    assert list(map(_grid_says, grids)) == ["within bounds", "2 out of bounds", "within bounds"]


def test_without_bounds_nothing_is_called_within_them(report: Report) -> None:
    assert report.layers
    grids = [grid.model_copy(update={"bounds": (None,) * 4}) for grid in report.layers.grids]
    depth = [row.model_copy(update={"bound": None, "out_of_bounds": False}) for row in report.layers.depth]
    layers = report.layers.model_copy(update={"grids": tuple(grids), "depth": tuple(depth), "sources": ""})
    text = _shown(to_html(report.model_copy(update={"layers": layers})))
    assert "no bound applies. No bound applies to any layer." in text
    assert "extend, cached prefix: no bound" in text
    assert "within bounds" not in text


def test_what_was_compared_with_the_truth_has_a_row_each(report: Report, examples: ModuleType) -> None:
    assert report.layers
    rows = (examples.truth_row(0, "extend", 0.05), examples.truth_row(1, "extend", 0.25))
    section = _section(report.model_copy(update={"layers": report.layers.model_copy(update={"against_truth": rows})}))
    text = _shown(section)
    assert "worst error in layer 1, extend: 25 %, 2.5 × its bound 10 %; largest gain over all heads" in text
    assert "0 extend 1,200 5 % 10 % 0.04 % 0.1 % 0.01 % 0.02 % 1 extend 1,200 25 % 10 %" in text
    assert '<b class="beyond">25\N{NO-BREAK SPACE}%</b>' in section
    assert "Difference from torch_native by layer and head" in text
    assert "Error by layer and head" in _shown(_section(report))
    assert "Against the truth" not in _shown(_section(report))


def test_the_parts_of_whole_layers_are_in_the_table_of_layers(report: Report) -> None:
    assert report.layers
    alone = [row.model_copy(update={"whole": None}) for row in report.layers.depth]
    layers = report.layers.model_copy(update={"depth": tuple(alone)})
    assert "Inherited" not in _shown(_section(report.model_copy(update={"layers": layers})))
    depth = [row.model_copy(update={"whole": 0.2, "inherited": 0.1, "total": 0.3}) for row in report.layers.depth]
    traced = report.layers.model_copy(update={"depth": tuple(depth)})
    assert re.search(r"0 \d+ % [\d.]+ % 20 % 10 % 30 %", _shown(_section(report.model_copy(update={"layers": traced}))))
