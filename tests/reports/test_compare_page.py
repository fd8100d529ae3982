from __future__ import annotations

import io
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from assay.harness.ingest.results.compare import Limits, compare
from assay.harness.ingest.results.comparison import AnswerFlip, Change, CompareResult, OutcomeChange
from assay.reports.compare_page import to_html
from assay.reports.compare_text import render_compare, write_compare_junit

DATA = Path(__file__).parents[1] / "data" / "results"


def result(kind: str) -> CompareResult:
    names = {"answers": "lm_eval_{}", "latencies": "serving_{}.jsonl", "tests": "junit_{}.xml"}[kind]
    return compare(DATA / names.format("a"), DATA / names.format("b"), Limits(), reproduce="assay compare A B")


def terminal(one: CompareResult) -> str:
    out = io.StringIO()
    render_compare(one, Console(file=out, width=80))
    return out.getvalue()


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("answers", ("assay_synthetic", "exact_match,letter", "29.17")),
        ("latencies", ("time to the first token", "11.482 (5.507 to 26.051)")),
        ("tests", ("test_cached_prefix", "passed", "failed")),
    ],
)
def test_page_and_terminal_show_the_numbers_what_they_cover_and_what_is_missing(
    kind: str, shown: tuple[str, ...]
) -> None:
    one = result(kind)
    for text in (to_html(one), terminal(one)):
        for word in (*shown, one.covers[:40], *(check.title for check in one.checks if check.status == "missing")):
            assert word in text
    assert "assay compare A B" in to_html(one)


def test_texts_of_others_stay_inert(examples: ModuleType, tmp_path: Path) -> None:
    hostile = examples.HOSTILE
    one = result("answers").model_copy(
        update={
            "headline": hostile,
            "reasons": (hostile, hostile),
            "flips": (AnswerFlip(task=hostile, key=hostile, direction="lost", target=hostile, a=hostile, b=hostile),),
            "outcomes": (OutcomeChange(test=hostile, a="passed", b="failed"),),
            "changes": (Change(id="x", title=hostile, a=hostile, b=hostile, worse=True),),
        }
    )
    page = to_html(one)
    assert "<script>window" not in page
    assert "<img src=x" not in page
    assert "\x1b" not in terminal(one)
    write_compare_junit(one, tmp_path / "c.xml")
