"""How often the intervals of time ratios cover the truth, how wide they are, and how often a latency gate accuses one of two equal
servers: ``python benchmarks/intervals.py``.

Simulated measurements, two ratios a round, on machines that are noisy in several ways; beside each the same for ratios that are
taken to be independent. The gate's bound is 1, the strictest: at 1.10 it has to be wrong by a tenth besides.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.signal import lfilter

from assay.harness.stats.ratio import decide_ratios

ALPHA = 0.05
Array = NDArray[np.float64]
RNG = np.random.default_rng(0)


def quiet(rounds: int) -> Array:
    return 0.03 * RNG.normal(size=2 * rounds)


def stalling(rounds: int) -> Array:
    """Every fifth ratio has a stall in one of its blocks."""
    stalls = (RNG.random(2 * rounds) < 0.2) * RNG.choice([-1, 1], 2 * rounds) * RNG.exponential(0.4, 2 * rounds)
    return 0.01 * RNG.normal(size=2 * rounds) + stalls


def wandering(phi: float) -> Callable[[int], Array]:
    """An autoregression from round to round, beside the noise of the single ratio."""

    def draw(rounds: int) -> Array:
        series = lfilter([math.sqrt(1 - phi**2)], [1.0, -phi], RNG.normal(size=rounds + 100))[100:]
        return np.asarray(0.05 * np.repeat(series, 2) + quiet(rounds))

    return draw


def slowed(lasting: int) -> Callable[[int], Array]:
    """One server is 15 % slower for so many rounds on average, two times in five."""

    def draw(rounds: int) -> Array:
        state, states = 0.0, []
        for _ in range(rounds):
            if RNG.random() < 1 / lasting:
                state = 0.15 * RNG.choice([-1, 0, 0, 0, 1])
            states.append(state)
        return np.asarray(np.repeat(states, 2) + quiet(rounds))

    return draw


MACHINES: dict[str, Callable[[int], Array]] = {
    "independent": quiet,
    "stalls": stalling,
    **{f"autoregression {phi}": wandering(phi) for phi in (0.5, 0.8, 0.95)},
    **{f"slowed for {rounds} rounds": slowed(rounds) for rounds in (5, 10, 20)},
}


def summary(runs: list[tuple[list[float], list[float]]]) -> str:
    decisions = [decide_ratios([run], 1.0, ALPHA)[0] for run in runs]
    intervals = [decision.ratio.interval for decision in decisions]
    covered = sum(1.0 in interval for interval in intervals) / len(runs)
    width = np.median([math.log(interval.high / interval.low) / 2 for interval in intervals])
    alarms = sum(decision.verdict == "regression" for decision in decisions) / len(runs)
    return f"{covered:.2f}, ±{100 * width:.1f} %, {alarms:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=400, help="of each kind and length")
    args = parser.parse_args()
    told = "covers, half width, false alarms"
    table = Table("machine", "rounds", told, f"as if independent: {told}", title=f"level {1 - ALPHA:g}")
    for name, draw in MACHINES.items():
        for rounds in (6, 12, 30, 65, 120):
            # The reference over itself is never slow for a while: both its blocks are the same server's.
            runs = [(draw(rounds).tolist(), quiet(rounds)[:rounds].tolist()) for _ in range(args.runs)]
            with patch("assay.harness.stats.ratio.dependence", lambda _: 1.0):
                plain = summary(runs)
            table.add_row(name, str(rounds), summary(runs), plain)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
