from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, hypergeom, norm

from assay.harness.stats.binomial import at_most, hypergeometric_at_least, mcnemar, mcnemar_of_loss, more_than, normal_quantile

COUNTS = st.integers(0, 20_000).flatmap(lambda n: st.tuples(st.integers(-1, n), st.just(n)))
SHARES = st.sampled_from([0.0, 1.0, 0.5]) | st.floats(1e-6, 1 - 1e-6)
SIZES = [0, 1, 2, 3, 7, 50, 1_000, 100_000, 1_000_000]


def places(n: int, p: float) -> list[int]:
    """Counts at both ends, beyond them, and around the mean up to 30 standard deviations away."""
    mean, spread = n * p, math.sqrt(n * p * (1 - p))
    around = [round(mean + deviations * spread) for deviations in (-30, -6, -1, 0, 1, 6, 30)]
    return sorted({-5, -1, 0, 1, n - 1, n, n + 1, n + 5, *around})


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("p", [0.0, 1e-12, 1e-6, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1 - 1e-6, 1.0])
def test_binomial_tails_are_scipys_on_a_grid(n: int, p: float) -> None:
    for k in places(n, p):
        assert at_most(k, n, p) == pytest.approx(binom.cdf(k, n, p), rel=1e-7, abs=1e-300), k
        assert more_than(k, n, p) == pytest.approx(binom.sf(k, n, p), rel=1e-7, abs=1e-300), k


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("n", SIZES)
def test_the_edges_are_exact(n: int, p: float) -> None:
    assert (at_most(-1, n, p), more_than(-1, n, p)) == (0.0, 1.0)
    assert (at_most(n, n, p), more_than(n, n, p)) == (1.0, 0.0)
    if n and p in (0.0, 1.0):
        assert (at_most(n - 1, n, p), more_than(n - 1, n, p)) == (1.0 - p, p)


@given(COUNTS, SHARES)
def test_binomial_tails_are_scipys(counts: tuple[int, int], p: float) -> None:
    """Further out, scipy is the one that loses digits: see the next test."""
    k, n = counts
    assert at_most(k, n, p) == pytest.approx(binom.cdf(k, n, p), rel=1e-8, abs=1e-200)
    assert more_than(k, n, p) == pytest.approx(binom.sf(k, n, p), rel=1e-8, abs=1e-200)


@pytest.mark.parametrize(("k", "n", "p"), [(9, 8_709, 0.078125), (0, 2_000, 0.25), (40, 4_000, 0.1875), (3, 900, 0.5)])
def test_a_tail_far_out_is_the_exact_sum(k: int, n: int, p: float) -> None:
    share = Fraction(p)
    exact = sum(math.comb(n, i) * share**i * (1 - share) ** (n - i) for i in range(k + 1))
    assert exact < Fraction(1, 10**120)
    assert at_most(k, n, p) == pytest.approx(float(exact), rel=1e-9, abs=0)
    assert more_than(n - k - 1, n, 1 - p) == pytest.approx(float(exact), rel=1e-9, abs=0)


@given(COUNTS, SHARES)
def test_both_tails_add_up_to_one(counts: tuple[int, int], p: float) -> None:
    k, n = counts
    assert at_most(k, n, p) + more_than(k, n, p) == pytest.approx(1.0, abs=1e-8)


@given(st.tuples(*(st.integers(0, 5_000) for _ in range(3))), st.integers(-1, 5_001))
def test_the_hypergeometric_tail_is_scipys(sizes: tuple[int, int, int], k: int) -> None:
    total, marked, n = max(*sizes, 1), sizes[0], sizes[1]  # scipy knows no draw from nothing
    expected = hypergeom.sf(k - 1, total, marked, n)
    assert hypergeometric_at_least(k, n, marked, total) == pytest.approx(expected, rel=1e-8, abs=1e-300)


@pytest.mark.parametrize(
    ("k", "n", "marked", "total", "expected"),
    [
        (0, 0, 0, 0, 1.0),
        (1, 0, 0, 0, 0.0),
        (-1, 3, 2, 5, 1.0),
        (3, 3, 2, 5, 0.0),
        (2, 4, 3, 5, 1.0),  # only two are not marked
        (5, 5, 5, 5, 1.0),
    ],
)
def test_the_edges_of_the_hypergeometric_tail_are_exact(k: int, n: int, marked: int, total: int, expected: float) -> None:
    assert hypergeometric_at_least(k, n, marked, total) == expected


@pytest.mark.parametrize("p", [1e-12, 0.025, 0.5, 0.8, 0.975])
def test_the_normal_quantile_is_scipys(p: float) -> None:
    assert normal_quantile(p) == pytest.approx(norm.ppf(p), rel=1e-12, abs=1e-12)


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
    assert mcnemar_of_loss(lost, gained) == pytest.approx(loss, rel=5e-3)
    assert mcnemar(lost, gained) == pytest.approx(two_sided, rel=5e-3)


# Above 25 + 25 a p value next to 1 rounds to 1, and no longer grows.
@given(st.integers(0, 25), st.integers(0, 25))
def test_mcnemar_mirrors_and_grows_with_losses(lost: int, gained: int) -> None:
    assert mcnemar(lost, gained) == mcnemar(gained, lost)
    assert mcnemar_of_loss(lost + 1, gained) < mcnemar_of_loss(lost, gained)
    assert 0 < mcnemar(lost, gained) <= 1
