from __future__ import annotations

import math

import numpy as np
import pytest

from assay.harness.stats.betting import log_wealth, log_wealth_below
from assay.harness.stats.outlook import forecast, smallest_loss_shown

MOST, RUNS = 4096, 300


def first_decided(loss: float, flips: float, margin: float, alpha: float) -> np.ndarray:
    """Simulated numbers of questions until the wager that is right has won; `MOST` + 1 where it has not."""
    rng = np.random.default_rng(0)
    chances = [(flips + loss) / 2, (flips - loss) / 2, 1 - flips]
    found = []
    for _ in range(RUNS):
        values = rng.choice([1, -1, 0], p=chances, size=MOST)
        bets = log_wealth_below if loss < margin else log_wealth
        won = bets(values, margin, -1, 1) >= math.log(1 / alpha)
        found.append(int(won.argmax()) + 1 if won.any() else MOST + 1)
    return np.array(found)


@pytest.mark.parametrize(("margin", "alpha"), [(0.02, 0.05), (0.05, 0.05), (0.1, 0.01)])
def test_without_a_flip_the_number_of_questions_is_exact(margin: float, alpha: float) -> None:
    n = forecast(0.0, 0.0, margin, alpha, MOST).questions
    assert n is not None
    wealth = log_wealth_below(np.zeros(n), margin, -1, 1)
    assert wealth[-2] < math.log(1 / alpha) <= wealth[-1]
    assert forecast(0.0, 0.0, margin, alpha, n).power == 1.0
    assert forecast(0.0, 0.0, margin, alpha, n - 1).power == 0.0


def test_the_issued_goals_are_met_without_a_flip() -> None:
    assert forecast(0.0, 0.0, 0.02, 0.05, MOST).questions <= 260  # type: ignore[operator]
    assert forecast(0.0, 0.0, 0.05, 0.05, MOST).questions <= 105  # type: ignore[operator]


@pytest.mark.parametrize(
    ("loss", "flips", "margin", "alpha"),
    [(0.0, 0.02, 0.02, 0.05), (0.0, 0.05, 0.02, 0.05), (0.05, 0.05, 0.02, 0.01), (0.1, 0.1, 0.02, 0.01), (0.0, 0.05, 0.05, 0.05)],
)
def test_the_expected_number_is_near_the_simulated_median(loss: float, flips: float, margin: float, alpha: float) -> None:
    median = np.median(first_decided(loss, flips, margin, alpha))
    assert forecast(loss, flips, margin, alpha, MOST).questions == pytest.approx(median, rel=0.25)


@pytest.mark.parametrize(("loss", "flips", "most"), [(0.0, 0.05, 1024), (0.0, 0.1, 2048), (0.05, 0.1, 1024)])
def test_the_power_is_near_the_simulated_one(loss: float, flips: float, most: int) -> None:
    simulated = (first_decided(loss, flips, 0.02, 0.05) <= most).mean()
    assert forecast(loss, flips, 0.02, 0.05, most).power == pytest.approx(simulated, abs=0.1)


def test_the_smallest_loss_shown_is_shown_with_the_stated_power() -> None:
    loss = smallest_loss_shown(0.05, 0.02, 0.01, 2048)
    assert loss is not None
    assert 0.78 <= forecast(loss, 0.05, 0.02, 0.01, 2048).power <= 0.93
    assert smallest_loss_shown(0.05, 0.02, 0.01, 3) is None
    assert forecast(0.02, 0.05, 0.02, 0.05, MOST).questions is None, "a loss of the margin is neither above nor below it"
