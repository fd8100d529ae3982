from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, hypergeom, norm

from assay.harness.stats.binomial import at_most, hypergeometric_at_least, more_than, normal_quantile

COUNTS = st.integers(0, 20_000).flatmap(lambda n: st.tuples(st.integers(-1, n), st.just(n)))
SHARES = st.sampled_from([0.0, 1.0, 0.5]) | st.floats(1e-6, 1 - 1e-6)


@given(COUNTS, SHARES)
def test_binomial_tails_are_scipys(counts: tuple[int, int], p: float) -> None:
    k, n = counts
    assert at_most(k, n, p) == pytest.approx(binom.cdf(k, n, p), rel=1e-8, abs=1e-300)
    assert more_than(k, n, p) == pytest.approx(binom.sf(k, n, p), rel=1e-8, abs=1e-300)


@given(st.tuples(*(st.integers(0, 5_000) for _ in range(3))), st.integers(-1, 5_001))
def test_the_hypergeometric_tail_is_scipys(sizes: tuple[int, int, int], k: int) -> None:
    total, marked, n = max(*sizes, 1), sizes[0], sizes[1]  # scipy knows no draw from nothing
    expected = hypergeom.sf(k - 1, total, marked, n)
    assert hypergeometric_at_least(k, n, marked, total) == pytest.approx(expected, rel=1e-8, abs=1e-300)


@pytest.mark.parametrize("p", [1e-12, 0.025, 0.5, 0.8, 0.975])
def test_the_normal_quantile_is_scipys(p: float) -> None:
    assert normal_quantile(p) == pytest.approx(norm.ppf(p), rel=1e-12, abs=1e-12)
