"""The bootstrap-t interval: against a formula, and on skewed data against the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from assay.harness.stats.bootstrap import DRAWS, bootstrap_t


def test_of_normal_values_it_is_students_interval() -> None:
    values = np.random.default_rng(0).normal(3, 2, 200)
    mean = bootstrap_t(values, 0.05)
    low, high = stats.t.interval(0.90, 199, values.mean(), stats.sem(values))
    width = high - low
    assert mean.value == pytest.approx(values.mean())
    assert (mean.low, mean.high) == (pytest.approx(low, abs=0.05 * width), pytest.approx(high, abs=0.05 * width))
    limit = values.mean() - 1.5 * stats.sem(values)
    assert mean.p_not_above(limit) == pytest.approx(stats.t.sf(1.5, 199), abs=0.015)


def test_it_does_not_depend_on_scale_or_place() -> None:
    values = np.random.default_rng(1).lognormal(0, 1, 64)
    one, other = bootstrap_t(values, 0.05), bootstrap_t(1e-6 * values + 7, 0.05)
    assert ((other.low - 7) * 1e6, (other.high - 7) * 1e6) == (
        pytest.approx(one.low, rel=1e-5), pytest.approx(one.high, rel=1e-5)
    )  # fmt: skip


def test_of_skewed_values_the_upper_part_is_longer() -> None:
    mean = bootstrap_t(np.random.default_rng(2).lognormal(0, 1, 64), 0.05)
    assert mean.high - mean.value > 1.3 * (mean.value - mean.low)


def test_p_agrees_with_the_bound() -> None:
    mean = bootstrap_t(np.random.default_rng(3).lognormal(0, 1, 40), 0.05)
    assert mean.p_not_above(mean.low * 0.999) < 0.05 < mean.p_not_above(mean.low * 1.001)
    assert mean.p_not_above(-100.0) == mean.p_not_below(100.0) == 1 / (DRAWS + 1)
    assert mean.p_not_below(mean.high * 1.001) < 0.05 < mean.p_not_below(mean.high * 0.999)
    assert mean.p_not_above(100.0) == 1.0


@pytest.mark.parametrize("value", [0.0, 22.5])
def test_equal_values_are_certain(value: float) -> None:
    mean = bootstrap_t([value] * 64, 0.05)
    assert (mean.value, mean.low, mean.high) == (value, value, value)
    assert mean.p_not_above(value) == 1.0
    assert mean.p_not_above(value - 1) == mean.p_not_below(value + 1) < 0.001


def test_a_single_value_has_no_bounds() -> None:
    mean = bootstrap_t([3.0], 0.05)
    assert (mean.low, mean.high) == (-math.inf, math.inf)
    assert mean.p_not_above(0.0) == 1.0


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_what_is_not_finite_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        bootstrap_t(values, 0.05)


def test_on_skewed_data_it_covers_where_the_normal_interval_does_not() -> None:
    """The mean of 64 log-normal values (sigma 1): shares of 300 intervals of level 0.95."""
    rng, truth = np.random.default_rng(4), math.exp(0.5)
    covered = near = 0
    for _ in range(300):
        values = rng.lognormal(0, 1, 64)
        mean = bootstrap_t(values, 0.025)
        covered += mean.low <= truth <= mean.high
        near += abs(mean.value - truth) <= 1.96 * mean.error
    assert covered / 300 >= 0.92
    assert covered > near
