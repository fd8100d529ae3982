from __future__ import annotations

from typing import Any

from assay.harness.ingest.pairing import Pairing, pair_tasks
from assay.harness.ingest.result_set import ResultItem, ResultSet


def item(key: str, score: float | None = 1.0, **more: Any) -> ResultItem:
    return ResultItem(**{"key": key, "prompt_hash": f"p{key}", "target": "A", "answer": "A", "score": score, **more})


def paired(a: list[ResultItem], b: list[ResultItem]) -> Pairing:
    return pair_tasks(*(ResultSet(tool="", task="t", higher_is_better=True, items=tuple(items)) for items in (a, b)))


def counts(a: list[ResultItem], b: list[ResultItem]) -> dict[str, int]:
    return {one.id: one.count for one in paired(a, b).unpaired}


def test_all_answers_to_a_document_that_both_hold_twice_are_paired_and_one_that_one_side_repeats_is_refused() -> None:
    twice = paired([item("1"), item("1", 0.0)], [item("1"), item("1")])
    assert (len(twice.pairs), twice.again, twice.unpaired) == (2, 1, [])
    x, y = (item("1", prompt_hash=prompt) for prompt in "xy")
    other = paired([x, y], [y, item("1", 0.0, prompt_hash="x")])
    assert [(a.score, b.score) for a, b in other.pairs] == [(1.0, 0.0), (1.0, 1.0)], "each with the same prompt"
    assert counts([item("1"), item("1")], [item("1")]) == {"repeated": 1}
