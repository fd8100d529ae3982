from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import fisher_exact

from assay.harness.stats.share import clopper_pearson, fisher_exact_greater, mcnemar, mcnemar_of_loss, p_not_above

COUNTS = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


def test_clopper_pearson_of_known_cases() -> None:
    # 0 of n has the closed form 1 - (alpha / 2)^(1 / n); 4 of 10 is 0.1216 to 0.7376 in every textbook table.
    assert clopper_pearson(0, 20, 0.05).high == pytest.approx(1 - 0.025 ** (1 / 20))
    interval = clopper_pearson(4, 10, 0.05)
    assert (interval.low, interval.high) == pytest.approx((0.1216, 0.7376), abs=5e-5)


@given(COUNTS, st.sampled_from([0.01, 0.05, 0.2]))
def test_the_interval_holds_the_share_and_mirrors(counts: tuple[int, int], alpha: float) -> None:
    count, n = counts
    for make in (clopper_pearson,):
        interval, mirrored = make(count, n, alpha), make(n - count, n, alpha)
        assert count / n in interval
        assert 0 <= interval.low < interval.high <= 1
        assert (mirrored.low, mirrored.high) == pytest.approx((1 - interval.high, 1 - interval.low))


@pytest.mark.filterwarnings("error")
def test_nothing_asked_says_nothing() -> None:
    for make in (clopper_pearson,):
        interval = make(0, 0, 0.05)
        assert (interval.low, interval.high, interval.level) == (0.0, 1.0, 0.95)
    assert p_not_above(0, 0, 0.25) == 1.0


def test_better_than_guessing_is_distinguished_from_guessing() -> None:
    # The seed's threshold is 39 of 64; 8 of 64 was its result.
    assert p_not_above(39, 64, 0.25) < 1e-8
    assert p_not_above(8, 64, 0.25) > 0.99
    assert p_not_above(4, 4, 0.25) == pytest.approx(0.25**4)


@pytest.mark.parametrize("counts", [(5, 4), (-1, 4)])
def test_a_count_that_is_no_share_is_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is not a share"):
        clopper_pearson(*counts, 0.05)


@given(st.tuples(*(st.integers(1, 3_000) for _ in range(4))))
def test_fishers_exact_test_is_scipys(table: tuple[int, int, int, int]) -> None:
    a, b, c, d = table
    expected = fisher_exact([[a, b], [c, d]], alternative="greater").pvalue
    assert fisher_exact_greater(a, b, c, d) == pytest.approx(expected, rel=1e-8, abs=1e-300)


@pytest.mark.parametrize(
    ("lost", "gained", "loss", "two_sided"),
    [
        # Powers of one half.
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
    assert mcnemar(lost, gained) == mcnemar(gained, lost) == pytest.approx(two_sided, rel=5e-3)
