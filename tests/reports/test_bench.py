"""The page of a bench that was not part of a run."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from assay.harness.judge.call_counts import CallSummary
from assay.harness.judge.latency_result import LatencyResult
from assay.harness.verdict import Verdict
from assay.reports import page
from assay.reports.bench_report import bench_document

COMPILED = CallSummary(
    phase="decode", kernel="triton", backend="triton", calls=1_912, calls_with_cached_prefix=1_912, calls_in_graphs=1_624,
    calls_compiled=1_500, layers=32,
)  # fmt: skip


def to_html(result: LatencyResult) -> str:
    return page.to_html(bench_document(result))


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<(style|script)>.*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL).split())


@pytest.mark.parametrize(("verdict", "word"), [("pass", "Pass"), ("regression", "Regression")])
def test_verdict_ratios_throughputs_and_calls_are_there(examples: ModuleType, verdict: Verdict, word: str) -> None:
    result = examples.latency(verdict=verdict).model_copy(update={"candidate_calls": (COMPILED,)})
    page = to_html(result)
    assert f'<header class="verdict {verdict}">' in page
    shown = text_of(page)
    for wanted in (
        f"{word} ", "2.000 (1.980 to 2.030)" if verdict == "regression" else "1.040 (1.020 to 1.070)",
        "99th percentile of inter-token latency 10.00 vs 10.00 ms", "80 % vs 80 % of the prompt tokens cached",
        "triton 1,912 1,912 1,624 1,500 32",
    ):  # fmt: skip
        assert wanted in shown, shown


def test_text_of_a_server_stays_text(examples: ModuleType) -> None:
    page = to_html(examples.latency(text="<script>alert(1)</script>\u202e"))
    assert "<script>alert" not in page
    assert "\u202e" not in page
