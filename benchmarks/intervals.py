"""Coverage and width of the intervals of time ratios, and false alarms of a latency gate between two equal servers.

    python benchmarks/intervals.py

Simulates measurements with two ratios per round on machines with different kinds of noise, and shows each next to the result for
ratios treated as independent. The gate's bound is 1, the strictest; a false alarm at 1.10 would also need an error of 10 %. The
alarms of a bench of several loads stand beside its power: how often a candidate that takes 1.3 times as long is found at a bound of
1.1.
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
LOADS = 8
Array = NDArray[np.float64]
RNG = np.random.default_rng(0)


def quiet(rounds: int) -> Array:
    return 0.03 * RNG.normal(size=2 * rounds)


def stalling(rounds: int) -> Array:
    """Every fifth ratio has a stall in one of its blocks."""
    stalls = (RNG.random(2 * rounds) < 0.2) * RNG.choice([-1, 1], 2 * rounds) * RNG.exponential(0.4, 2 * rounds)
    return 0.01 * RNG.normal(size=2 * rounds) + stalls


def wandering(phi: float) -> Callable[[int], Array]:
    """An autoregression from round to round, in addition to the noise of the single ratio."""

    def draw(rounds: int) -> Array:
        series = lfilter([math.sqrt(1 - phi**2)], [1.0, -phi], RNG.normal(size=rounds + 100))[100:]
        return np.asarray(0.05 * np.repeat(series, 2) + quiet(rounds))

    return draw


def slowed(lasting: int) -> Callable[[int], Array]:
    """One server is 15 % slower for `lasting` rounds on average, two times in five."""

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


def alarms(draw: Callable[[int], Array], rounds: int, runs: int, ratio: float = 1.0, bound: float = 1.0) -> str:
    """Return the share of benches of so many loads, each with a disturbance of its own, in which any load is a regression."""

    def bench() -> list[tuple[list[float], list[float]]]:
        return [((draw(rounds) + math.log(ratio)).tolist(), quiet(rounds)[:rounds].tolist()) for _ in range(LOADS)]

    alarmed = [any(d.verdict == "regression" for d in decide_ratios(bench(), bound, ALPHA)) for _ in range(runs)]
    return f"{sum(alarmed) / runs:.3f}"


def summary(runs: list[tuple[list[float], list[float]]]) -> str:
    decisions = [decide_ratios([run], 1.0, ALPHA)[0] for run in runs]
    intervals = [decision.ratio.interval for decision in decisions]
    covered = sum(1.0 in interval for interval in intervals) / len(runs)
    width = np.median([math.log(interval.high / interval.low) / 2 for interval in intervals])
    alarms = sum(decision.verdict == "regression" for decision in decisions) / len(runs)
    return f"{covered:.2f}, ±{100 * width:.1f} %, {alarms:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400, help="simulated runs of each kind and length")
    args = parser.parse_args()
    columns = "covers, half width, false alarms"
    table = Table(
        "machine",
        "rounds",
        columns,
        f"alarms of {LOADS} loads",
        "1.3 x found at 1.1",
        f"as if independent: {columns}",
        title=f"level {1 - ALPHA:g}; loads: {args.runs // 4} benches",
    )
    for name, draw in MACHINES.items():
        for rounds in (6, 8, 12, 30, 65):
            # The reference over itself is never slow for a while: both of its blocks come from one server.
            runs = [(draw(rounds).tolist(), quiet(rounds)[:rounds].tolist()) for _ in range(args.runs)]
            with patch("assay.harness.stats.ratio.dependence", lambda *_: 1.0):
                plain = summary(runs)
            benches = alarms(draw, rounds, args.runs // 4), alarms(draw, rounds, args.runs // 4, 1.3, 1.1)
            table.add_row(name, str(rounds), summary(runs), *benches, plain)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
