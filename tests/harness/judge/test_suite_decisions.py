from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.harness.judge.answers import Pair
from assay.harness.judge.greedy_suite import decide_share
from assay.harness.judge.paired_accuracy import Accuracy, Rule, accuracy_of, accuracy_sentence

MARGIN, ALPHA = 0.05, 0.05
RULE = Rule(MARGIN, ALPHA, ALPHA / 5, None)


Decide = Callable[..., Accuracy]


@pytest.fixture(scope="session")
def decide(paired: Callable[..., list[Pair]]) -> Decide:
    """The decision on so many questions that both got right, and were lost, gained, and wrong by both."""
    return lambda *counts: accuracy_of(paired(*counts), RULE)


def test_the_seed_case_is_a_regression(decide: Decide) -> None:
    # 64 questions, 40 right by the reference, 8 by the candidate.
    decision = decide(8, 32, 0, 24)
    assert (decision.verdict, decision.loss) == ("regression", 0.5)
    assert decision.p_regression < 1e-6
    assert decision.interval.low > 0.2
    assert re.fullmatch(
        r"A loss of 50\.0 points \(\d\d\.\d to \d\d\.\d points with 90 % confidence; 32 lost and 0 gained of 64 questions\): "
        r"above the margin of 5\.0 points \(anytime-valid p = \S+\)\.",
        accuracy_sentence(decision),
    )


def test_too_few_questions_are_inconclusive(decide: Decide) -> None:
    assert decide(16).verdict == "inconclusive"


def test_nothing_compared_is_never_a_pass(decide: Decide) -> None:
    decision = decide()
    assert decision.verdict == "inconclusive"
    assert accuracy_sentence(decision) == "Nothing was compared: no question was answered by both roles."
    assert (decision.interval.low, decision.interval.high) == (-1, 1)


def test_a_reference_that_guesses_proves_nothing(decide: Decide) -> None:
    equal = decide(250, 0, 0, 750)
    assert equal.verdict == "inconclusive"
    assert "not shown to beat guessing (25 %) by 2 margins of 5.0 points" in accuracy_sentence(equal)
    assert decide(0, 250, 0, 750).verdict == "inconclusive"
    assert decide(300, 0, 0, 700).verdict == "inconclusive", "better than guessing, but there is hardly anything to lose"
    assert decide(600, 0, 0, 400).verdict == "pass"


def test_a_significant_loss_within_the_margin_passes_and_says_so(decide: Decide) -> None:
    decision = decide(2940, 50, 0, 10)
    assert decision.verdict == "pass"
    assert "within it, the loss is significant (exact McNemar p = " in accuracy_sentence(decision)


@given(both_right=st.integers(0, 90), lost=st.integers(0, 30), gained=st.integers(0, 30), both_wrong=st.integers(0, 60))
def test_every_verdict_is_what_its_numbers_say(both_right: int, lost: int, gained: int, both_wrong: int, decide: Decide) -> None:
    decision = decide(both_right, lost, gained, both_wrong)
    assert decision.loss in decision.interval
    if decision.verdict == "pass":
        assert decision.interval.high < MARGIN or decision.loss >= MARGIN
    if decision.verdict == "regression":
        assert decision.p_regression <= RULE.regression_alpha
        assert decision.interval.low > MARGIN or decision.loss <= MARGIN


@pytest.mark.parametrize(
    ("bad", "n", "verdict"),
    [
        (0, 0, "inconclusive"),
        (0, 28, "inconclusive"),  # 1 - 0.05^(1/28) = 0.1015
        (0, 29, "pass"),  # 1 - 0.05^(1/29) = 0.0981
        (1, 32, "inconclusive"),
        (6, 32, "inconclusive"),
        (7, 32, "regression"),
        (32, 32, "regression"),
    ],
)
def test_a_share_is_decided_by_its_bounds(bad: int, n: int, verdict: str) -> None:
    assert decide_share(bad, n, 0.1, ALPHA) == verdict
