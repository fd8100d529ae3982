from __future__ import annotations

import random
from pathlib import Path

import pytest

from assay.evals.alike import alike
from assay.evals.mmlu import in_random_order
from assay.evals.questions import Question

FOOTER = "\n\nThe last line of your response should be of the following format: 'Answer: $ANSWER' (without quotes)."
WORDS = (Path(__file__).parents[2] / "docs" / "coverage.md").read_text().split()


def independent(count: int, words: int = 30) -> list[str]:
    """Texts of words in the order of chance."""
    drawn = random.Random(3)
    return [" ".join(drawn.choices(WORDS, k=words)) for _ in range(count)]


def test_texts_that_share_nothing_are_alike_to_none() -> None:
    assert alike(independent(2000)) == list(range(2000))


def test_a_template_with_other_names_and_numbers_is_one() -> None:
    template = (
        "A train leaves {} at {} o'clock and travels {} km at a constant speed to {}; how many minutes does it need if it "
        "stops {} times on the way, for one minute each?"
    )
    towns = ["Aachen", "Bergen", "Calais", "Dover", "Essen", "Fulda"]
    drawn = random.Random(1)
    filled = [
        template.format(drawn.choice(towns), drawn.randrange(24), drawn.randrange(900), drawn.choice(towns), n) for n in range(40)
    ]
    found = alike([*independent(500), *filled])
    assert found[:500] == list(range(500))
    assert set(found[500:]) == {500}


def test_a_common_stem_with_other_options_is_no_template() -> None:
    options = independent(200, 25)
    assert alike([f"Which of the following statements is correct? {one}" for one in options]) == list(range(200))


def test_short_texts_are_alike_to_none() -> None:
    assert alike(["What is 2 + 3 then?", "What is 4 + 5 then?"]) == [0, 1]


@pytest.mark.parametrize("words", [7, 40])
@pytest.mark.parametrize("shots", [0, 5])
def test_what_all_prompts_of_a_task_share_makes_no_questions_alike(words: int, shots: int) -> None:
    given = "\n\n".join(independent(shots, 100))
    questions = [
        Question(f"q-{n}", "task", "other", f"{given}\n\n{text}{FOOTER}", "7", text, f"q-{n}")
        for n, text in enumerate(independent(100, words))
    ]
    assert in_random_order(questions, 100, 0).units == 100


def test_a_template_behind_examples_is_one_unit() -> None:
    (given,) = independent(1, 200)
    texts = [f"In the year {n} a merchant of the town sells {n} barrels for twice what he paid." for n in range(9)]
    questions = [
        Question(f"q-{n}", "task", "other", f"{given}\n\n{text}{FOOTER}", "7", text, f"q-{n}")
        for n, text in enumerate([*texts, *independent(20)])
    ]
    assert in_random_order(questions, 29, 0).units == 21
