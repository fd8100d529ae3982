from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2, f

from assay.harness.stats.noise_bound import MODEL_FACTOR, cell_bounds, chi2_quantile_below, f_quantile_above, freedom_of_spread


@pytest.mark.parametrize("rate", [1e-3, 1e-5, 1e-8])
@pytest.mark.parametrize("top", [1.0, 3.0, 40.0, 5000.0])
@pytest.mark.parametrize("members", [4, 16, 48])
def test_quantiles_of_f(rate: float, top: float, members: int) -> None:
    assert f_quantile_above(rate, top, members * top) == pytest.approx(f.isf(rate, top, members * top), rel=1e-6)


@pytest.mark.parametrize("degrees", [15, 200, 10_000])
def test_quantiles_of_chi_square(degrees: int) -> None:
    assert chi2_quantile_below(0.01, degrees) == pytest.approx(chi2.ppf(0.01, degrees) / degrees)


@pytest.mark.parametrize("freedom", [1, 2, 8, 64])
@pytest.mark.parametrize("known", [True, False], ids=["known", "estimated"])
def test_an_honest_error_is_flagged_at_most_as_often_as_stated(freedom: int, known: bool) -> None:
    rng = np.random.default_rng(freedom)
    cells, alpha = 40_000, 0.01

    def errors(members: int) -> np.ndarray:
        return np.sqrt(rng.chisquare(freedom, (members, cells)) / freedom)

    # Without the factor for other implementations, and at a rate that can be counted: 1 % of the cells.
    bounds = cell_bounds(errors(16), np.full(cells, freedom) if known else None, cells=1, alpha=alpha) / MODEL_FACTOR
    flagged = float((errors(1)[0] > bounds).mean())
    assert flagged < 1.2 * alpha
    if known:
        assert flagged > 0.3 * alpha


def test_few_members_without_noise_excuse_no_error() -> None:
    errors = np.zeros((8, 2))
    errors[:, 1] = 1e-6
    bounds = cell_bounds(errors, np.ones(2), cells=10**9)
    assert bounds[0] == 0.0
    assert np.isfinite(bounds[1])


def test_more_cells_and_less_freedom_widen_the_bound() -> None:
    errors = np.full((16, 2), 0.01)
    few, many = (cell_bounds(errors, np.array([1.0, 1000.0]), cells) for cells in (10, 10_000))
    assert bool((few < many).all())
    assert few[0] > 3 * few[1] > 3 * 0.01


def test_a_member_that_is_not_finite_excuses_nothing() -> None:
    errors = np.array([[0.01, np.nan], [0.01, np.inf], [0.01, np.nan]])
    assert cell_bounds(errors, np.array([100.0, 100.0]))[1] == 0


def test_members_without_an_error_excuse_nothing() -> None:
    assert cell_bounds(np.zeros((8, 2)), np.ones(2), cells=120_000, alpha=1e-3 / 4).tolist() == [0.0, 0.0]


def test_freedom_is_estimated_from_below() -> None:
    rng = np.random.default_rng(0)
    squares = rng.chisquare(30, (16, 4000)) / 30
    found = freedom_of_spread(np.sqrt(squares))
    assert float((found > 30).mean()) < 0.02
    assert float(np.median(found)) > 5
    assert freedom_of_spread(np.zeros((4, 1)))[0] == 1


def test_one_member_is_no_ensemble() -> None:
    with pytest.raises(ValueError, match="at least two"):
        cell_bounds(np.ones((1, 3)))
