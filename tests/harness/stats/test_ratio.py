from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.signal import lfilter
from scipy.stats import wilcoxon

from assay.harness.stats.multiple import holm
from assay.harness.stats.ratio import MIN_RATIOS, _mean_ratio, _p_at_most, decide_ratios, dependence, ratio_of, warm_up


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator of each test's own, so that no result depends on which tests ran before."""
    return np.random.default_rng(5)


def drifting(rng: np.random.Generator, rounds: int, ratio: float, stalls: float = 0.1) -> list[float]:
    """Log ratios of a run of so many rounds: a clock that drifts by some ten per cent, skewed noise, and blocks that stall."""
    blocks = 4 * rounds
    noise = 0.02 * rng.exponential(1, blocks) + (rng.random(blocks) < stalls) * rng.exponential(0.5, blocks)
    drift = 0.2 * np.sin(np.linspace(0, 3, blocks) + 6 * rng.random())
    times = rng.permuted((noise + drift).reshape(rounds, 4), axis=1)
    logs = np.stack([times[:, 1] - times[:, 0], times[:, 3] - times[:, 2]], axis=1).ravel() + math.log(ratio)
    return [float(log) for log in logs]


def lasting(rng: np.random.Generator, rounds: int, seldom: float) -> list[float]:
    """Log ratios of equal servers, two a round, one of which is now and then 15 % slower for ``seldom`` rounds on average."""
    state = 0.0
    states = []
    for _ in range(rounds):
        if rng.random() < 1 / seldom:
            state = 0.15 * rng.choice([-1, 0, 0, 0, 1])
        states.append(state)
    return [float(x) for x in np.repeat(states, 2) + 0.03 * rng.normal(size=2 * rounds)]


def test_the_interval_covers_on_a_drifting_and_stalling_machine(rng: np.random.Generator) -> None:
    for rounds in (4, 12):
        intervals = [ratio_of(drifting(rng, rounds, 1.07), 0.05).interval for _ in range(400)]
        # Three standard errors of a share of 0.95 among 400 are 0.033.
        assert sum(1.07 in interval for interval in intervals) / 400 >= 0.95 - 0.033


def test_the_interval_covers_where_one_server_is_slow_for_a_while(rng: np.random.Generator) -> None:
    for rounds in (12, 65):
        ratios = [ratio_of(lasting(rng, rounds, 10), 0.05) for _ in range(300)]
        assert sum(1.0 in ratio.interval for ratio in ratios) / len(ratios) >= 0.90  # 0.76 and 0.38 as if independent
        assert np.median([ratio.effective for ratio in ratios]) < 0.9 * 2 * rounds


def test_dependence_is_the_autocorrelation_time(rng: np.random.Generator) -> None:
    # (1 + phi) / (1 - phi) of an autoregression; ranks of normal values correlate nearly as the values do.
    for phi in (0.0, 0.5, 0.8):
        noise = rng.normal(size=20_000)
        series = lfilter([1.0], [1.0, -phi], noise)
        assert dependence(series) == pytest.approx((1 + phi) / (1 - phi), rel=0.15)
    assert dependence(np.zeros(8)) == 1.0
    assert dependence(np.array([1.0, -1.0] * 10)) == 1.0, "neighbours that differ more than chance narrow nothing"
    assert dependence(np.array([0.1])) == 1.0


def test_the_interval_is_no_wider_than_the_ratios() -> None:
    trend = [0.01 * i for i in range(12)]
    interval = ratio_of(trend, 0.05).interval
    assert (math.log(interval.low), math.log(interval.high)) == pytest.approx((0.0, 0.11))


@pytest.mark.parametrize("n", [6, 9, 20, 50, 80])
def test_the_interval_is_what_the_signed_rank_test_does_not_reject(rng: np.random.Generator, n: int) -> None:
    logs = [float(x) for x in independent(rng, n)]
    interval = ratio_of(logs, 0.05).interval
    for end, inside in ((interval.low, 1), (interval.high, -1)):
        for side in (-1, 1):
            shifted = np.array(logs) - (math.log(end) + side * inside * 1e-6)
            rejected = wilcoxon(shifted, method="exact" if n <= 50 else "approx", correction=True).pvalue <= 0.05
            assert rejected == (side < 0), (n, end, side)


