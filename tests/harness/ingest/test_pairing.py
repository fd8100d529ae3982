from __future__ import annotations

from typing import Any

import pytest

from assay.harness.ingest.pairing import Pairing, _guessing, loss, pair_tasks
from assay.harness.ingest.result_set import ResultItem, ResultSet


def item(key: str, score: float | None = 1.0, **more: Any) -> ResultItem:
    return ResultItem(**{"key": key, "prompt_hash": f"p{key}", "target": "A", "answer": "A", "score": score, **more})


def paired(a: list[ResultItem], b: list[ResultItem]) -> Pairing:
    return pair_tasks(*(ResultSet(tool="", task="t", higher_is_better=True, items=tuple(items)) for items in (a, b)))


def counts(a: list[ResultItem], b: list[ResultItem]) -> dict[str, int]:
    return {one.id: one.count for one in paired(a, b).unpaired}


def test_the_same_documents_are_paired_whatever_their_order() -> None:
    found = paired([item("1"), item("2", 0.0)], [item("2"), item("1")])
    assert [(pair[0].key, pair[1].key, loss(pair)) for pair in found.pairs] == [("1", "1", 0.0), ("2", "2", -1.0)]
    assert not found.unpaired


@pytest.mark.parametrize(
    ("reason", "other"),
    [("other-prompt", item("1", prompt_hash="else")), ("other-target", item("1", target="B")), ("not-scored", item("1", None))],
)
def test_what_differs_is_not_paired_and_counted_with_its_reason(reason: str, other: ResultItem) -> None:
    found = paired([item("1"), item("2")], [other, item("2")])
    assert [a.key for a, _ in found.pairs] == ["2"]
    (unpaired,) = found.unpaired
    assert (unpaired.id, unpaired.count, unpaired.examples) == (reason, 1, ("1",))


def test_all_answers_to_a_document_that_both_hold_twice_are_paired_and_one_that_one_side_repeats_is_refused() -> None:
    twice = paired([item("1"), item("1", 0.0)], [item("1"), item("1")])
    assert (len(twice.pairs), twice.again, twice.unpaired) == (2, 1, [])
    x, y = (item("1", prompt_hash=prompt) for prompt in "xy")
    other = paired([x, y], [y, item("1", 0.0, prompt_hash="x")])
    assert [loss(pair) for pair in other.pairs] == [1.0, 0.0], "each with the same prompt"
    assert counts([item("1"), item("1")], [item("1")]) == {"repeated": 1}


def test_a_prompt_that_was_not_recorded_is_not_taken_for_another() -> None:
    found = paired([item("1", prompt_hash="")], [item("1")])
    assert (len(found.pairs), found.unverified) == (1, 1)


def test_guessing_is_always_giving_the_most_frequent_answer() -> None:
    letters = [item(str(n), target="ABCD"[n % 4]) for n in range(8)]
    numbers = [item(str(n), target=str(n)) for n in range(8)]
    assert _guessing(paired(letters, letters).pairs) == 0.25
    assert _guessing(paired(numbers, numbers).pairs) == 0.125
    assert _guessing([]) == 0.0
