from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from types import ModuleType

import pytest

from assay.harness.judge.answers import ConditionRow, Tally
from assay.harness.judge.report import Metric
from assay.reports import charts
from assay.reports.svg import PALETTE

SVG = "{http://www.w3.org/2000/svg}"


def _all_charts(examples: ModuleType, name: str) -> list[str]:
    suite = getattr(examples, name)().suites[0]
    drawn = [charts.interval_chart(metric) for metric in suite.metrics if metric.bound is not None]
    return list(filter(None, [*drawn, charts.tally_chart(suite.tallies), charts.condition_chart(suite.conditions[:4])]))


@pytest.mark.parametrize("name", ["regression", "hostile"])
def test_charts_are_small_static_images_with_an_alternative_text(examples: ModuleType, name: str) -> None:
    for svg in _all_charts(examples, name):
        root = ET.fromstring(svg)
        assert root.tag == f"{SVG}svg"
        assert root.get("role") == "img"
        assert root.get("aria-label")
        assert len(svg) < 8_000
        assert {element.tag for element in root.iter()} <= {
            f"{SVG}{tag}" for tag in ("svg", "path", "line", "rect", "circle", "text", "title")
        }
        assert not [key for element in root.iter() for key in element.attrib if key == "style" or key.startswith("on")]
        assert float(root.get("width", "inf")) == pytest.approx(charts.WIDTH, abs=2)


def test_alternative_texts_hold_the_numbers(examples: ModuleType) -> None:
    interval, tally, condition = (ET.fromstring(svg).get("aria-label", "") for svg in _all_charts(examples, "regression"))
    assert "loss of accuracy: 85.5, interval 80.7 to 89.4, bound ≤ 5" in interval
    assert "candidate: 31 right, 1 wrong, 224 unparsed of 256" in tally
    assert ">= 16: reference 0.978, candidate 0.000 of 224" in condition


def test_every_colour_follows_the_theme(examples: ModuleType) -> None:
    for svg in _all_charts(examples, "regression"):
        colours = set(re.findall(r'(?:fill|stroke)="(#[^"]+)"', svg))
        assert colours <= set(PALETTE.values())


def test_the_tint_lies_on_the_forbidden_side() -> None:
    def edges(bound_is: str) -> tuple[float, float]:
        metric = Metric.model_validate(
            {"id": "m", "title": "m", "value": 0.5, "text": "", "low": 0.0, "high": 1.0, "bound": 0.5, "bound_is": bound_is}
        )
        root = ET.fromstring(charts.interval_chart(metric))
        tint = next(e for e in root.iter() if e.get("fill") == PALETTE["chart-forbidden"])
        start, width = float(tint.get("x", "nan")), float(tint.get("width", "nan"))
        return start, start + width

    left, middle = edges("least")
    assert edges("most") == pytest.approx((middle, 2 * middle - left), abs=1)


def test_there_is_no_chart_of_nothing() -> None:
    assert charts.interval_chart(Metric(id="p", title="p", value=0.1, text="0.1")) == ""
    assert charts.interval_chart(Metric(id="p", title="p", value=None, text="none", bound=1.0)) == ""
    assert charts.interval_chart(Metric(id="p", title="p", value=float("nan"), text="nan", bound=1.0)) == ""
    assert charts.tally_chart([]) == ""
    assert charts.tally_chart([Tally(role="candidate", right=0, wrong=0, unparsed=0, ran_to_limit=0, total=0)]) == ""
    unseen = ConditionRow(
        id="x-0", by="x", title="x", bucket="0", items=0, reference_right=0, candidate_right=0, candidate_unparsed=0, lost=0
    )  # fmt: skip
    assert charts.condition_chart([unseen]) == ""
    seen = unseen.model_copy(update={"items": 3})
    assert charts.condition_chart([unseen, seen]) == "", "one row is no comparison"
    assert charts.condition_chart([seen, seen])
    assert charts.interval_chart(Metric(id="m", title="m", value=3.0, text="3", bound=1.0)) == "", "a number says it"


def test_a_metric_whose_numbers_are_all_equal_is_drawn() -> None:
    assert charts.interval_chart(Metric(id="m", title="m", value=0.0, text="0", low=0.0, high=0.0, bound=0.0))


@pytest.mark.parametrize(("low", "high", "tick"), [(-0.9, 0.1, "−0.8"), (3.0, 90.0, "80"), (1e-5, 9e-5, "8e-5")])
def test_ticks_read_as_numbers_do(low: float, high: float, tick: str) -> None:
    svg = charts.interval_chart(Metric(id="m", title="m", value=high, text="", low=low, high=high))
    assert tick in [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]
