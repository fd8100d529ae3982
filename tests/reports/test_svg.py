from __future__ import annotations

import xml.etree.ElementTree as ET

from assay.reports.svg import Scale, axis_below, element, image, interval_chart, rect, text


def test_there_is_no_chart_without_finite_numbers_and_one_where_all_are_equal() -> None:
    assert interval_chart("p", 0.1, None, None, 1.0) == ""
    assert interval_chart("p", None, 0.0, 1.0) == ""
    assert interval_chart("p", float("nan"), 0.0, 1.0) == ""
    assert interval_chart("p", 0.0, 0.0, 0.0, 0.0)


def test_hostile_text_is_escaped() -> None:
    hostile = "\"'><script>&"
    parts = [text(hostile, 0, 0), rect(0, 1, 0, 1, "#000", hostile), element("circle", hostile)]
    root = ET.fromstring(image(10, 10, hostile, [*parts, *axis_below(Scale(0, 1, 0, 1), 0, 2, hostile)]))
    assert root.get("aria-label") == hostile
    assert {found.tag.split("}")[1] for found in root.iter()} == {"svg", "text", "circle", "title", "rect", "line"}
