from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from assay.reports.svg import (
    LegendKey,
    LinearScale,
    axis_below,
    element,
    image,
    legend,
    log_axis_beside,
    mark,
    text,
    text_width,
    ticks,
)


@pytest.mark.parametrize(
    ("low", "high", "about", "expected"),
    [
        (0.0, 1.0, 5, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (-0.9, 0.1, 5, [-0.8, -0.6, -0.4, -0.2, 0.0]),
        (0.87, 2.1, 5, [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]),
        (1e-5, 9e-5, 4, [2e-5, 4e-5, 6e-5, 8e-5]),
        (3.0, 3.0, 5, [3.0]),
    ],
)
def test_ticks_are_round_numbers_within_the_axis(low: float, high: float, about: int, expected: list[float]) -> None:
    assert ticks(low, high, about) == expected


@pytest.mark.parametrize(("most", "expected"), [(2, [0, 1, 2]), (127, [0, 20, 40, 60, 80, 100, 120])])
def test_ticks_of_counts_are_integers(most: int, expected: list[float]) -> None:
    assert ticks(0, most, 8, whole=True) == expected


@pytest.mark.parametrize(
    ("at", "labels"),
    [
        ([-0.8, 0.0, 0.25], ["−0.8", "0", "0.25"]),
        ([0.0, 2e-5, -4e-5], ["0", "2e-5", "−4e-5"]),
        ([100_000.0, 250_000.0], ["100000", "250000"]),
        ([1e6, 2.5e6], ["1e6", "2.5e6"]),
        ([], []),
    ],
)
def test_tick_labels(at: list[float], labels: list[str]) -> None:
    drawn = "".join(axis_below(LinearScale(-1, 1, 0, 100), 0, at, rule=False))
    assert re.findall(r">([^<]+)</text>", drawn) == labels


def test_scales() -> None:
    linear = LinearScale(0, 10, 100, 200)
    assert (linear(0), linear(5), linear(10)) == (100, 150, 200)
    falling = LinearScale(0.01, 100, 200, 0, log=True)
    assert [falling(x) for x in (0.01, 1, 100)] == pytest.approx([200, 100, 0])


def test_a_log_axis_labels_powers_of_ten_and_not_too_many() -> None:
    def labels(low: float, high: float) -> list[str | None]:
        parts = log_axis_beside(LinearScale(0, 1, 50, 100), LinearScale(low, high, 200, 0, log=True))
        return [part.text for part in ET.fromstring(image(100, 200, "", parts)).iter("{http://www.w3.org/2000/svg}text")]

    assert labels(0.01, 1) == ["0.01", "0.1", "1"]
    assert labels(0.25, 30) == ["1", "10"]
    assert len(labels(1e-30, 1e30)) <= 9


def test_hostile_text_is_escaped() -> None:
    hostile = "\"'><script>&"
    parts = [text(hostile, 0, 0), mark("circle", 0, 0, 1, "#000", hostile), element("rect", x=1, clip_path=None)]
    parts += [*legend([LegendKey(hostile, "#000", "square")]), *axis_below(LinearScale(0, 1, 0, 1), 0, [0.0], hostile)]
    root = ET.fromstring(image(10, 10, hostile, parts))
    assert root.get("aria-label") == hostile
    assert {found.tag.split("}")[1] for found in root.iter()} == {"svg", "text", "circle", "title", "rect", "line"}


def test_text_width_grows_with_wide_characters() -> None:
    assert text_width("il", 12) <= text_width("aa", 12) < text_width("AA", 12) < text_width("漢字", 12)
