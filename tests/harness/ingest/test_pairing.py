from __future__ import annotations

from typing import Any

import pytest

from assay.harness.ingest.pairing import _differences, _guessing, _pair_items, loss
from assay.harness.ingest.result_set import ResultItem, ResultSet


def item(key: str, score: float | None = 1.0, **more: Any) -> ResultItem:
    return ResultItem(**{"key": key, "prompt_hash": f"p{key}", "target": "A", "parsed": "A", "score": score, **more})


def counts(a: list[ResultItem], b: list[ResultItem]) -> dict[str, int]:
    return {one.id: one.count for one in _pair_items(a, b).unpaired}


def test_the_same_documents_are_paired_whatever_their_order() -> None:
    found = _pair_items([item("1"), item("2", 0.0)], [item("2"), item("1")])
    assert [(pair[0].key, pair[1].key, loss(pair)) for pair in found.pairs] == [("1", "1", 0.0), ("2", "2", -1.0)]
    assert not found.unpaired


@pytest.mark.parametrize(
    ("reason", "other"),
    [("other-prompt", item("1", prompt_hash="else")), ("other-target", item("1", target="B")), ("not-scored", item("1", None))],
)
def test_what_differs_is_not_paired_and_counted_with_its_reason(reason: str, other: ResultItem) -> None:
    found = _pair_items([item("1"), item("2")], [other, item("2")])
    assert [a.key for a, _ in found.pairs] == ["2"]
    (unpaired,) = found.unpaired
    assert (unpaired.id, unpaired.count, unpaired.examples) == (reason, 1, ("1",))


def test_a_document_that_both_hold_twice_counts_once_and_one_that_one_side_repeats_is_refused() -> None:
    twice = _pair_items([item("1"), item("1", 0.0)], [item("1"), item("1")])
    assert (len(twice.pairs), twice.again, twice.unpaired) == (1, 1, [])
    assert counts([item("1"), item("1")], [item("1")]) == {"repeated": 1}


def test_a_prompt_that_was_not_recorded_is_not_taken_for_another() -> None:
    found = _pair_items([item("1", prompt_hash="")], [item("1")])
    assert (len(found.pairs), found.unverified) == (1, 1)


def results(**more: Any) -> ResultSet:
    return ResultSet(**{"tool": "lm-eval", "task": "t", "metric": "acc", "shots": 0, **more})


@pytest.mark.parametrize(
    ("difference", "named"),
    [
        ({"shots": 5}, {"what": "shots", "a": 0, "b": 5}),
        ({"task_version": "2"}, {"what": "task_version", "a": "1", "b": "2"}),
        ({"tokenizer": "other"}, {"what": "tokenizer", "a": "tok", "b": "other"}),
        ({"template": "other"}, {"what": "template", "a": "t", "b": "other"}),
        ({"sampling": {"temperature": "0.7", "top_p": "1"}}, {"setting": "temperature", "a": "0", "b": "0.7"}),
        ({"sampling": {"temperature": "0"}}, {"setting": "top_p", "a": "1", "b": None}),
        ({"shots": None, "metric": "", "sampling": {}}, None),
    ],
)
def test_what_makes_two_tasks_incomparable_is_named(difference: dict[str, Any], named: dict[str, Any] | None) -> None:
    a = results(task_version="1", tokenizer="tok", template="t", sampling={"temperature": "0", "top_p": "1"})
    refused = _differences(a, a.model_copy(update=difference))
    assert [reason.values for reason in refused] == ([named] if named else [])
    assert not _differences(a, a)


def test_guessing_is_always_giving_the_most_frequent_answer() -> None:
    letters = [item(str(n), target="ABCD"[n % 4]) for n in range(8)]
    numbers = [item(str(n), target=str(n)) for n in range(8)]
    assert _guessing(_pair_items(letters, letters).pairs) == 0.25
    assert _guessing(_pair_items(numbers, numbers).pairs) == 0.125
    assert _guessing([]) == 0.0
