from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pytest

from assay.evals.gsm8k import draw_gsm8k, is_gsm8k
from assay.evals.questions import parse_answer
from assay.harness.errors import UsageError

DATA = Path(__file__).parents[1] / "data" / "results" / "gsm8k_test.jsonl"


@pytest.mark.parametrize("data", [str(DATA), f"gsm8k:{DATA}"])
def test_the_release_file_gives_problems_with_exact_numbers(data: str) -> None:
    assert is_gsm8k(data)
    drawn = draw_gsm8k(data, 100, 0)
    assert (len(drawn.questions), drawn.units) == (12, 2), "eleven of the problems are one template"
    first = next(one for one in drawn.questions if one.id == "gsm8k-0")
    assert first.answer == "72"
    assert first.prompt.endswith("altogether in April and May?")
    assert next(one for one in drawn.questions if one.id == "gsm8k-3").answer == "975"
    thousands = next(one for one in drawn.questions if one.id == "gsm8k-1")
    assert thousands.answer == "995"
    few = [one.id for one in draw_gsm8k(data, 11, 0).questions]
    assert few == [one.id for one in drawn.questions[: len(few)]]
    orders = {tuple(one.id for one in draw_gsm8k(data, 12, seed).questions) for seed in range(4)}
    assert len(orders) == 2, "a template stays together"


@pytest.mark.parametrize(("written", "answer"), [("1,250", "1250"), ("-3.50", "-3.5"), ("12,000,000", "12000000")])
def test_an_expected_number_has_the_form_of_a_given_one(tmp_path: Path, written: str, answer: str) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": f"Many.\n#### {written}"}) + "\n")
    (question,) = draw_gsm8k(str(path), 1, 0).questions
    assert question.answer == parse_answer(f"Answer: {written}", question.answer) == answer


def test_the_layout_of_the_hub_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "gsm8k" / "main").mkdir(parents=True)
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    pd.DataFrame(rows).to_parquet(tmp_path / "gsm8k" / "main" / "test-00000-of-00001.parquet")
    (tmp_path / "gsm8k" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: test\n    path: main/test-*\n---\n"
    )
    drawn = draw_gsm8k(str(tmp_path / "gsm8k"), 100, 0)
    assert {one.answer for one in drawn.questions} == {one.answer for one in draw_gsm8k(str(DATA), 100, 0).questions}


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"question": "1 + 1?", "answer": "2"}, "ends in '2'"),
        ({"problem": "1 + 1?", "answer": "#### 2"}, "question missing"),
        ({"question": ["How many?"], "answer": "Many.\n#### 7"}, "row 0: the question is not a string"),
    ],
)
def test_rows_of_another_kind_are_refused(tmp_path: Path, row: dict[str, object], found: str) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(UsageError, match=found):
        draw_gsm8k(str(path), 1, 0)
    with pytest.raises(UsageError, match="does not exist"):
        draw_gsm8k(str(tmp_path / "none.jsonl"), 1, 0)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("48 / 2 = 24, 24 + 48 = 72.\nAnswer: 72", "72"),
        ("Answer: 1\nNo.\nanswer: $1,250.00 dollars", "1250"),
        ("Answer: -0.50", "-0.5"),
        ("Answer: 6 of 12", "12"),
        ("It is 72.", None),
        ("Answer: many", None),
        ("", None),
    ],
)
def test_a_number_is_the_last_one_after_the_last_answer(text: str, parsed: str | None) -> None:
    assert parse_answer(text, "72") == parsed


def test_a_letter_is_found_as_before() -> None:
    assert parse_answer("Answer: b", "A") == parse_answer("Answer: b") == "B"
    assert parse_answer("Answer: 7", "A") is None


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gsm8k.jsonl").touch()
    os.truncate(tmp_path / "gsm8k.jsonl", 1 << 36)  # it takes no room on the disk
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(UsageError, match="has 68,719,476,736 bytes"):
        draw_gsm8k(str(tmp_path / "gsm8k.jsonl"), 4, 0)


def test_the_name_of_a_damaged_file_does_not_reach_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "\x1b[2Jset.jsonl"
    path.write_text('{"question": "cut off')
    with pytest.raises(UsageError, match="cannot be loaded"):
        draw_gsm8k(str(path), 1, 0)
    assert "\x1b" not in "".join(capfd.readouterr())


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "gsm8k.jsonl"
    path.write_bytes(b'{"question": "a \x98 b", "answer": "#### 1"}\n')
    with pytest.raises(UsageError, match=r"gsm8k\.jsonl is not text"):
        draw_gsm8k(str(path), 1, 0)
