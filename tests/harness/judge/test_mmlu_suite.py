from __future__ import annotations

from assay.harness.judge.mmlu_suite import check_accuracy_tested, check_all_answered


def test_all_answered() -> None:
    assert check_all_answered(8, 8, ()).status == "ok"
    assert check_all_answered(8, 7, ()).status == "missing"
    assert check_all_answered(0, 0, ()).status == "missing"
    other = check_all_answered(8, 7, ("mmlu-3",))
    assert (other.status, other.found) == ("missing", "7 of 8; answers to another prompt: 1, the first to mmlu-3")
    assert "--out" in other.settles


def test_accuracy_that_was_asked_for_needs_no_notice() -> None:
    assert check_accuracy_tested(["mmlu", "layers"]) == []
