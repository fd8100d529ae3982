from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from assay.evals.lm_eval_tasks import _expected_form, draw_task
from assay.evals.questions import parse_answer
from assay.harness.errors import UsageError

INSTALLED = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(not INSTALLED, reason="lm-eval is not installed")

ROWS = [{"q": f"{n} + 2?", "a": str(n + 2), "options": ["1", str(n + 2), "99"], "gold": 1} for n in range(20, 26)]
TASKS = {
    "exact": 'output_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\ngeneration_kwargs: {until: []}\n',
    "choice": 'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: "{{options}}"\ndoc_to_target: gold\n',
    "rolling": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{q}}"\n',
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in TASKS.items():
        head = f"task: assay_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (tmp_path / f"{name}.yaml").write_text(head + text)
    return tmp_path


@pytest.mark.skipif(INSTALLED, reason="lm-eval is installed")
def test_without_the_package_the_error_says_what_to_install() -> None:
    with pytest.raises(UsageError, match=r'needs lm-eval, which is not installed(.|\n)*pip install "assay-harness\[lm-eval'):
        draw_task("arc_easy", 8, 0)


@needs_lm_eval
def test_an_exact_match_task_gives_its_prompts_and_targets(folder: Path) -> None:
    drawn = draw_task(f"{folder}/assay_exact", 4, 0)
    assert (len(drawn.questions), drawn.units) == (4, 6)
    question = drawn.questions[0]
    number = int(question.id.rpartition("-")[2])
    assert question.id == f"assay_exact-{number}"
    assert question.prompt.startswith(f"{20 + number} + 2?")
    assert parse_answer(f"Answer: {22 + number}.0", question.answer) == question.answer


@needs_lm_eval
def test_a_multiple_choice_task_is_asked_for_a_letter(folder: Path) -> None:
    for question in draw_task(f"{folder}/assay_choice", 8, 0).questions:
        assert question.answer == "B"
        assert "A) 1\nB) 2" in question.prompt
        assert question.prompt.endswith("C) 99")


@needs_lm_eval
@pytest.mark.parametrize(
    ("name", "found"), [("assay_rolling", "of the kind loglikelihood_rolling"), ("nope", "is not known"), ("mmlu", "group")]
)
def test_other_tasks_are_refused(folder: Path, name: str, found: str) -> None:
    with pytest.raises(UsageError, match=found):
        draw_task(f"{folder}/{name}", 8, 0)


@pytest.mark.parametrize(
    ("target", "form"), [("C", "C"), ("72", "72"), ("6 * 2 = 12\n#### 1,200", "1200"), (" Paris. ", "paris"), ("3 to 4", "3 to 4")]
)
def test_targets_take_the_form_in_which_answers_are_parsed(target: str, form: str) -> None:
    assert _expected_form(target) == form
