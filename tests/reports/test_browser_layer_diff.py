"""The heat maps in a real Chromium: their numbers, their colours, the keyboard, and 128 layers of 128 heads."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from assay.harness.judge.report import ErrorGrid, LayersResult, Report
from assay.harness.text import percent
from assay.reports import page
from assay.reports.run_report import run_document

pytestmark = pytest.mark.browser

MAIN = ".heat:not(.small)"
_PLACE = """
const canvas = document.querySelector(arguments[0] + ' canvas'), [rows, columns, r, c, at] = [...arguments].slice(1);
canvas.scrollIntoView({block: 'center'});
const ratio = devicePixelRatio || 1, [left, right, above, below] = [30, 34, 4, 38];
const w = (canvas.width / ratio - left - right) / columns, h = (canvas.height / ratio - above - below) / rows;
const box = canvas.getBoundingClientRect();
return [box.left + left + (c + at) * w, box.top + above + (r + at) * h];
"""
_PIXEL = """
const canvas = document.querySelector(arguments[0] + ' canvas'), ratio = devicePixelRatio || 1;
const box = canvas.getBoundingClientRect();
const [x, y] = [(arguments[1] - box.left) * ratio, (arguments[2] - box.top) * ratio];
return [...canvas.getContext('2d').getImageData(Math.round(x), Math.round(y), 1, 1).data];
"""


def to_html(report: Report) -> str:
    return page.to_html(run_document(report))


@pytest.fixture
def see(visit: Callable[..., Any], examples: ModuleType) -> Callable[..., Any]:
    def see(layers: LayersResult, **size: int) -> Any:
        return visit(examples.regression().model_copy(update={"layers": layers}), **size)

    return see


def _hover(chrome: Any, x: float, y: float) -> None:
    event = {"type": "mouseMoved", "x": x, "y": y, "pointerType": "mouse"}
    chrome.execute_cdp_cmd("Input.dispatchMouseEvent", event)


def _tip(chrome: Any, where: str = MAIN) -> str:
    tip = chrome.find_element("css selector", f"{where} .tip")
    return str(tip.text) if tip.is_displayed() else ""


def _place(chrome: Any, grid: ErrorGrid, row: int, column: int, where: str = MAIN, at: float = 0.5) -> tuple[float, float]:
    size = (len(grid.row_labels), len(grid.column_labels))
    x, y = chrome.execute_script(_PLACE, where, *size, row, column, at)
    return x, y


def _colour(chrome: Any, grid: ErrorGrid, row: int, column: int, where: str = MAIN) -> tuple[int, ...]:
    # Off the middle, where a number or a cross may stand.
    x, y = _place(chrome, grid, row, column, where, at=0.15)
    return tuple(chrome.execute_script(_PIXEL, where, x, y)[:3])


def _choose(chrome: Any, number: int) -> None:
    chrome.find_element("css selector", f"{MAIN} option[value='{number}']").click()


def _in_order(layers: LayersResult) -> list[ErrorGrid]:
    """The heat maps in the order of the page."""
    return sorted(layers.grids, key=lambda grid: grid.columns != "head")


def _number(layers: LayersResult, id_: str) -> int:
    [number] = [i for i, grid in enumerate(_in_order(layers)) if grid.id == id_]
    return number


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [4, 32, 128])
def test_hovering_reads_the_numbers_of_the_report(see: Any, layer_diffs: ModuleType, size: int) -> None:
    layers = layer_diffs.seed_case() if size == 4 else layer_diffs.one_head(size, size)
    chrome = see(layers)
    assert chrome.get_log("browser") == []
    for name in ("extend-no-cached-prefix-by-head", "extend-cached-prefix-by-head"):
        number = _number(layers, name)
        _choose(chrome, number)
        grid = _in_order(layers)[number]
        for row, column in {(0, 0), (size - 1, 0), (size // 2, size - 1), (size // 2 + 1, size // 6), (size - 3, size - 2)}:
            _hover(chrome, *_place(chrome, grid, row, column))
            value, bound = grid.values[row][column], grid.bounds[row]
            assert bound is not None
            says = "not finite" if isinstance(value, str) else f"relative L1 {percent(value)}"
            beyond = isinstance(value, str) or value > bound
            title, error, held = _tip(chrome).split("\n")
            assert (title, error) == (f"layer {row}, head {column}", says)
            assert held.startswith(f"bound {percent(bound)}")
            assert held.endswith("out of bounds") == beyond
    _hover(chrome, 2, 2)
    assert _tip(chrome) == ""


def test_colours_distinguish_the_kinds_of_cells(see: Any, layer_diffs: ModuleType) -> None:
    layers = layer_diffs.one_head(12, 12)
    chrome = see(layers)
    number = _number(layers, "extend-cached-prefix-by-head")
    grid = _in_order(layers)[number]
    assert chrome.find_element("css selector", f"{MAIN} select").get_property("value") == str(number), "the worst first"
    within, beyond, unfinite = (_colour(chrome, grid, *cell) for cell in ((0, 0), (7, 2), (9, 10)))
    assert within[2] > within[0] + 20, f"{within} is no blue"
    assert beyond[0] > beyond[2] + 80, f"{beyond} is no orange"
    assert unfinite == (0, 0, 0)
    _choose(chrome, _number(layers, "decode-cached-prefix-by-head"))
    grey = {_colour(chrome, grid, 3, column) for column in range(12)}
    assert all(max(c) - min(c) < 12 and min(c) > 180 for c in grey), f"{grey}: layer 3 was not observed there"
    _hover(chrome, *_place(chrome, grid, 3, 4))
    assert _tip(chrome) == "layer 3, head 4\nnot observed"


def test_a_worse_cell_has_a_stronger_colour_and_the_bound_divides_blue_from_orange(see: Any, layer_diffs: ModuleType) -> None:
    layers = layer_diffs.seed_case()
    number = _number(layers, "extend-no-cached-prefix-by-head")
    values = ((0.0, 0.0005, 0.02, 0.0467), (0.0469, 0.2, 3.0, 4.0), *_in_order(layers)[number].values[2:])
    grid = _in_order(layers)[number].model_copy(update={"values": values, "bounds": (0.0468,) * 4})
    grids = tuple(grid if i == number else other for i, other in enumerate(layers.grids))
    chrome = see(layers.model_copy(update={"grids": grids}))
    _choose(chrome, number)
    shades = [_colour(chrome, grid, row, column) for row in (0, 1) for column in range(4)]
    assert [colour[2] > colour[0] for colour in shades] == [True] * 4 + [False] * 4
    sums = [sum(colour) for colour in shades]
    assert sums[:4] == sorted(sums[:4], reverse=True)
    assert sums[4:] == sorted(sums[4:], reverse=True)


def test_the_keyboard_reads_cells_and_the_button_goes_to_the_worst(see: Any, layer_diffs: ModuleType) -> None:
    chrome = see(layer_diffs.one_head(12, 12))
    chrome.find_element("css selector", f"{MAIN} button").click()
    assert _tip(chrome).startswith("layer 9, head 10\nnot finite")
    canvas = chrome.switch_to.active_element
    assert canvas.tag_name == "canvas"
    assert "12 rows, 12 columns, 2 cells out of bounds" in canvas.get_attribute("aria-label")
    for key, expected in (
        ("\ue013", "layer 8, head 10"), ("\ue012", "layer 8, head 9"), ("\ue011", "layer 8, head 0"),
        ("\ue00f", "layer 11, head 0"), ("\ue014", "layer 11, head 1"), ("\ue010", "layer 11, head 11"),
        ("\ue015", "layer 11, head 11"),
    ):  # fmt: skip
        canvas.send_keys(key)
        assert _tip(chrome).split("\n")[0] == expected
    canvas.send_keys("\ue00c")
    assert _tip(chrome) == ""


def test_small_maps_read_like_the_large_one(see: Any, layer_diffs: ModuleType) -> None:
    layers = layer_diffs.seed_case()
    chrome = see(layers)
    number = _number(layers, "extend-by-prefix")
    where = f".heat.small[data-grid='{number}']"
    chrome.execute_script("for (const d of document.querySelectorAll('.layer-diff details')) d.open = true")
    _hover(chrome, *_place(chrome, _in_order(layers)[number], 2, 3, where))
    assert _tip(chrome, where).startswith(
        f"layer 2, cached prefix >= 16\nrelative L1 {percent(_in_order(layers)[number].values[2][3])}"
    )
    assert len(chrome.find_elements("css selector", ".heat.small canvas")) == sum(g.columns != "head" for g in layers.grids)


@pytest.mark.slow
def test_128_layers_of_128_heads_load_in_seconds(see: Any, examples: ModuleType, layer_diffs: ModuleType) -> None:
    layers = layer_diffs.one_head(128, 128)
    heads = [grid for grid in layers.grids if grid.columns == "head"]
    four = layers.model_copy(update={"grids": (*layers.grids, heads[0])})
    assert len(heads) == 3
    page = to_html(examples.regression().model_copy(update={"layers": four}))
    assert len(page.encode()) < 3_000_000
    chrome = see(four)
    timing = "const t = performance.getEntriesByType('navigation')[0]; return t.loadEventEnd - t.startTime"
    # The goal is a second. Three on a busy machine tell a page that is drawn in steps of n from one of steps of n * n.
    loads: list[float] = []
    while not loads or (min(loads) >= 3_000 and len(loads) < 10):
        chrome.refresh()
        loads.append(chrome.execute_script(timing))
    assert min(loads) < 3_000, loads
    drawing = "const select = document.querySelector('.heat select'), begun = performance.now();"
    drawing += "select.selectedIndex = 0; select.dispatchEvent(new Event('change')); return performance.now() - begun"
    assert min(chrome.execute_script(drawing) for _ in range(3)) < 1_000


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [4, 128])
def test_a_narrow_page_shows_every_cell_and_does_not_scroll_sideways(see: Any, layer_diffs: ModuleType, size: int) -> None:
    layers = layer_diffs.seed_case() if size == 4 else layer_diffs.one_head(128, 128)
    chrome = see(layers, width=400, height=800)
    assert chrome.execute_script("return document.documentElement.scrollWidth") == 400
    number = int(chrome.find_element("css selector", f"{MAIN} select").get_property("value"))
    _hover(chrome, *_place(chrome, _in_order(layers)[number], size - 1, size - 1))
    assert _tip(chrome).startswith(f"layer {size - 1}, head {size - 1}")
    box = chrome.execute_script("return document.querySelector('.heat .tip').getBoundingClientRect().toJSON()")
    assert 0 <= box["left"] < box["right"] <= 400


def test_without_scripts_the_tables_replace_the_maps(
    chrome_without_scripts: Any, screenshot: Any, examples: ModuleType, layer_diffs: ModuleType, tmp_path: Path
) -> None:
    chrome, page = chrome_without_scripts, tmp_path / "report.html"
    page.write_text(to_html(examples.regression().model_copy(update={"layers": layer_diffs.seed_case()})), encoding="utf-8")
    screenshot.open_page(chrome, page)
    assert not [e for e in chrome.find_elements("css selector", ".heat, .key") if e.is_displayed()]
    chrome.find_element("xpath", "//summary[. = 'Worst cells']").click()
    rows = [row for row in chrome.find_elements("css selector", ".layer-diff .cells tbody tr") if row.is_displayed()]
    assert len(rows) == 10
    assert re.fullmatch(r"0 2 extend, cached prefix 143 % 4\.7 %", rows[0].text)
