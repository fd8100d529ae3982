from __future__ import annotations

import math

import numpy as np
import pytest

from assay.harness.stats.paired_margin import loss_interval, p_not_above, p_not_below


def probability(lost: int, gained: int, n: int, p_lost: float, p_gained: float) -> float:
    """Of exactly so many losses and gains."""
    rest = n - lost - gained
    ways = math.comb(n, lost) * math.comb(n - lost, gained)
    return ways * p_lost**lost * p_gained**gained * (1 - p_lost - p_gained) ** rest


@pytest.mark.few(1)
@pytest.mark.parametrize(("n", "margin", "alpha"), [(24, 0.1, 0.05), (20, 0.2, 0.1), (20, 0.02, 0.05)])
def test_a_candidate_that_loses_the_margin_passes_no_more_often_than_alpha(n: int, margin: float, alpha: float) -> None:
    passing = [
        (lost, gained) for lost in range(n + 1) for gained in range(n + 1 - lost) if p_not_below(lost, gained, n, margin) <= alpha
    ]
    for gains in np.linspace(0, (1 - margin) / 2, 12):
        rate = sum(probability(lost, gained, n, gains + margin, gains) for lost, gained in passing)
        assert rate <= alpha
    assert passing, "a test that never passes anything holds its level, too"


def test_without_a_flip_the_p_value_is_that_of_seeing_none() -> None:
    for n in (100, 149, 500):
        assert p_not_below(0, 0, n, 0.02) == pytest.approx(0.98**n, rel=0.02, abs=2e-4)
    assert p_not_below(0, 0, 148, 0.02) > 0.05 > p_not_below(0, 0, 150, 0.02)


def test_more_losses_prove_less_and_more_questions_more() -> None:
    values = [p_not_below(lost, 5, 400, 0.03) for lost in range(0, 40, 4)]
    assert values == sorted(values)
    assert p_not_below(5, 5, 1600, 0.03) < p_not_below(5, 5, 400, 0.03)


def test_a_regression_is_the_mirror_image_of_a_pass() -> None:
    assert p_not_above(60, 20, 500, 0.02) == p_not_below(20, 60, 500, -0.02)
    assert p_not_above(60, 20, 500, 0.02) < 0.01 < p_not_above(30, 20, 500, 0.02)


def test_the_interval_holds_the_losses_that_no_test_rejects() -> None:
    interval = loss_interval(30, 12, 300, 0.05)
    assert interval.low < 18 / 300 < interval.high
    assert interval.level == pytest.approx(0.9)
    assert p_not_below(30, 12, 300, interval.high + 1e-3) <= 0.05 < p_not_below(30, 12, 300, interval.high - 1e-3)
    assert p_not_above(30, 12, 300, interval.low - 1e-3) <= 0.05 < p_not_above(30, 12, 300, interval.low + 1e-3)


def test_nothing_and_too_little_show_nothing() -> None:
    assert p_not_below(0, 0, 0, 0.02) == 1.0
    assert (loss_interval(0, 0, 0, 0.05).low, loss_interval(0, 0, 0, 0.05).high) == (-1, 1)
    assert loss_interval(1, 0, 1, 0.05).high == 1.0


@pytest.mark.parametrize(("lost", "gained", "n", "margin"), [(-1, 0, 5, 0.1), (3, 3, 5, 0.1), (0, 0, 5, 1.0)])
def test_counts_that_are_none_are_refused(lost: int, gained: int, n: int, margin: float) -> None:
    with pytest.raises(ValueError, match="lost"):
        p_not_below(lost, gained, n, margin)