def independent(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    """Values that happen to show no dependence at all, so that the interval is the exact one."""
    while True:
        logs = rng.normal(0.1, 0.05, n)
        if ratio_of(list(logs), 0.05).effective == n:
            return logs


def test_scale_and_direction() -> None:
    ratio = ratio_of([math.log(2.0)] * 8, 0.05)
    assert (ratio.value, ratio.interval.low, ratio.interval.high) == pytest.approx((2.0, 2.0, 2.0))
    turned = ratio_of([-x for x in (0.1, 0.3, 0.2, 0.15, 0.25, 0.05, 0.12)], 0.05)
    straight = ratio_of([0.1, 0.3, 0.2, 0.15, 0.25, 0.05, 0.12], 0.05)
    assert turned.value * straight.value == pytest.approx(1.0)
    assert turned.interval.low * straight.interval.high == pytest.approx(1.0)


def test_too_few_ratios_bound_nothing() -> None:
    few = ratio_of([0.5] * (MIN_RATIOS - 1), 0.05)
    assert (few.interval.low, few.interval.high) == (0.0, math.inf)
    assert math.isfinite(ratio_of([0.5] * MIN_RATIOS, 0.05).interval.high)
    assert math.isnan(ratio_of([], 0.05).value)


def logs_of(ratio: float, n: int = 20, spread: float = 0.01) -> list[float]:
    """Evenly spread, in an order that shows no dependence."""
    shuffle = np.random.default_rng(1).permutation
    places = shuffle(n)
    while dependence(places - (n - 1) / 2) > 1:
        places = shuffle(n)
    return [math.log(ratio) + spread * (float(place) - (n - 1) / 2) / n for place in places]


def test_verdicts() -> None:
    same = logs_of(1.0)
    slow, fast, at_bound, one = decide_ratios(
        [(logs_of(1.3), same), (logs_of(0.8), same), (logs_of(1.1, spread=0.1), same), (logs_of(2.0, n=1), same)], 1.1, 0.05
    )
    assert [d.verdict for d in (slow, fast, at_bound, one)] == ["regression", "pass", "inconclusive", "inconclusive"]
    assert [d.reason for d in (slow, fast, at_bound, one)] == ["above", "below", "not clear", "too few"]


def test_a_reference_that_is_slower_than_itself_gives_no_regression() -> None:
    (decision,) = decide_ratios([(logs_of(1.3), logs_of(1.25))], 1.1, 0.05)
    assert (decision.verdict, decision.reason) == ("inconclusive", "too noisy")


def test_noise_of_the_reference_against_itself_must_be_outdone_on_either_side() -> None:
    wide = [math.log(0.7) + 0.01 * i for i in range(8)]
    (near,) = decide_ratios([(logs_of(1.3), wide)], 1.1, 0.05)
    (far,) = decide_ratios([(logs_of(1.6), wide)], 1.1, 0.05)
    (unknown,) = decide_ratios([(logs_of(9.0), logs_of(1.0, n=MIN_RATIOS - 1))], 1.1, 0.05)
    assert [d.verdict for d in (near, far, unknown)] == ["inconclusive", "regression", "inconclusive"]
    assert [d.reason for d in (near, far, unknown)] == ["too noisy", "above", "too few"]
    assert unknown.floor.n == MIN_RATIOS - 1


def test_the_largest_of_many_ratios_is_no_regression_by_its_luck() -> None:
    # Six ratios above the bound have p = 1/64 alone, which is below 0.05; among 32 it is not.
    lucky = logs_of(1.2, n=6)
    alone = decide_ratios([(lucky, logs_of(1.0))], 1.1, 0.05)[0]
    among = decide_ratios([(lucky, logs_of(1.0))] + [(logs_of(1.0), logs_of(1.0))] * 31, 1.1, 0.05)[0]
    assert (alone.verdict, among.verdict) == ("regression", "inconclusive")
    assert (alone.reason, among.reason) == ("above", "not significant")


def test_identical_servers_raise_no_alarm_and_a_slow_one_does(rng: np.random.Generator) -> None:
    def run(ratio: float) -> list[str]:
        measured = [(drifting(rng, 16, ratio), drifting(rng, 16, 1.0)[:16]) for _ in range(16)]
        return [decision.verdict for decision in decide_ratios(measured, 1.1, 0.05)]

    assert not any("regression" in run(1.0) for _ in range(50))
    assert all("regression" in run(1.3) for _ in range(5))


def test_holms_correction_is_that_of_statsmodels() -> None:
    from statsmodels.stats.multitest import multipletests

    for p in ([0.01, 0.5, 0.011, 0.04], [0.2], [0.03, 0.03, 0.9]):
        assert holm(p) == pytest.approx(multipletests(p, 0.05, method="holm")[1].tolist())
    assert holm([]) == []


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.9"):
        decide_ratios([], 0.9, 0.05)


def test_autocorrelated_ratios_prove_less() -> None:
    """The same values are far less likely to be chance in random order than one after the other."""
    rising = sorted(logs_of(1.12, n=24, spread=0.1))
    assert _p_at_most(rising, 1.1) > 2 * _p_at_most(logs_of(1.12, n=24, spread=0.1), 1.1)
    # Far beyond the bound no dependence explains it: by Student's t, even for as few as they are worth.
    assert _p_at_most(rising, 0.5) < 0.001


@pytest.mark.slow  # fast: test_identical_servers_raise_no_alarm_and_a_slow_one_does
def test_equal_servers_of_which_one_is_slow_for_a_while_are_seldom_called_unequal(rng: np.random.Generator) -> None:
    alarms = [decide_ratios([(lasting(rng, 65, 10), logs_of(1.0))], 1.0, 0.05)[0].verdict for _ in range(200)]
    assert alarms.count("regression") / 200 <= 0.05  # 0.18 as if independent


@pytest.mark.slow  # fast: test_identical_servers_raise_no_alarm_and_a_slow_one_does
def test_equal_servers_are_seldom_called_unequal_in_any_of_several_loads(rng: np.random.Generator) -> None:
    def alarm() -> bool:
        loads = []
        for _ in range(8):
            series = lfilter([0.6], [1.0, -0.8], rng.normal(size=112))[100:]  # an autoregression of variance 1
            loads.append((list(np.repeat(0.05 * series, 2) + 0.03 * rng.normal(size=24)), logs_of(1.0)))
        return any(decision.verdict == "regression" for decision in decide_ratios(loads, 1.0, 0.05))

    # Three standard errors of a share of 0.05 among 100 are 0.065. Each ratio by its own dependence: 0.15 to 0.25.
    assert sum(alarm() for _ in range(100)) / 100 <= 0.05 + 0.065


def test_several_short_series_show_a_dependence_that_none_shows_by_itself(rng: np.random.Generator) -> None:
    def together(phi: float) -> tuple[float, float]:
        series = [lfilter([1.0], [1.0, -phi], rng.normal(size=124))[100:] for _ in range(8)]
        return dependence(*series), float(np.quantile([dependence(each) for each in series], 0.75))

    pooled, quartile = np.median([together(0.95) for _ in range(20)], axis=0)
    assert pooled > 1.5 * quartile, "39 in truth, of 24 values each"
    assert np.median([together(0.0)[0] for _ in range(20)]) < 1.3


def test_a_ratio_of_means_is_tested_by_the_random_order_of_blocks(rng: np.random.Generator) -> None:
    def rounds(slow: float, tail: float = 0.0) -> list[list[float]]:
        times = np.exp(0.1 * rng.normal(size=(12, 4, 8)))
        times[:, 2:] *= slow * np.where(rng.random((12, 2, 8)) < tail, 20.0, 1.0)
        return [list(map(float, blocks)) for blocks in times.mean(axis=2)]

    assert math.isnan(_mean_ratio([], 1.1)[0])
    assert _mean_ratio(rounds(1.4), 1.1)[1] < 0.001
    at_bound = [_mean_ratio(rounds(1.1), 1.1)[1] <= 0.05 for _ in range(200)]
    assert sum(at_bound) / 200 <= 0.05 + 0.046, "three standard errors"
    seen = [_mean_ratio(rounds(1.0, 0.02), 1.1)[0] > 1.1 for _ in range(50)]
    assert sum(seen) / 50 >= 0.8, "one request in 50 that takes 20 times as long"


def test_the_first_round_is_warm_up_and_so_are_slow_ones_after_it() -> None:
    steady = [5.0, 1.0, 1.02, 0.99, 1.0, 1.01, 1.0, 0.98]
    late = [5.0, 3.0, 1.5, 0.99, 1.0, 1.01, 1.0, 0.98]
    assert warm_up([[steady] * 3, [steady] * 3]) == 1
    assert warm_up([[steady] * 3, [late] * 3]) == 3, "the slower of the two roles decides"
    assert warm_up([[steady] * 3, [steady, steady, late]]) == 1, "one load's hiccup is no warm-up"


def test_at_most_half_is_warm_up() -> None:
    falling = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert warm_up([[falling], [falling]]) <= 4
    assert warm_up([[[1.0]], [[1.0]]]) == 1
    assert warm_up([]) == 0
