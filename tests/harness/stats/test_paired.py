from __future__ import annotations

import math
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multinomial, norm

from assay.harness.stats.paired import mcnemar_exact, questions_needed, smallest_detectable, tango_interval
from assay.harness.stats.share import Interval

N = st.integers(1, 300)


@st.composite
def outcomes(draw: st.DrawFn) -> tuple[int, int, int]:
    """(lost, gained, n)"""
    n = draw(N)
    lost = draw(st.integers(0, n))
    return lost, draw(st.integers(0, n - lost)), n


ALPHAS = st.sampled_from([0.01, 0.05, 0.1, 0.2])


@pytest.mark.parametrize(
    ("lost", "gained", "loss", "two_sided"),
    [
        # Powers of one half.
        (5, 0, 0.03125, 0.0625),
        (7, 0, 0.0078125, 0.015625),
        (10, 0, 0.0009765625, 0.001953125),
        (0, 0, 1.0, 1.0),
        (0, 7, 1.0, 0.015625),
        # Cavo et al. 2012 in Fagerland, Lydersen, Laake, Statistical Analysis of Contingency Tables, chapter 8
        (16, 6, 0.026239, 0.052479),
        # Armitage and Berry 1994, p. 127, as StatsDirect gives it
        (12, 2, 0.00647, 0.0129),
    ],
)
def test_mcnemar_of_known_cases(lost: int, gained: int, loss: float, two_sided: float) -> None:
    tests = mcnemar_exact(lost, gained)
    assert tests.loss == pytest.approx(loss, rel=5e-3)
    assert tests.two_sided == pytest.approx(two_sided, rel=5e-3)


# Above 25 + 25 a p value next to 1 rounds to 1, and no longer grows.
@given(st.integers(0, 25), st.integers(0, 25))
def test_mcnemar_mirrors_and_grows_with_losses(lost: int, gained: int) -> None:
    tests = mcnemar_exact(lost, gained)
    assert tests.two_sided == mcnemar_exact(gained, lost).two_sided
    assert mcnemar_exact(lost + 1, gained).loss < tests.loss
    assert 0 < tests.two_sided <= 1


@pytest.mark.parametrize(
    ("lost", "gained", "n", "alpha", "low", "high"),
    [
        # Fagerland, Lydersen, Laake, chapter 8: Bentur et al. 2009 and Cavo et al. 2012; R's contingencytables agrees.
        (1, 7, 21, 0.05, -0.517, -0.026),
        (6, 16, 161, 0.05, -0.1240, -0.0054),
        # R: PropCIs::scoreci.mp(25, 28, 618, conf.level = 0.9), whose second count is the one that is lost here.
        (28, 25, 618, 0.1, -0.0148, 0.0247),
    ],
)
def test_tango_of_published_cases(lost: int, gained: int, n: int, alpha: float, low: float, high: float) -> None:
    interval = tango_interval(lost, gained, n, alpha)
    digits = 5e-4 if n == 21 else 5e-5
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=digits)
    assert interval.level == pytest.approx(1 - alpha)


@given(N, ALPHAS)
def test_tango_without_a_flip_has_a_closed_form(n: int, alpha: float) -> None:
    z_squared = float(norm.isf(alpha / 2)) ** 2
    interval = tango_interval(0, 0, n, alpha)
    assert interval.high == pytest.approx(z_squared / (n + z_squared))
    assert interval.low == -interval.high


@given(outcomes(), ALPHAS)
def test_tango_holds_the_estimate_and_mirrors(outcome: tuple[int, int, int], alpha: float) -> None:
    lost, gained, n = outcome
    interval, mirrored = tango_interval(lost, gained, n, alpha), tango_interval(gained, lost, n, alpha)
    assert (lost - gained) / n in interval
    assert -1 <= interval.low < interval.high <= 1
    assert (mirrored.low, mirrored.high) == (-interval.high, -interval.low)


@given(outcomes(), ALPHAS)
def test_tango_rises_with_losses_and_widens_with_confidence(outcome: tuple[int, int, int], alpha: float) -> None:
    lost, gained, n = outcome
    interval, wider = tango_interval(lost, gained, n, alpha), tango_interval(lost, gained, n, alpha / 2)
    assert wider.low <= interval.low
    assert wider.high >= interval.high
    if lost + gained < n:
        more = tango_interval(lost + 1, gained, n, alpha)
        assert more.high >= interval.high
        assert more.low >= interval.low


@pytest.mark.parametrize("outcome", [(-1, 0, 4), (0, -1, 4), (3, 2, 4), (0, 0, 0)])
def test_tango_refuses_impossible_counts(outcome: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="is not a result"):
        tango_interval(*outcome, 0.05)


@cache
def cached_tango(lost: int, gained: int, n: int) -> Interval:
    return tango_interval(lost, gained, n, 0.05)


@pytest.mark.parametrize("n", [64, 128, 256])
@pytest.mark.parametrize(
    ("lost", "gained"), [(0.01, 0.01), (0.05, 0.01), (0.05, 0.05), (0.10, 0.02), (0.25, 0.05), (0.01, 0.10)]
)
def test_tango_covers_the_true_loss(n: int, lost: float, gained: float) -> None:
    """The exact coverage, by the probability of every outcome: no simulation, so no luck."""
    most_lost, most_gained = (math.ceil(n * p + 6 * math.sqrt(n * p)) for p in (lost, gained))
    covered = seen = passed = 0.0
    for i in range(most_lost + 1):
        for j in range(min(most_gained, n - i) + 1):
            p = multinomial.pmf([i, j, n - i - j], n, [lost, gained, 1 - lost - gained])
            interval = cached_tango(i, j, n)
            seen += p
            covered += p * (lost - gained in interval)
            passed += p * (interval.high < lost - gained)
    assert seen == pytest.approx(1, abs=1e-4)
    assert covered >= 0.945
    if n * (lost + gained) >= 5:
        assert covered <= 0.96
    # The end that decides: how often a candidate whose loss is just the margin would pass.
    assert passed <= (0.025 if lost > gained else 0.035)


