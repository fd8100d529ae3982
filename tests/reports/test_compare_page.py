from __future__ import annotations

import html
import io
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from assay.harness.ingest.comparison import AnswerFlip, ComparedAnswers, Comparison
from assay.harness.ingest.recognise import compare as compare_files
from assay.harness.ingest.tensor_diff import TensorRule
from assay.harness.statement import state
from assay.reports import junit, page
from assay.reports.compare import compare_document
from assay.reports.terminal import render
from assay.reports.wording.comparison import COVERS
from assay.reports.wording.requirements import said_check

DATA = Path(__file__).parents[1] / "data" / "results"


def compare(a: Path, b: Path) -> Comparison:
    return compare_files(a, b, 0.02, TensorRule(), reproduce="assay compare A B")


def result() -> Comparison:
    return compare(DATA / "lm_eval_a", DATA / "lm_eval_b")


def answers(one: Comparison, **changes: Any) -> ComparedAnswers:
    assert one.answers is not None
    return one.answers.model_copy(update=changes)


def to_html(one: Comparison) -> str:
    return page.to_html(compare_document(one))


def terminal(one: Comparison) -> str:
    out = io.StringIO()
    render(compare_document(one), Console(file=out, width=80))
    return out.getvalue()


def test_page_and_terminal_show_the_numbers_what_they_cover_and_what_is_missing() -> None:
    one = result()
    for text in (html.unescape(to_html(one)), " ".join(terminal(one).split())):
        words = ("assay_synthetic", "exact_match,letter", "29.17", COVERS["answers"][:40])
        for word in (*words, *(said_check(check).title for check in one.checks if check.status == "missing")):
            assert word in text
    assert "assay compare A B" in to_html(one)


def test_the_terminal_shows_flips_notes_checks_and_the_other_reasons() -> None:
    one = result()
    known = answers(one)
    changed = answers(
        one,
        overall=known.overall.model_copy(update={"lost": 1007}),
        tasks=(known.tasks[0].model_copy(update={"pairs": 0, "test": "unpaired", "loss": 0.3, "low": 0.2, "high": 0.4}),),
    )
    side = one.a.model_copy(update={"notes": ("a note",), "read": 1})
    more = one.model_copy(update={"answers": changed, "why": (state("first"), state("the second reason")), "a": side})
    lines = terminal(more).splitlines()
    flips = [line for line in lines if " lost; Expected " in line]
    assert len(flips) == 5
    assert "  a note" in lines
    assert any(line.startswith("– not checked: whether the kernel under test computed the answers") for line in lines)
    assert "  the second reason" in lines
    assert "pairs unpaired; A 1.0000; B 0.7083; lost ; gained ; loss in points 30.00 (20.0 to 40.0)" in terminal(more)
    assert "1 sample read" in to_html(more)


def test_texts_of_others_stay_inert(examples: ModuleType, tmp_path: Path) -> None:
    hostile = examples.HOSTILE
    flip = AnswerFlip(task=hostile, key=hostile, direction="lost", target=hostile, a=hostile, b=hostile)
    changed = answers(result(), flips=(flip,))
    one = result().model_copy(update={"why": (state(hostile), state("own", said=hostile)), "answers": changed})
    page = to_html(one)
    assert "<script>window" not in page
    assert "<img src=x" not in page
    assert "\x1b" not in terminal(one)
    (tmp_path / "c.xml").write_text(junit.to_junit(compare_document(one)))
    assert "<script>window" not in (tmp_path / "c.xml").read_text()


def choices(folder: Path, name: str, loglikelihoods: list[list[float]]) -> Path:
    """Samples of a multiple-choice task, as lm-eval 0.4.9 writes them."""
    rows = []
    for number, scores in enumerate(loglikelihoods):
        texts = ["the mitochondrion", "incomprehensibilities", "a ribosome", "none of these"]
        rows.append({
            "doc_id": number, "doc": {"question": f"Which organelle is number {number}?", "choices": texts, "answer": 1},
            "target": "1",
            "arguments": {f"gen_args_{n}": {"arg_0": "Q", "arg_1": f" {text}"} for n, text in enumerate(texts)},
            "resps": [[[str(one), "False"]] for one in scores], "filtered_resps": [[str(one), "False"] for one in scores],
            "filter": "none", "metrics": ["acc"], "doc_hash": f"d{number}", "prompt_hash": f"p{number}", "target_hash": "t",
            "acc": float(max(scores) == scores[1]),
        })  # fmt: skip
    path = folder / name / "samples_organelles_2026-11-20.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def multiple_choice(tmp_path: Path) -> Comparison:
    right, wrong = [-2.0, -0.5, -3.0, -4.0], [-0.25, -2.0, -3.0, -4.0]
    a, b = choices(tmp_path, "a", [right] * 40), choices(tmp_path, "b", [wrong] * 5 + [right] * 35)
    return compare(a, b)


def test_flips_of_multiple_choice_show_questions_letters_and_choices(multiple_choice: Comparison) -> None:
    flip = answers(multiple_choice).flips[0]
    assert flip.question == "Which organelle is number 0?"
    assert flip.target == "B: incomprehensibilities"
    assert flip.a == "B: incomprehensibilities (A -2.00, B -0.50, C -3.00, D -4.00)"
    assert flip.b.startswith("A: the mitochondrion (A -0.25")
    for text in (to_html(multiple_choice), terminal(multiple_choice)):
        assert "Which organelle is number 0?" in text
        assert "[[[" not in text


@pytest.mark.browser
def test_no_word_of_a_comparison_is_broken_on_a_phone(
    chrome: Any, screenshot: Any, tmp_path: Path, multiple_choice: Comparison
) -> None:
    path = tmp_path / "compare.html"
    path.write_text(to_html(multiple_choice), encoding="utf-8")
    screenshot.resize(chrome, 390, 844)
    screenshot.open_page(chrome, path)
    assert chrome.execute_script("return document.documentElement.scrollWidth") == 390
    broken = chrome.execute_script(BROKEN)
    assert broken == []


BROKEN = """
const broken = [];
for (const cell of document.querySelectorAll("td, th")) {
  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    for (const word of node.textContent.matchAll(/[A-Za-z,]{1,24}/g)) {
      const range = document.createRange();
      range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map(one => Math.round(one.top))).size > 1) broken.push(word[0]);
    }
  }
}
return broken;
"""
