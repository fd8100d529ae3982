"""Cells of a shadow run -> the parts of a report."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from assay.harness.evidence.error_table import relative_l1
from assay.harness.judge.error_grids import _own_error, layers_result
from assay.harness.judge.report import NOT_FINITE, ErrorGrid, LayersResult, excess, out_of_bounds, read_report
from assay.harness.statement import Statement, state
from assay.reports.json_report import to_json

INFINITE = float("inf")


def _grid(result: LayersResult, id_: str) -> ErrorGrid:
    [grid] = [grid for grid in result.grids if grid.id == id_]
    return grid


def _only(found: dict[tuple[int, int, str, str, str, str], float]) -> Any:
    return lambda *cell: found.get(cell)


def test_a_cell_is_the_worst_of_what_it_covers_and_not_the_average(layer_diffs: ModuleType) -> None:
    run = layer_diffs.cells(
        1, 2, _only({
            (0, 0, "extend", ">= 16", "0", "only"): 0.9, (0, 0, "extend", ">= 16", "1-15", "only"): 0.01,
            (0, 1, "extend", ">= 16", "1-15", "only"): 0.02, (0, 1, "extend", "1", "1-15", "first"): 0.03,
            (0, 0, "extend", "0", "1-15", "only"): 0.004,
        }),
    )  # fmt: skip
    result = layers_result(run, {(0, "extend"): 0.5})
    assert _grid(result, "extend-cached-prefix-by-head").values == ((0.9, 0.03),)
    assert _grid(result, "extend-no-cached-prefix-by-head").values == ((0.004, None),)
    assert _grid(result, "extend-by-prefix").values == ((0.004, 0.03, None, 0.9),)
    assert _grid(result, "extend-cached-prefix-by-position").values == ((0.9, 0.03, None, None, None),)
    assert _grid(result, "extend-by-batch").values == ((0.9, 0.03, None, None),)
    averaged = relative_l1(sum(run.cells.distance(("layer",), {"prefix": prefix}) for prefix in ("1", ">= 16")))[0]
    assert averaged < 0.5 < 0.9
    assert result.depth[0].out_of_bounds
    assert result.sources == (0,)


def test_not_observed_zero_and_not_finite_are_three_things_in_json_too(
    examples: ModuleType, layer_diffs: ModuleType, tmp_path: Path
) -> None:
    run = layer_diffs.cells(
        2, 2, _only({
            (0, 0, "extend", "0", "0", "only"): 0.0, (0, 1, "extend", "0", "0", "only"): INFINITE,
            (1, 1, "extend", "0", "0", "only"): 0.123456,
        }),
    )  # fmt: skip
    result = layers_result(run, {})
    expected = ((0.0, "not finite"), (None, 0.1235))
    assert _grid(result, "extend-no-cached-prefix-by-head").values == expected
    path = tmp_path / "report.json"
    path.write_text(to_json(examples.passing().model_copy(update={"layers": result})), encoding="utf-8")
    read = read_report(path)
    assert read.layers == result
    written = json.loads(path.read_text())["layers"]["grids"][0]["values"]
    assert written == [[0.0, "not finite"], [None, 0.1235]]


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.tuples(
            st.integers(0, 2), st.integers(0, 2), st.sampled_from(["extend", "decode"]),
            st.sampled_from(["0", "1", ">= 16"]), st.sampled_from(["0", "1-15"]), st.sampled_from(["only", "last"]),
        ),
        st.sampled_from([0.0, 1e-5, 0.01, 0.2, 3.0, INFINITE]),
        min_size=1,
        max_size=12,
    )
)  # fmt: skip
def test_every_picture_shows_the_same_worst(layer_diffs: ModuleType, found: dict[Any, float]) -> None:
    run = layer_diffs.cells(3, 3, _only(found), phases=("extend", "decode"))
    result = layers_result(run, {})
    for phase in ("extend", "decode"):
        for layer in range(3):
            seen = [value for (at, _, p, *_), value in found.items() if (at, p) == (layer, phase)]
            worst = _own_error(max(seen)) if seen else None
            for columns in ("head", "prefix", "batch"):
                grids = [g for g in result.grids if g.columns == columns and g.id.startswith(f"{phase}-")]
                values = [value for grid in grids if layer < len(grid.values) for value in grid.values[layer]]
                assert max(values, key=lambda value: excess(value, None), default=None) == worst
    assert not any(grid.columns == "position" and grid.id.startswith("decode") for grid in result.grids), "one position"
    for row in result.depth:
        assert row.own == _own_error(max(value for (layer, *_), value in found.items() if layer == row.layer))


def test_depth_takes_the_phase_that_is_most_beyond_its_bound(layer_diffs: ModuleType) -> None:
    run = layer_diffs.cells(
        2, 1, _only({
            (0, 0, "extend", "0", "0", "only"): 0.04, (0, 0, "decode", ">= 16", "0", "only"): 0.02,
            (1, 0, "extend", "0", "0", "only"): 0.04,
        }), phases=("extend", "decode"),
    )  # fmt: skip
    bounds = {(0, "extend"): 0.05, (1, "extend"): 0.05, (0, "decode"): 0.01}
    result = layers_result(run, bounds, {0: (0.7, float("nan")), 1: (INFINITE, 0.6)})
    first, second = result.depth
    assert (first.own, first.bound, first.out_of_bounds) == (0.02, 0.01, True)
    assert (second.own, second.bound, second.out_of_bounds) == (0.04, 0.05, False)
    assert (first.total, first.inherited, second.total, second.inherited) == (0.7, None, NOT_FINITE, 0.6)
    assert result.sources == (0,)


def test_a_layer_without_a_bound_is_never_out_of_bounds(layer_diffs: ModuleType) -> None:
    run = layer_diffs.cells(2, 1, _only({(layer, 0, "extend", "0", "0", "only"): 9.0 for layer in (0, 1)}))
    result = layers_result(run, {(1, "extend"): 0.047123})
    assert result.grids[0].bounds == (None, 0.04712)
    assert [row.out_of_bounds for row in result.depth] == [False, True]
    assert [out_of_bounds(x, 0.1) for x in (None, 0.1, 0.2, NOT_FINITE)] == [False, False, True, True]


def test_what_was_not_observed_is_reported(layer_diffs: ModuleType) -> None:
    def seen(found: dict[Any, float], phases: tuple[str, ...]) -> tuple[Statement, ...]:
        run = layer_diffs.cells(2, 1, _only(found), phases=phases, unrecorded={1: "too\nlarge"})
        result: LayersResult = layers_result(run, {})
        return result.not_observed

    at = {(0, 0, "extend", "0", "0", "only"): 0.1, (1, 0, "extend", "0", "0", "only"): 0.1}
    pack = state("calls-not-recorded", layer=1, said="too\nlarge")
    assert seen(at, ("extend",)) == (
        state("condition-not-seen", phase="extend", condition="cached prefix"),
        state("phase-not-computed", phase="decode", candidate="sage_attn_as_shipped"),
        pack,
    )
    both = at | {(0, 0, "extend", ">= 16", "0", "only"): 0.1, (0, 0, "decode", ">= 16", "0", "only"): 0.1}
    assert seen(both, ("extend", "decode")) == (state("layers-not-seen", phase="decode", layers=[1], of=[0, 1]), pack)
    assert seen(at, ("extend", "decode"))[1] == state("phase-not-seen", phase="decode")


def test_failed_calls_come_from_the_legends(layer_diffs: ModuleType) -> None:
    result = layer_diffs.one_head(12, 12)
    text = "RuntimeError: no kernel image\nfor this device"
    assert result.candidate_errors == (state("calls-failed", layer=2, phase="extend", calls=3, said=text),)
    assert (result.layers, result.heads, result.passes) == (12, 12, 62)


def test_a_grid_whose_values_do_not_fit_its_labels_is_refused(layer_diffs: ModuleType) -> None:
    grid = layer_diffs.seed_case().grids[0].model_dump()
    with pytest.raises(ValidationError, match="do not fit 4 row and 3 column"):
        ErrorGrid.model_validate(grid | {"column_labels": ("0", "1", "2")})
    with pytest.raises(ValidationError):
        ErrorGrid.model_validate(grid | {"values": ((INFINITE,) * 4,) * 4})
