from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from assay.reports.svg import PALETTE, Scale, axis_below, element, image, interval_chart, rect, text

SVG = "{http://www.w3.org/2000/svg}"


def test_an_interval_is_a_small_static_image_in_the_colours_of_the_page() -> None:
    svg = interval_chart("loss: 85.5, bound <= 5", 85.5, 80.7, 89.4, 5.0)
    root = ET.fromstring(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label") == "loss: 85.5, bound <= 5"
    assert len(svg) < 8_000
    assert {found.tag for found in root.iter()} == {f"{SVG}{tag}" for tag in ("svg", "line", "rect", "circle", "text")}
    assert set(re.findall(r'(?:fill|stroke)="(#[^"]+)"', svg)) <= set(PALETTE.values())


def test_the_tint_lies_beyond_the_bound() -> None:
    root = ET.fromstring(interval_chart("m", 0.5, 0.0, 1.0, 0.5))
    tint = next(e for e in root.iter() if e.get("fill") == PALETTE["chart-forbidden"])
    point = next(e for e in root.iter() if e.tag.endswith("circle"))
    assert float(tint.get("x", "nan")) == pytest.approx(float(point.get("cx", "nan")), abs=1)


def test_there_is_no_chart_without_finite_numbers_and_one_where_all_are_equal() -> None:
    assert interval_chart("p", 0.1, None, None, 1.0) == ""
    assert interval_chart("p", None, 0.0, 1.0) == ""
    assert interval_chart("p", float("nan"), 0.0, 1.0) == ""
    assert interval_chart("p", 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 1.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (-0.9, 0.1, ["−0.8", "−0.6", "−0.4", "−0.2", "0"]),
        (3.0, 90.0, ["20", "40", "60", "80"]),
        (1e-5, 9e-5, ["2e−05", "4e−05", "6e−05", "8e−05"]),
        (0.0, 250_000.0, ["0", "50000", "100000", "150000", "200000", "250000"]),
    ],
)
def test_ticks_are_round_numbers_within_the_axis(low: float, high: float, labels: list[str]) -> None:
    drawn = "".join(axis_below(Scale(low, high, 0, 100), 0, 5))
    assert re.findall(r">([^<]+)</text>", drawn) == labels


def test_hostile_text_is_escaped() -> None:
    hostile = "\"'><script>&"
    parts = [text(hostile, 0, 0), rect(0, 1, 0, 1, "#000", hostile), element("circle", hostile)]
    root = ET.fromstring(image(10, 10, hostile, [*parts, *axis_below(Scale(0, 1, 0, 1), 0, 2, hostile)]))
    assert root.get("aria-label") == hostile
    assert {found.tag.split("}")[1] for found in root.iter()} == {"svg", "text", "circle", "title", "rect", "line"}
