"""Latency in every report."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from assay.harness.judge.call_counts import CallSummary
from assay.harness.judge.latency_result import worst_ratio
from assay.harness.judge.report import Report
from assay.harness.statement import state
from assay.harness.verdict import Verdict
from assay.reports import page
from assay.reports.run_report import run_document
from assay.reports.summary import latency_lines


def to_html(report: Report) -> str:
    return page.to_html(run_document(report))


@pytest.fixture
def timed(examples: ModuleType) -> Report:
    report: Report = examples.passing()
    return report.model_copy(update={"latency": examples.latency()})


def test_the_page_has_a_section_with_the_worst_ratio_drawn(timed: Report) -> None:
    page = to_html(timed)
    section = page[page.index('<section class="latency"') :].split("</section>")[0].replace("\N{NO-BREAK SPACE}", " ")
    assert "in flight: 1.040 (1.020 to 1.070)" in section[section.index("<svg") :]
    assert "12.30 ms" in section
    assert page.index('<section class="latency"') < page.index('id="checks"')


def test_the_worst_ratio_is_of_the_worst_verdict_and_an_open_interval_reaches_furthest(examples: ModuleType) -> None:
    result = examples.latency()
    first, second = result.rows
    slower = second.model_copy(update={"ratio": 1.2, "high": 1.3})
    assert worst_ratio(result.model_copy(update={"rows": (first, slower)})) is slower
    accused = first.model_copy(update={"verdict": "regression"})
    assert worst_ratio(result.model_copy(update={"rows": (accused, slower)})) is accused
    unknown = second.model_copy(update={"high": None})
    assert worst_ratio(result.model_copy(update={"rows": (unknown, slower)})) is unknown
    assert worst_ratio(result.model_copy(update={"rows": ()})) is None
    assert latency_lines(result.model_copy(update={"rows": ()}))[0].startswith("Of 0 ratios")


COMPILED = CallSummary(
    phase="decode", kernel="triton", backend="triton", calls=1_912, calls_with_cached_prefix=1_912, calls_in_graphs=1_624,
    calls_compiled=1_500, layers=32,
)  # fmt: skip


@pytest.mark.parametrize("verdict", ["pass", "regression"])
def test_ratios_throughputs_and_calls_are_there(timed: Report, examples: ModuleType, verdict: Verdict) -> None:
    result = examples.latency(verdict=verdict).model_copy(update={"candidate_calls": (COMPILED,)})
    shown = to_html(timed.model_copy(update={"latency": result}))
    shown = " ".join(re.sub(r"<(style|script)>.*?</\1>|<[^>]*>", " ", shown, flags=re.DOTALL).split())
    for wanted in (
        "2.000 (1.980 to 2.030)" if verdict == "regression" else "1.040 (1.020 to 1.070)",
        "99th percentile of inter-token latency 10.00 vs 10.00 ms", "80 % vs 80 % of the prompt tokens cached",
        "triton 1,912 1,912 1,624 1,500 32",
    ):  # fmt: skip
        assert wanted in shown, shown


def test_times_of_wrong_answers_are_no_pass_and_say_so_first(examples: ModuleType) -> None:
    note = state("no-gain", faster=True, wrong=[("accuracy", "gsm8k"), ("logits", "")])
    result = examples.latency().model_copy(update={"verdict": "inconclusive", "note": note})
    assert latency_lines(result)[0] == "No speed-up: wrong answers (Questions of gsm8k, Logits)."
