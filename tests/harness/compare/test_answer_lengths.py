from __future__ import annotations

from assay.harness.compare.answer_lengths import compare_lengths
from assay.harness.evidence.timings import AnswerLength
from assay.harness.sides import Role


def lengths(reference: list[int], candidate: list[int], limit: int = 64) -> list[AnswerLength]:
    by_role: list[tuple[Role, list[int]]] = [("reference", reference), ("candidate", candidate)]
    return [
        AnswerLength(role=role, item=str(i), tokens=tokens, finish_reason="length" if tokens == limit else "stop")
        for role, given in by_role
        for i, tokens in enumerate(given)
    ]


def test_longer_answers_are_reported() -> None:
    found = compare_lengths(lengths([12] * 16, [64] * 16), 0.05)
    assert found.differ
    assert (found.prompts, found.longer, found.shorter, found.candidate_cut, found.reference_cut) == (16, 16, 0, 16, 0)


def test_shorter_answers_are_reported() -> None:
    found = compare_lengths(lengths(list(range(20, 36)), [10] * 16), 0.05)
    assert found.differ
    assert (found.candidate, found.shorter) == (10, 16)


def test_equal_lengths_and_single_flips_are_not_reported() -> None:
    assert not compare_lengths(lengths([12] * 16, [12] * 16), 0.05).differ
    assert not compare_lengths(lengths([12] * 16, [12] * 14 + [9, 60]), 0.05).differ


def test_a_significant_but_tiny_difference_is_not_reported() -> None:
    assert not compare_lengths(lengths([100] * 16, [101] * 16), 0.05).differ


def test_only_prompts_that_both_answered_count() -> None:
    given = lengths([5, 6, 7], [5, 6])
    assert compare_lengths(given, 0.05).prompts == 2
    assert compare_lengths([], 0.05).prompts == 0
