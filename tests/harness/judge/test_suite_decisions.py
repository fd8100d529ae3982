from __future__ import annotations

import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from assay.harness.judge.suite_decisions import CHANCE, GUESSING_ALPHA, MAX_NEEDED, decide_accuracy, decide_share
from assay.harness.stats.share import clopper_pearson, p_not_above

MARGIN, ALPHA = 0.05, 0.05


def needed(why: str) -> int | None:
    """The number of items that would resolve an inconclusive verdict, as its sentence says."""
    found = re.search(r"to resolve: about ([\d,]+) ", why)
    return int(found[1].replace(",", "")) if found else None


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """(n, both_right, lost, gained, both_wrong)"""
    both_right, lost, gained, both_wrong = (draw(st.integers(0, 120)) for _ in range(4))
    return both_right + lost + gained + both_wrong, both_right, lost, gained, both_wrong


def test_the_seed_case_is_a_regression() -> None:
    # 64 questions, 40 right by the reference, 8 by the candidate.
    decision = decide_accuracy(64, 8, 32, 0, 24, MARGIN, ALPHA)
    assert decision.verdict == "regression"
    assert decision.loss == 0.5
    assert decision.p_two_sided == pytest.approx(2 * 0.5**32)
    assert decision.why == (
        "A loss of 50.0 points (38.1 to 61.9 points with 95 % confidence; 32 lost and 0 gained of 64 questions): "
        "significant (exact McNemar p = 4.7e-10) and beyond the margin of 5.0 points."
    )


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_reference_against_itself_passes(lost: int) -> None:
    decision = decide_accuracy(256, 250 - lost, lost, 0, 6, MARGIN, ALPHA)
    assert decision.verdict == "pass"
    assert decision.interval.high < 0.03
    assert "below the margin of 5.0 points" in decision.why


def test_too_few_questions_are_inconclusive_and_the_number_that_settles_it_does() -> None:
    decision = decide_accuracy(16, 16, 0, 0, 0, MARGIN, ALPHA)
    assert decision.verdict == "inconclusive"
    n = needed(decision.why)
    assert n is not None
    assert f"to resolve: about {n} questions, if answers keep flipping at this rate" in decision.why
    assert decide_accuracy(n, n, 0, 0, 0, MARGIN, ALPHA).verdict == "pass"
    assert decide_accuracy(n, n - 1, 1, 0, 0, MARGIN, ALPHA).verdict == "pass"


def test_the_questions_needed_are_more_than_were_asked() -> None:
    # The formula says 4 here, but five losses of five are not significant (p = 0.0625) and six of six are.
    assert needed(decide_accuracy(5, 0, 5, 0, 0, MARGIN, ALPHA).why) == 6
    assert decide_accuracy(6, 0, 6, 0, 0, MARGIN, ALPHA).verdict == "regression"


def test_nothing_compared_is_never_a_pass() -> None:
    decision = decide_accuracy(0, 0, 0, 0, 0, MARGIN, ALPHA)
    assert decision.verdict == "inconclusive"
    assert decision.why == "Nothing was compared: no question was answered by both roles."
    assert decision.smallest_detectable is None
    assert (decision.interval.low, decision.interval.high) == (-1, 1)


def test_a_reference_that_guesses_proves_nothing() -> None:
    equal = decide_accuracy(1000, 250, 0, 0, 750, MARGIN, ALPHA)
    assert equal.verdict == "inconclusive"
    assert "not clearly better than guessing" in equal.why
    assert decide_accuracy(1000, 0, 250, 0, 750, MARGIN, ALPHA).verdict == "inconclusive"
    # 300 of 1000 is better than guessing with p = 0.0002.
    assert decide_accuracy(1000, 300, 0, 0, 700, MARGIN, ALPHA).verdict == "pass"


def test_a_significant_loss_within_the_margin_passes_and_says_so() -> None:
    decision = decide_accuracy(1000, 960, 30, 0, 10, MARGIN, ALPHA)
    assert decision.verdict == "pass"
    assert decision.p_two_sided < 1e-6
    assert "although significant" in decision.why


def test_a_loss_that_may_be_beyond_the_margin_is_a_regression_only_if_significant() -> None:
    significant = decide_accuracy(256, 240, 10, 0, 6, MARGIN, ALPHA)
    assert significant.interval.low < MARGIN < significant.interval.high
    assert significant.verdict == "regression"
    assert "not shown to stay below" in significant.why
    mixed = decide_accuracy(256, 230, 10, 6, 10, MARGIN, ALPHA)
    assert mixed.interval.high > MARGIN
    assert mixed.verdict == "inconclusive"


