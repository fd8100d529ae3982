from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from assay.harness.ingest.comparison import AnswerFlip, Comparison
from assay.harness.ingest.recognise import compare
from assay.harness.ingest.tensor_diff import TensorRule
from assay.harness.statement import state
from assay.reports import junit, page
from assay.reports.compare import compare_document
from assay.reports.document import Document

DATA = Path(__file__).parents[1] / "data"


def compared(a: Path, b: Path) -> Comparison:
    made = compare(a, b, 0.02, TensorRule(), reproduce="assay compare A B")
    return made.model_copy(update={"created": "2026-01-01T00:00:00Z"})


@pytest.fixture
def multiple_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: ModuleType) -> Comparison:
    monkeypatch.chdir(tmp_path)
    return compared(*pages.choices(Path()))


def test_a_comparison_says_the_same_in_every_medium(
    golden: Callable[[str, Document], None], multiple_choice: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flips of choices with their questions; two real runs; and two traces of which one adds a sequence where the other forks."""
    golden("compare-choices", compare_document(multiple_choice))
    monkeypatch.chdir(DATA / "results")
    runs = compared(Path("lm_eval_a"), Path("lm_eval_b"))
    assert runs.answers is not None
    more = runs.answers.model_copy(update={"overall": runs.answers.overall.model_copy(update={"lost": 1007})})
    side = runs.a.model_copy(update={"notes": ("a note",), "read": 1})
    why = (*runs.why, state("new-cause", candidate="x", does="is the second reason"))
    golden("compare-runs", compare_document(runs.model_copy(update={"answers": more, "a": side, "why": why})))
    (tmp_path / "b.txt").write_text((DATA / "traces/mlc_engine.txt").read_text().replace("fork_sequence", "add_sequence"))
    traces = compared(DATA / "traces/mlc_engine.txt", tmp_path / "b.txt")
    sides = {name: getattr(traces, name).model_copy(update={"path": name}) for name in "ab"}
    golden("compare-traces", compare_document(traces.model_copy(update=sides)))


def test_texts_of_others_stay_inert(examples: ModuleType, multiple_choice: Comparison) -> None:
    hostile = examples.HOSTILE
    flip = AnswerFlip(task=hostile, key=hostile, direction="lost", target=hostile, a=hostile, b=hostile)
    assert multiple_choice.answers is not None
    answers = multiple_choice.answers.model_copy(update={"flips": (flip,)})
    changed = multiple_choice.model_copy(update={"why": (state(hostile), state("own", said=hostile)), "answers": answers})
    html = page.to_html(compare_document(changed))
    assert "<script>window" not in html
    assert "<img src=x" not in html
    assert "<script>window" not in junit.to_junit(compare_document(changed))