def power_of_mcnemar(n: int, lost: float, gained: float, alpha: float) -> float:
    """Exact probability that McNemar's two-sided test shows a loss."""
    power = 0.0
    for i in range(math.ceil(n * lost + 7 * math.sqrt(n * lost)) + 1):
        for j in range(math.ceil(n * gained + 7 * math.sqrt(n * gained)) + 1):
            if i > j and i + j <= n and mcnemar_exact(i, j).two_sided < alpha:
                power += multinomial.pmf([i, j, n - i - j], n, [lost, gained, 1 - lost - gained])
    return power


def power_to_pass(n: int, lost: float, gained: float, margin: float) -> float:
    """Exact probability that the upper end of the interval is below the margin."""
    power = 0.0
    for i in range(math.ceil(n * lost + 7 * math.sqrt(n * lost)) + 1):
        for j in range(math.ceil(n * gained + 7 * math.sqrt(n * gained)) + 1):
            if i + j <= n and tango_interval(i, j, n, 0.05).high < margin:
                power += multinomial.pmf([i, j, n - i - j], n, [lost, gained, 1 - lost - gained])
    return power


@pytest.mark.parametrize(
    ("n", "flips", "loss"), [(1231, 0.02, 0.01), (338, 0.05, 0.03), (767, 0.05, 0.02), (242, 0.1, 0.05)]
)
def test_the_smallest_detectable_loss_is_near_a_simpler_approximation(n: int, flips: float, loss: float) -> None:
    # Expected values are those of the approximation without the null's own variance: a percent apart.
    assert smallest_detectable(n, flips, 0.05) == pytest.approx(loss, rel=0.012)


def test_connor_of_a_published_case() -> None:
    # powerandsamplesize.com, McNemar: p01 0.45, p10 0.05; 23 pairs, one-sided 0.05, power 0.9.
    loss_of = {n: smallest_detectable(n, 0.5, 0.05, power=0.9) for n in (22, 23)}
    assert loss_of[23] is not None
    assert loss_of[22] is not None
    assert loss_of[23] < 0.4 < loss_of[22]


@pytest.mark.parametrize(("n", "flips"), [(64, 0.02), (256, 0.0), (256, 0.02), (256, 0.1), (1000, 0.05)])
def test_the_smallest_detectable_loss_is_detected_with_the_stated_power(n: int, flips: float) -> None:
    loss = smallest_detectable(n, flips, 0.025)
    assert loss is not None
    psi = max(flips, loss)
    # The exact test is conservative where it rests on few flips, so its power is a little below the formula's.
    assert 0.7 <= power_of_mcnemar(n, (psi + loss) / 2, (psi - loss) / 2, 0.05) <= 0.85


def test_few_questions_can_show_nothing() -> None:
    # Two-sided 0.05: five losses of five have p = 0.0625, six of six 0.03125.
    assert smallest_detectable(5, 0.0, 0.025) is None
    assert smallest_detectable(6, 0.0, 0.025) is not None
    assert smallest_detectable(0, 0.0, 0.025) is None


def test_none_seen_is_not_never() -> None:
    none_seen = smallest_detectable(64, 0.0, 0.025)
    assert none_seen == smallest_detectable(64, 1 - 0.025 ** (1 / 64), 0.025)
    tiny = smallest_detectable(1000, 1e-12, 0.2)
    bounded = smallest_detectable(1000, 0.0, 0.2)
    assert tiny is not None
    assert bounded is not None
    assert tiny <= bounded


@given(st.integers(10, 5000), st.floats(0.0, 0.5))
def test_more_questions_show_smaller_losses(n: int, flips: float) -> None:
    few, many = smallest_detectable(n, flips, 0.025), smallest_detectable(2 * n, flips, 0.025)
    assert many is not None
    assert few is None or many < few


@given(ALPHAS, st.floats(0.01, 0.5))
def test_without_any_flip_the_questions_needed_are_just_enough(alpha: float, margin: float) -> None:
    needed = questions_needed(margin, 0.0, alpha / 2)
    assert tango_interval(0, 0, needed, alpha).high < margin
    assert needed == 1 or tango_interval(0, 0, needed - 1, alpha).high >= margin * (1 - 1e-9)


@pytest.mark.parametrize(("lost", "gained"), [(0.01, 0.01), (0.05, 0.05), (0.03, 0.02)])
def test_the_questions_needed_pass_an_equal_candidate_with_the_stated_power(lost: float, gained: float) -> None:
    n = questions_needed(0.05, lost + gained, 0.025, loss=lost - gained)
    assert 0.75 <= power_to_pass(n, lost, gained, 0.05) <= 0.9


def test_the_questions_needed_show_a_loss_where_that_is_cheaper() -> None:
    n = questions_needed(0.05, 0.07, 0.025, loss=0.049)
    assert 0.72 <= power_of_mcnemar(n, 0.0595, 0.0105, 0.05) <= 0.85
    # A loss beyond the margin can only be shown.
    assert questions_needed(0.05, 0.2, 0.025, loss=0.1) < 300


@given(st.floats(0.0, 0.3), st.floats(0.01, 0.2))
def test_a_gain_needs_no_more_than_no_loss(flips: float, margin: float) -> None:
    assert questions_needed(margin, flips, 0.025, loss=-0.1) == questions_needed(margin, flips, 0.025)
