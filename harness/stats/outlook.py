"""The likely number of questions of a betting test, and its power: what a run prints before it asks anything."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from assay.harness.stats.betting import STAKES, WEIGHTS, Array
from assay.harness.stats.share import root

_COURSES, _LOOKS = 128, 160
"""Simulated courses, and looks at each. Half of the looks are spread evenly, since a wager can win and lose again between two. A
simulation takes 8 ms and knows a power to 0.045."""
_WANTED = 0.8
"""Power with which a loss is to be shown."""


@dataclass(frozen=True)
class _Forecast:
    """The forecast for a number of questions.

    Attributes:
        questions: median number of questions until the right verdict; None if it is more than the limit.
        power: probability of the right verdict within the limit.
    """

    questions: int | None
    power: float


def forecast(loss: float, flips: float, margin: float, alpha: float, most: int) -> _Forecast:
    """Simulate the test: a loss below the margin is to be shown to be below it, any other to be above it.

    Args:
        loss: the true loss, as a share of 1.
        flips: share of answers that differ in being right; at least the loss.
        margin: largest loss that still passes.
        alpha: level of the test.
        most: the limit.
    """
    flips = max(flips, abs(loss))
    if flips in (0.0, loss * loss):  # nothing is left to chance
        won = _log_wealth(np.arange(1, most + 1), loss, flips, margin, 0.0) >= math.log(1 / alpha)
        return _Forecast(int(won.argmax()) + 1, 1.0) if won.any() else _Forecast(None, 0.0)
    early, late = np.geomspace(1, most, _LOOKS // 2), np.linspace(most / 32, most, _LOOKS // 2)
    looks = np.unique(np.concatenate([early, late]).astype(int))
    chances = [(flips + loss) / 2, (flips - loss) / 2, 1 - flips]
    drawn = np.random.default_rng(0).multinomial(np.diff(looks, prepend=0), chances, size=(_COURSES, looks.size))
    lost, gained, same = np.cumsum(drawn, axis=1).transpose(2, 0, 1)
    wealth = (
        _log_wealth_of(gained, same, lost, -margin) if loss < margin else _log_wealth_of(lost, same, gained, margin)
    )
    won = wealth >= math.log(1 / alpha)
    # Decided at some question between the look that notices it and the one before.
    between = np.sqrt(looks * np.append(1, looks[:-1]))
    needed = np.where(won.any(axis=1), between[won.argmax(axis=1)], most + 1)
    middle = int(np.median(needed))
    return _Forecast(middle if middle <= most else None, float((needed <= most).mean()))


def smallest_loss_shown(flips: float, margin: float, alpha: float, most: int) -> float | None:
    """Compute the smallest true loss that `most` questions show to be above the margin with a power of 0.8; None if none is.

    The wealth depends only on how many answers were lost, gained and equal. It is computed for a course whose sum of losses falls
    short by as many standard deviations as the power allows, and at its end: a wager may have won before and lost again, so the
    loss is slightly too large.
    """
    unlucky = NormalDist().inv_cdf(_WANTED)

    def beyond(loss: float) -> float:
        return float(_log_wealth(np.array([most]), loss, flips, margin, unlucky)[0]) - math.log(1 / alpha)

    if not most or beyond(1.0) < 0:
        return None
    return root(beyond, margin, 1.0)


def _log_wealth(n: Array | np.ndarray, loss: float, flips: float, margin: float, unlucky: float) -> Array:
    """Compute the logarithm of the wealth after `n` questions of the wager that is right about the loss, in a course so unlucky."""
    psi = max(flips, abs(loss))
    passes = loss < margin
    worse = unlucky * np.sqrt(n * (psi - loss * loss)) * (1 if passes else -1)
    total = np.clip(n * loss + worse, -n, n)  # lost minus gained
    flipped = np.maximum(n * psi, np.abs(total))
    lost, gained = (flipped + total) / 2, (flipped - total) / 2
    if passes:
        return _log_wealth_of(gained, n - flipped, lost, -margin)
    return _log_wealth_of(lost, n - flipped, gained, margin)


def _log_wealth_of(won: Array, same: Array, lost: Array, price: float) -> Array:
    """Compute the logarithm of the wealth of bets against `price`, by how many values were 1, 0 and -1."""
    excess = (np.array([1, 0, -1]) - price) / (price + 1)
    wealth = [
        np.log(weight)
        + sum(count * gain for count, gain in zip((won, same, lost), np.log1p(stake * excess), strict=True))
        for stake, weight in zip(STAKES, WEIGHTS, strict=True)
    ]
    return np.asarray(np.logaddexp.reduce(wealth, axis=0))
