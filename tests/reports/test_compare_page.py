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


def test_the_terminal_shows_flips_notes_checks_changes_and_the_other_reasons() -> None:
    one = result("answers")
    assert one.overall is not None
    more = one.model_copy(
        update={
            "overall": one.overall.model_copy(update={"lost": 1007}),
            "reasons": ("first", "the second reason"),
            "a": one.a.model_copy(update={"notes": ("a note",)}),
            "changes": tuple(
                Change(id="x", title=f"x{n}", a="1", b="2", worse=w) for n, w in enumerate((True, False, None))
            ),
            "outcomes": tuple(OutcomeChange(test=f"test_{n}", a="passed", b="failed") for n in range(25)),
            "tasks": (one.tasks[0].model_copy(update={"pairs": 0, "refused": ("other shots",)}),),
        }
    )
    lines = terminal(more).splitlines()
    flips = [line for line in lines if line.startswith("lost: assay_synthetic")]
    assert len(flips) == 5
    assert "expected 'C'" in flips[0]
    assert "… and 1,002 more flips: see --json or --html" in lines
    assert "  a note" in lines
    assert any(line.startswith("– not checked: the kernel under test computed the answers") for line in lines)
    assert "  the second reason" in lines
    assert "worse: x0: 1 in A, 2 in B" in lines
    assert "better: x1: 1 in A, 2 in B" in lines
    assert "x2: 1 in A, 2 in B" in lines
    assert "test_19: passed in A, failed in B" in lines
    assert "test_20: passed in A, failed in B" not in lines
    assert "… and 5 more" in lines
    assert "verdict refused" in terminal(more)


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


def test_one_of_a_thing_has_no_plural() -> None:
    one = result("tests")
    page = to_html(one.model_copy(update={"a": one.a.model_copy(update={"read": 1, "unit": "test"})}))
    assert "1 test read" in page
    assert "1 tests read" not in page
