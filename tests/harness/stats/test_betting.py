from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.harness.stats.betting import STAKES, WEIGHTS, betting_interval, log_wealth, log_wealth_below, p_value

LOSSES = st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.0, 0.0, 1.0]), min_size=1, max_size=60)
NULLS = st.sampled_from([-0.3, 0.0, 0.02, 0.1])


def test_the_weights_share_one_wealth() -> None:
    assert math.fsum(WEIGHTS) == pytest.approx(1.0)
    assert len(WEIGHTS) == len(STAKES)
    assert all(0 < stake < 1 for stake in STAKES)


@pytest.mark.parametrize("null", [0.02, 0.1])
def test_without_a_flip_the_wealth_has_a_closed_form(null: float) -> None:
    n = 50
    expected = sum(w * (1 + stake * null / (1 - null)) ** n for w, stake in zip(WEIGHTS, STAKES, strict=True))
    assert log_wealth_below(np.zeros(n), null, -1, 1)[-1] == pytest.approx(math.log(expected))


def test_at_the_null_hypothesis_the_expected_wealth_is_one() -> None:
    # Independent values, 1 with probability .3, -1 with .2, 0 with .5: a mean of .1. All courses of five values.
    probability = {1: 0.3, -1: 0.2, 0: 0.5}
    wealth = np.zeros(5)
    for values in itertools.product(probability, repeat=5):
        wealth += math.prod(probability[value] for value in values) * np.exp(log_wealth(values, 0.1, -1, 1))
    assert wealth == pytest.approx(np.ones(5))


@pytest.mark.parametrize("population", [(1, 0, 0, 0, 0, 0), (1, 1, -1, 0, 0, 0), (-1, -1, 1, 1, 1, 0), (0.5, -1, 1, 0.25, 0, 0)])
@pytest.mark.parametrize("drawn", [3, 6])
def test_drawn_from_a_finite_set_the_error_rate_holds_at_every_look(population: tuple[float, ...], drawn: int) -> None:
    mean = float(np.mean(population))
    orders = set(itertools.permutations(population, drawn)) if drawn == 3 else set(itertools.permutations(population))
    every = [order[:drawn] for order in itertools.permutations(population)]
    assert orders <= set(every)
    for null in (mean, mean + 0.1, mean + 0.3):
        final = [np.exp(log_wealth(order, null, -1, 1, len(population))) for order in every]
        assert np.mean(final, axis=0).max() <= 1 + 1e-9
        for level in (1.3, 2.0, 4.0):
            assert np.mean([wealth.max() >= level for wealth in final]) <= 1 / level


def test_the_bets_below_mirror_those_above() -> None:
    values = [1, 0, -1, 0, 1, 1]
    assert log_wealth_below(values, 0.1, -1, 1, 20) == pytest.approx(log_wealth([-v for v in values], -0.1, -1, 1, 20))


@given(LOSSES, NULLS)
def test_more_evidence_against_a_smaller_mean(values: list[float], null: float) -> None:
    assert p_value(log_wealth(values, null, -1, 1)) <= p_value(log_wealth(values, null + 0.1, -1, 1)) + 1e-12
    assert p_value(log_wealth(values, null, -1, 1)) >= p_value(log_wealth([*values, 1.0], null, -1, 1)), "it never rises"


@given(LOSSES, st.sampled_from([0.05, 0.2]), st.sampled_from([None, 100]))
def test_the_interval_holds_what_no_bet_rejects(values: list[float], alpha: float, population: int | None) -> None:
    interval = betting_interval(values, alpha, -1, 1, population)
    mean = float(np.mean(values))
    assert mean in interval
    assert interval.level == 1 - 2 * alpha
    for null in (-0.5, -0.02, 0.02, 0.5):
        if null < min(interval.low, mean) - 1e-6:
            assert p_value(log_wealth(values, null, -1, 1, population)) <= alpha
        if null > max(interval.high, mean) + 1e-6:
            assert p_value(log_wealth_below(values, null, -1, 1, population)) <= alpha
        if interval.low + 1e-6 < null < interval.high - 1e-6 and not math.isclose(interval.low, mean):
            assert null <= mean or p_value(log_wealth(values, null, -1, 1, population)) > alpha


def test_nothing_drawn_is_no_evidence() -> None:
    interval = betting_interval([], 0.05, -1, 1)
    assert (interval.low, interval.high) == (-1, 1)
    assert p_value(log_wealth([], 0.0, -1, 1)) == 1.0


@pytest.mark.parametrize(("values", "null"), [([2.0], 0.0), ([0.0], 1.0), ([0.0], -1.0), ([math.nan], 0.0)])
def test_what_is_outside_the_bounds_is_refused(values: list[float], null: float) -> None:
    with pytest.raises(ValueError, match="between -1 and 1"):
        log_wealth(values, null, -1, 1)
