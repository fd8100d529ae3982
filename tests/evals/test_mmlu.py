from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.evals import synthetic
from assay.evals.mmlu import _FILE_COLUMNS, _SUBJECT_TO_GROUP, draw_questions
from assay.evals.questions import GROUPS, LETTERS, PROMPT_HEADER, Question, parse_answer
from assay.harness.errors import ExitCode, UsageError

SUBJECTS = ("astronomy", "philosophy", "sociology", "virology", "lip_reading")
SUBJECT_GROUPS = ("stem", "humanities", "social_sciences", "other", "other")


def row(index: int) -> dict[str, str]:
    """A row in simple-evals' columns."""
    options = {letter: f"option {letter}{index}" for letter in LETTERS}
    answer = {"Answer": LETTERS[index % 4], "Subject": SUBJECTS[index % 5]}
    return {"Question": f"Question {index}?", **options, **answer}


def write_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, _FILE_COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict[str, object]]], str]:
    """Writes a folder laid out like ``cais/mmlu``, and has `datasets` load it only from there."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)

    def write(rows: list[dict[str, object]]) -> str:
        folder = tmp_path / "mmlu"
        (folder / "all").mkdir(parents=True)
        pd.DataFrame(rows).to_parquet(folder / "all" / "test-00000-of-00001.parquet")
        configs = "configs:\n- config_name: all\n  data_files:\n  - split: test\n    path: all/test-*\n"
        (folder / "README.md").write_text(f"---\n{configs}---\n")
        return str(folder)

    return write


def hub_row(index: int) -> dict[str, object]:
    choices = [f"option {letter}{index}" for letter in LETTERS]
    return {"question": f"Question {index}?", "subject": SUBJECTS[index % 5], "choices": choices, "answer": index % 4}


def failure(data: Path | str, count: int = 1) -> str:
    with pytest.raises(UsageError) as caught:
        draw_questions(str(data), count)
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.found
    assert caught.value.expected
    assert caught.value.do
    return str(caught.value)


def in_order(data: Path | str, count: int) -> list[Question]:
    """All questions that were drawn, in the order of the dataset."""
    return sorted(draw_questions(str(data), count).questions, key=lambda q: int(q.id.split("-")[1]))


def test_the_built_in_questions_come_in_a_random_order_that_grows() -> None:
    few, more = draw_questions("builtin", 7), draw_questions("builtin", 1000)
    assert few.questions == more.questions[:7]
    assert (few.units, more.units) == (synthetic.BUILTIN_POOL, synthetic.BUILTIN_POOL)
    assert few.questions != draw_questions("builtin", 7, seed=1).questions
    everything = draw_questions("builtin", synthetic.BUILTIN_POOL).questions
    assert set(everything) == set(islice(synthetic.questions(), synthetic.BUILTIN_POOL))
    assert everything[:7] == few.questions
    # In random order, the groups, which take turns in the set, are mixed.
    assert [q.group for q in everything[:40]] != list(GROUPS) * 10


def test_more_built_in_questions_than_the_pool_can_be_asked() -> None:
    drawn = draw_questions("builtin", synthetic.BUILTIN_POOL + 1)
    assert len(set(drawn.questions)) == drawn.units == synthetic.BUILTIN_POOL + 1


def test_a_csv_is_read_completely_if_all_questions_may_be_asked(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "set.csv", [row(i) for i in range(10)])
    drawn = draw_questions(str(path), 4096)
    assert (len(drawn.questions), drawn.units) == (10, 10)
    questions = in_order(path, 10)
    assert [q.id for q in questions] == [f"mmlu-{i}" for i in range(10)]
    assert [q.group for q in questions] == list(SUBJECT_GROUPS * 2)
    third = questions[2]
    assert (third.answer, third.subject) == ("C", "sociology")
    assert third.prompt == f"{PROMPT_HEADER}\n\nQuestion 2?\n\nA) option A2\nB) option B2\nC) option C2\nD) option D2"


def test_the_order_is_random_and_that_of_its_seed(tmp_path: Path) -> None:
    path = str(write_csv(tmp_path / "set.csv", [row(i) for i in range(50)]))
    first, again, other = (draw_questions(path, 8, seed) for seed in (3, 3, 4))
    assert first == again != other
    assert first.questions == draw_questions(path, 50, 3).questions[:8]
    assert first.units == 50, "what was drawn is a part of the set"


def test_questions_about_one_passage_are_drawn_together(tmp_path: Path) -> None:
    passage = "This question refers to the following information.\n" + "A long passage about history. " * 10
    rows = [row(i) for i in range(12)]
    for number in (1, 6, 11):  # of the same subject, philosophy
        rows[number]["Question"] = f"{passage}\nWhat follows, in part {number}?"
    rows[2]["Question"] = f"{passage}\nWhat follows for another subject?"
    path = str(write_csv(tmp_path / "set.csv", rows))
    for seed in range(5):
        drawn = draw_questions(path, 12, seed)
        places = [place for place, q in enumerate(drawn.questions) if q.id in ("mmlu-1", "mmlu-6", "mmlu-11")]
        assert places == list(range(places[0], places[0] + 3))
        assert drawn.units == 10
        for most in range(1, 12):
            ids = {q.id for q in draw_questions(path, most, seed).questions}
            assert len(ids & {"mmlu-1", "mmlu-6", "mmlu-11"}) in (0, 3), "no passage is cut"


@pytest.mark.parametrize("index", [True, False])
def test_index_column_byte_order_mark_quotes_and_line_breaks_are_read(index: bool, tmp_path: Path) -> None:
    path = tmp_path / "set.csv"
    pd.DataFrame([{**row(0), "Question": 'Is "ö"\nor, perhaps,\n中?', "C": "None", "D": "NA"}]).to_csv(
        path, encoding="utf-8-sig", index=index
    )
    (question,) = in_order(path, 1)
    assert question.own == 'Is "ö"\nor, perhaps,\n中?\n\nA) option A0\nB) option B0\nC) None\nD) NA'


def test_blank_lines_are_allowed_and_equal_rows_count_once(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "set.csv", [row(0), row(0)])
    path.write_bytes(path.read_bytes() + b"\r\n\r\n")
    assert [q.id for q in in_order(path, 2)] == ["mmlu-0"]


def test_a_hub_folder_gives_the_same_questions_as_csv(tmp_path: Path, hub_folder: Callable[[list[dict[str, object]]], str]) -> None:
    rows = [row(i) for i in range(20)]
    expected = in_order(write_csv(tmp_path / "set.csv", rows), 6)
    assert in_order(hub_folder([hub_row(i) for i in range(20)]), 6) == expected


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"answer": 4}, "row 2: the answer is 4"),
        ({"choices": ["a", "b", "c"]}, r"row 2: the choices are \['a', 'b', 'c'\]"),
        ({"choices": ["a", "b", "c", " "]}, "row 2: the option D is empty"),
        ({"question": ""}, "row 2: the question is empty"),
    ],
)
def test_a_hub_row_that_is_not_a_question_is_named(
    broken: dict[str, object], says: str, hub_folder: Callable[[list[dict[str, object]]], str]
) -> None:
    assert re.search(says, failure(hub_folder([hub_row(0), hub_row(1), {**hub_row(2), **broken}])))


def test_a_hub_folder_with_other_columns_is_refused(hub_folder: Callable[[list[dict[str, object]]], str]) -> None:
    assert "choices, answer missing" in failure(hub_folder([{"question": "?", "subject": "x", "label": 1}]))


def test_a_folder_that_is_not_a_data_set_is_refused(tmp_path: Path, hub_folder: Callable[[list[dict[str, object]]], str]) -> None:
    assert "cannot be loaded" in failure(tmp_path)
    message = failure("nobody/no-such-set")
    assert all(said in message for said in ("'nobody/no-such-set' cannot be loaded", "'builtin'", ".csv"))
    folder = hub_folder([hub_row(0)])
    pd.DataFrame([{"text": "?"}]).to_parquet(Path(folder, "all", "test-00001-of-00002.parquet"))
    assert "cannot be loaded" in failure(folder)  # two files with different columns
    Path(folder, "all", "test-00000-of-00001.parquet").write_bytes(b"not parquet")
    assert "cannot be loaded" in failure(folder)


@pytest.mark.parametrize("name", ["absent.csv", "folder/absent", "deep/er/absent", "~/absent/x y"])
def test_a_missing_file_is_named(name: str, tmp_path: Path, hub_folder: Callable[[list[dict[str, object]]], str]) -> None:
    assert "does not exist" in failure(tmp_path / name)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text("no")
    assert "has an unsupported file type" in failure(tmp_path / "set.jsonl")


HEADER = ",".join(_FILE_COLUMNS)
GOOD = '"Two\nlines?",a,b,c,d,A,virology'  # lines 2 and 3 of each file below


@pytest.mark.parametrize(
    ("content", "says"),
    [
        *((f"{HEADER}\n{GOOD}\n{line}\n", says) for line, says in (
        ("Q?,a,b,c,d,A", "line 4: 6 fields"),
        ("Q?,a,b,c,d,A,virology,more", "line 4: 8 fields"),
        ('Q?,"a"x,b,c,d,A,virology', "line 4: malformed CSV"),
        ('"Q?,a,b,c,d,A,virology\nQ?,a,b,c,d,A,virology\n', "line 4: malformed CSV"),
        ("Q?,a,b,c,d,E,virology", "line 4: the answer is 'E'"),
        ("Q?,a,b,c,d,,virology", "line 4: the answer is ''"),
        ("Q?,a,,c,d,A,virology", "line 4: the option B is empty"),
        (" ,a,b,c,d,A,virology", "line 4: the question is empty"),
        (b"Caf\xe9?,a,b,c,d,A,virology".decode("latin-1"), "line 4: byte 0xe9 is not UTF-8"),
        )),
        *((f"{header}\n{GOOD}\n", missing) for header, missing in (
            ("Question,A,B,C,Answer", "D, Subject missing"),
            ("question,a,b,c,d,answer,subject", "Question, A, B, C, D, Answer, Subject missing"),
            (HEADER + ",A", "A missing or duplicated"),
        )),
        *((content, "has no questions") for content in ("", "\n\n", HEADER, HEADER + "\n\n")),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_csv_is_named_with_its_line(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "set.csv").write_text(content, "latin-1")
    assert says in failure(tmp_path / "set.csv")


def test_every_mmlu_subject_has_its_group() -> None:
    assert len(_SUBJECT_TO_GROUP) == 57
    counts = {group: list(_SUBJECT_TO_GROUP.values()).count(group) for group in GROUPS}
    assert counts == {"stem": 18, "humanities": 13, "social_sciences": 12, "other": 14}


SPACES = st.text(alphabet=" \t", max_size=3)


@given(
    st.sampled_from(LETTERS),
    st.sampled_from(["Answer", "answer", "ANSWER"]),
    SPACES,
    SPACES,
    st.sampled_from(["{}", "${}", "${}$"]),
    st.booleans(),
    st.text(alphabet="xyz \n.", max_size=40),
)
def test_an_answer_is_parsed(letter: str, word: str, before: str, after: str, form: str, lower: bool, reasoning: str) -> None:
    given_letter = form.format(letter.lower() if lower else letter)
    assert parse_answer(f"{reasoning}{word}{before}:{after}{given_letter}\nAnswer: D") == letter


@settings(max_examples=10)
@given(st.text().filter(lambda text: ":" not in text))
def test_a_text_without_an_answer_is_unparsed(text: str) -> None:
    assert parse_answer(text) is None


def test_a_file_without_an_end_is_refused_before_it_is_read(tmp_path: Path) -> None:
    sparse, pipe = tmp_path / "large.csv", tmp_path / "pipe.csv"
    sparse.touch()
    os.truncate(sparse, 1 << 40)  # reading it would end in a MemoryError
    os.mkfifo(pipe)  # opening it would wait for ever
    assert "1,099,511,627,776 bytes" in failure(sparse)
    assert "not a regular file" in failure(pipe)
