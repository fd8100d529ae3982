from __future__ import annotations

from collections.abc import Sequence

import pytest

from assay.harness.errors import EvidenceError
from assay.harness.evidence.records import Answer, Item, Suite
from assay.harness.judge.answers import pair, tally
from assay.harness.sides import ROLES, Role


def item(name: str, expected: str | None = "A", suite: Suite = "accuracy") -> Item:
    return Item(suite=suite, id=name, prompt=name, prompt_hash="h" + name, expected=expected)


def answer(
    role: Role,
    name: str,
    parsed: str | None = "A",
    finish_reason: str = "stop",
    repeat: int = 0,
    prompt_hash: str | None = None,
    suite: Suite = "accuracy",
) -> Answer:
    return Answer(
        suite=suite,
        role=role,
        item=name,
        repeat=repeat,
        prompt_hash=prompt_hash or "h" + name,
        text="",
        parsed=parsed,
        finish_reason=finish_reason,
        prompt_tokens=10,
        completion_tokens=3,
        latency_s=0.1,
    )


def both(name: str, reference: str | None, candidate: str | None) -> list[Answer]:
    return [answer("reference", name, reference), answer("candidate", name, candidate)]


def test_answers_are_joined_by_item_in_the_order_of_the_items() -> None:
    answers = [*both("b", "A", "B"), *both("a", "C", "D")]
    pairing = pair([item("a"), item("b")], answers[::-1])
    assert [(p.item.id, p.reference.parsed, p.candidate.parsed) for p in pairing.pairs] == [("a", "C", "D"), ("b", "A", "B")]
    assert pairing.mismatched == ()


@pytest.mark.parametrize("roles", [ROLES[:1], ROLES[1:], ROLES])
def test_another_prompt_is_no_pair(roles: Sequence[Role]) -> None:
    answers = [answer(r, "a", prompt_hash="other" if r in roles else None) for r in ROLES]
    pairing = pair([item("a")], answers)
    assert (pairing.pairs, pairing.mismatched) == ((), ("a",))


def test_repeats_and_other_suites_are_left_out() -> None:
    answers = [*both("a", "A", "A"), answer("reference", "a", "B", repeat=1), answer("candidate", "a", "C", suite="greedy")]
    pairing = pair([item("a"), item("g", suite="greedy")], answers)
    assert [(p.reference.parsed, p.candidate.parsed) for p in pairing.pairs] == [("A", "A")]
    assert pairing.mismatched == ()
    assert pair([item("a"), item("g", suite="greedy")], answers, suite="greedy").pairs == ()


def test_two_answers_to_one_item_are_refused() -> None:
    with pytest.raises(EvidenceError, match="two answers of the candidate to a"):
        pair([item("a")], [*both("a", "A", "A"), answer("candidate", "a", "B")])
    with pytest.raises(EvidenceError, match="two items a"):
        pair([item("a"), item("a")], [])


def test_right_wrong_unparsed_and_cut_answers_are_counted_separately() -> None:
    answers = [
        *[answer("reference", name) for name in "abcde"],
        answer("candidate", "a", "A"),
        answer("candidate", "b", "B"),
        answer("candidate", "c", None),
        answer("candidate", "d", None, finish_reason="length"),
        answer("candidate", "e", "A", finish_reason="length"),
    ]
    pairs = pair([item(name) for name in "abcde"], answers).pairs
    counted = tally(pairs, "candidate")
    assert (counted.right, counted.wrong, counted.unparsed, counted.ran_to_limit, counted.total) == (2, 1, 2, 2, 5)
    assert tally(pairs, "reference").right == 5