def test_a_gain_is_no_regression() -> None:
    decision = decide_accuracy(256, 200, 0, 40, 16, MARGIN, ALPHA)
    assert decision.verdict == "pass"
    assert decision.why.startswith("A gain of 15.6 points")


@pytest.mark.parametrize("parts", [(1, 0, 0, 0), (0, 0, 0, 0), (-1, 1, 1, 1)])
def test_counts_that_do_not_add_up_are_refused(parts: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="is not 2"):
        decide_accuracy(2, *parts, MARGIN, ALPHA)


@given(counts(), st.sampled_from([0.01, 0.05, 0.2]), st.sampled_from([0.01, 0.05, 0.3]))
def test_every_verdict_is_what_its_numbers_say(
    parts: tuple[int, int, int, int, int], alpha: float, margin: float
) -> None:
    decision = decide_accuracy(*parts, margin, alpha)
    assert decision.loss in decision.interval
    if decision.verdict == "pass":
        assert decision.interval.high < margin
    if decision.verdict == "regression":
        assert decision.interval.high >= margin
        assert decision.p_two_sided < alpha
        assert decision.loss > 0
    if decision.verdict != "inconclusive":
        assert p_not_above(parts[1] + parts[2], parts[0], CHANCE) < GUESSING_ALPHA, "the reference does not guess"
        assert "resolve" not in decision.why
    if (questions := needed(decision.why)) is not None:
        assert parts[0] < questions <= MAX_NEEDED


@given(counts())
def test_swapped_roles_mirror_the_loss(parts: tuple[int, int, int, int, int]) -> None:
    n, both_right, lost, gained, both_wrong = parts
    one = decide_accuracy(*parts, MARGIN, ALPHA)
    other = decide_accuracy(n, both_right, gained, lost, both_wrong, MARGIN, ALPHA)
    assert (other.loss, other.interval.low, other.interval.high) == (-one.loss, -one.interval.high, -one.interval.low)
    assert other.p_two_sided == one.p_two_sided
    assert [one.verdict, other.verdict].count("regression") < 2


RANK = {"pass": 0, "inconclusive": 1, "regression": 2}


@given(counts())
def test_one_more_loss_never_makes_the_verdict_better(parts: tuple[int, int, int, int, int]) -> None:
    n, both_right, lost, gained, both_wrong = parts
    assume(both_right > 0)
    before = decide_accuracy(*parts, MARGIN, ALPHA)
    after = decide_accuracy(n, both_right - 1, lost + 1, gained, both_wrong, MARGIN, ALPHA)
    assert RANK[after.verdict] >= RANK[before.verdict]


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
    assert decide_share(bad, n, 0.1, ALPHA).verdict == verdict


def test_the_sentence_of_a_share_has_its_numbers_and_the_bound() -> None:
    assert decide_share(0, 32, 0.1, ALPHA, "prompts").why == (
        "0 of 32 prompts are bad (0.0 %; 0.0 % to 8.9 % with 90 % confidence), at most the limit of 10.0 %."
    )
    assert "to resolve: about 61 prompts" in decide_share(1, 32, 0.1, ALPHA, "prompts").why
    assert "no practical number of prompts would resolve this" in decide_share(1, 10, 0.1, ALPHA, "prompts").why


@given(st.integers(1, 200), st.data(), st.sampled_from([0.02, 0.1, 0.3]))
def test_the_items_needed_settle_a_share(n: int, data: st.DataObject, limit: float) -> None:
    bad = data.draw(st.integers(0, n))
    decision = decide_share(bad, n, limit, ALPHA)
    interval = clopper_pearson(bad, n, 2 * ALPHA)
    assert (decision.verdict == "pass") == (interval.high <= limit)
    assert (decision.verdict == "regression") == (interval.low > limit)
    if (items := needed(decision.why)) is not None:
        assert items > n
        rounded = math.floor if bad / n > limit else math.ceil
        for size, settled in [(items, True), (items - 1, False)]:
            verdict = decide_share(rounded(bad / n * size), size, limit, ALPHA).verdict
            assert (verdict != "inconclusive") == settled
