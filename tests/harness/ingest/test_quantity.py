from __future__ import annotations

import pytest

from assay.harness.ingest.quantity import Unit, quantity, spelled, unit_of


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("ms", Unit("time", 1e-3)),
        ("min", Unit("time", 60.0)),
        ("tok/s", Unit("tokens", 1.0)),
        ("tokens per second", Unit("tokens", 1.0)),
        ("req/s", Unit("requests", 1.0)),
        ("requests/min", Unit("requests", 1 / 60)),
        ("GB", None),
        ("%", None),
    ],
)
def test_units_of_times_and_rates_are_known(text: str, unit: Unit | None) -> None:
    assert unit_of(text) == unit


@pytest.mark.parametrize(
    ("name", "called", "unit"),
    [
        ("Median TTFT (ms)", "ttft", Unit("time", 1e-3)),
        ("median_ttft_ms", "ttft", Unit("time", 1e-3)),
        ("Time to first token (s)", "ttft", Unit("time", 1.0)),
        ("output_throughput", "throughput", Unit("tokens", 1.0)),
        ("Output token throughput (tok/s)", "throughput", Unit("tokens", 1.0)),
        ("Request throughput (req/s)", "request throughput", Unit("requests", 1.0)),
        ("mean_e2el_ms", "latency", Unit("time", 1e-3)),
    ],
)
def test_each_spelling_of_a_figure_has_its_common_name(name: str, called: str, unit: Unit) -> None:
    names, found = quantity(name)
    assert called in names
    assert found == unit


def test_a_tail_is_not_called_by_the_name_of_a_typical_one() -> None:
    assert "ttft" not in quantity("p99_ttft_ms")[0]
    assert "p99 ttft" in quantity("P99 TTFT (ms)")[0]


def test_input_is_no_output() -> None:
    assert "throughput" not in quantity("Input token throughput (tok/s)")[0]
    assert spelled("Input_Token  Throughput") == "input throughput"
