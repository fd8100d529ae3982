"""Latency in every report, and the page of a bench that was not part of a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO
from types import ModuleType

import pytest
from rich.console import Console

from assay.harness.judge.call_counts import CallSummary
from assay.harness.judge.latency_result import worst_ratio
from assay.harness.judge.report import Report
from assay.harness.verdict import Verdict
from assay.reports import junit, markdown, page
from assay.reports.bench_report import bench_document
from assay.reports.run_report import run_document
from assay.reports.summary import latency_lines
from assay.reports.terminal import render


def to_html(report: Report) -> str:
    return page.to_html(run_document(report))


def to_markdown(report: Report) -> str:
    return markdown.to_markdown(run_document(report))


def to_junit(report: Report) -> str:
    return junit.to_junit(run_document(report))


def printed(report: Report, width: int | None = None) -> str:
    out = StringIO()
    console = Console(file=out, width=width or 400, force_terminal=width is not None, no_color=True)
    render(run_document(report), console)
    return out.getvalue()


RENDERERS: dict[str, Callable[[Report], str]] = {
    "html": lambda report: re.sub(r"<[^>]*>|\s+", " ", to_html(report)),
    "markdown": lambda report: to_markdown(report).replace("\\", ""),
    "terminal": printed,
    "wide terminal": lambda report: printed(report, 250),
    "junit": to_junit,
}


@pytest.fixture
def timed(examples: ModuleType) -> Report:
    report: Report = examples.passing()
    return report.model_copy(update={"latency": examples.latency()})


@pytest.mark.parametrize("name", RENDERERS)
def test_every_report_says_the_worst_ratio_with_floor_bound_and_policy(timed: Report, name: str) -> None:
    text = " ".join(RENDERERS[name](timed).split())
    for wanted in (
        "time to first token, short, 4 in flight",
        "1.040 (1.020 to 1.070)",
        "1.002 (0.987 to 1.013)",
        "bound 1.1, set by latency_bound = 1.1 (default)",
        "candidate 12.5 tokens on average, reference 12.0",
    ):
        assert wanted in text


@pytest.mark.parametrize("name", RENDERERS)
def test_every_report_names_the_line_of_policy_of_a_suites_bound(examples: ModuleType, name: str) -> None:
    report: Report = examples.regression()
    suite = report.suites[0]
    metric = suite.metrics[0].model_copy(update={"policy": "margin = 0.07 (assay.toml, [policy])"})
    changed = suite.model_copy(update={"metrics": (metric, *suite.metrics[1:])})
    assert "margin = 0.07 (assay.toml, [policy])" in RENDERERS[name](report.model_copy(update={"suites": (changed,)}))


def test_the_page_has_a_section_with_the_worst_ratio_drawn(timed: Report) -> None:
    page = to_html(timed)
    section = page[page.index('<section class="latency"') :].split("</section>")[0]
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


@pytest.mark.parametrize(("verdict", "word"), [("pass", "Pass"), ("regression", "Regression")])
def test_verdict_ratios_throughputs_and_calls_are_there(examples: ModuleType, verdict: Verdict, word: str) -> None:
    result = examples.latency(verdict=verdict).model_copy(update={"candidate_calls": (COMPILED,)})
    shown = page.to_html(bench_document(result))
    assert f'<header class="verdict {verdict}">' in shown
    shown = " ".join(re.sub(r"<(style|script)>.*?</\1>|<[^>]*>", " ", shown, flags=re.DOTALL).split())
    for wanted in (
        f"{word} ", "2.000 (1.980 to 2.030)" if verdict == "regression" else "1.040 (1.020 to 1.070)",
        "99th percentile of inter-token latency 10.00 vs 10.00 ms", "80 % vs 80 % of the prompt tokens cached",
        "triton 1,912 1,912 1,624 1,500 32",
    ):  # fmt: skip
        assert wanted in shown, shown


def test_text_of_a_server_stays_text(examples: ModuleType) -> None:
    shown = page.to_html(bench_document(examples.latency(text="<script>alert(1)</script>\u202e")))
    assert "<script>alert" not in shown
    assert "\u202e" not in shown
