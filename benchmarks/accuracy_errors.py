"""Error rates and power of the test of accuracy: simulated gates, as tables.

    python benchmarks/accuracy_errors.py

Each gate asks up to 4,096 questions and looks after each one, with the policy's defaults: margin 2 points, alpha 0.05, which the
five tests of a regression share. Beside it: McNemar's exact test and an unpaired z-test, with as many questions as the gate
typically needs. Both test "no loss", not the margin. Takes three minutes on one core; the seed is fixed.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import binom

from assay.harness.config import RunSpec
from assay.harness.stats.betting import STAKES, WEIGHTS

SPEC = RunSpec.of(reference="torch_native", candidate="sage_attn")
CHUNK = 250
REFERENCE_ACCURACY = 0.9
"""For the unpaired test, which depends on it."""
Array = NDArray[np.float32]
Counts = NDArray[np.int32]


@dataclass(frozen=True)
class Gates:
    """Simulated gates: the first question at which each wager had won, or one more than the cap; and all answers."""

    regression: NDArray[np.int64]
    passed: NDArray[np.int64]
    lost: Counts
    gained: Counts

    @property
    def verdict_at(self) -> NDArray[np.int64]:
        return np.minimum(self.regression, self.passed)

    def share(self, what: NDArray[np.bool_]) -> str:
        return f"{100 * what.mean():.2f} %"


def first_win(won: Counts, same: Counts, lost: Counts, price: float, alpha: float) -> NDArray[np.int64]:
    """The first question at which the wealth of bets against `price` reaches 1 / alpha."""
    wealth = np.zeros(won.shape, dtype=np.float32)
    for stake, weight in zip(STAKES, WEIGHTS, strict=True):
        up, flat, down = np.log1p(stake * (np.array([1.0, 0.0, -1.0]) - price) / (price + 1))
        # Capped far above 1 / alpha, below the largest float.
        wealth += weight * np.exp(
            np.minimum(won * np.float32(up) + same * np.float32(flat) + lost * np.float32(down), 60)
        )
    reached = wealth >= 1 / alpha
    return np.where(reached.any(axis=1), reached.argmax(axis=1) + 1, won.shape[1] + 1)


def simulate(loss: float, flips: float, gates: int, cap: int, rng: np.random.Generator) -> Gates:
    """Gates of a candidate with this loss, whose answers flip at this rate, which is at least the loss."""
    flips, parts = max(flips, abs(loss)), []
    count = np.arange(1, cap + 1, dtype=np.int32)
    for _ in range(math.ceil(gates / CHUNK)):
        u = rng.random((CHUNK, cap), dtype=np.float32)
        lost = np.cumsum(u < (flips + loss) / 2, axis=1, dtype=np.int32)
        gained = np.cumsum(u > 1 - (flips - loss) / 2, axis=1, dtype=np.int32)
        same = count - lost - gained
        above = first_win(lost, same, gained, SPEC.policy.margin, SPEC.regression_alpha)
        below = first_win(gained, same, lost, -SPEC.policy.margin, SPEC.policy.alpha)
        parts.append((above, below, lost, gained))
    return Gates(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def error_rates(gates: int, cap: int, rng: np.random.Generator) -> Table:
    """How often each error is made at any look; the levels are the most that is allowed."""
    table = Table(
        "true loss", "flips", f"called a regression (at most {100 * SPEC.regression_alpha:g} % by margin)",
        f"passes (at most {100 * SPEC.policy.alpha:g} % from the margin on)", "a verdict",
        title=f"{gates:,} gates, up to {cap:,} questions, a look after each: share with a wager that has won at any look",
    )  # fmt: skip
    for loss, flips in ((0.0, 0.0), (0.0, 0.02), (0.0, 0.05), (SPEC.policy.margin, 0.02), (SPEC.policy.margin, 0.05)):
        parts = [simulate(loss, flips, CHUNK * 4, cap, rng) for _ in range(math.ceil(gates / CHUNK / 4))]
        above, below = (np.concatenate([getattr(part, name) for part in parts]) for name in ("regression", "passed"))
        shares = [(above <= cap).mean(), (below <= cap).mean(), (np.minimum(above, below) <= cap).mean()]
        table.add_row(f"{100 * loss:g} points", f"{100 * flips:g} %", *(f"{100 * share:.2f} %" for share in shares))
    return table


def mcnemar_power(lost: Counts, gained: Counts) -> float:
    """Share of gates in which McNemar's exact two-sided test shows a loss."""
    p = 2 * binom.cdf(np.minimum(lost, gained), lost + gained, 0.5)
    return float(((p < SPEC.policy.alpha) & (lost > gained)).mean())


def unpaired_power(lost: Counts, gained: Counts, n: int, accuracy: float) -> float:
    """Share of gates in which a two-sided z-test of two independent accuracies shows a loss."""
    right = np.full(lost.shape, accuracy * n)
    p, q = right / n, np.clip((right - lost + gained) / n, 0, 1)
    error = np.sqrt(np.maximum((p * (1 - p) + q * (1 - q)) / n, 1e-12))
    return float(((p - q) / error > -NormalDist().inv_cdf(SPEC.policy.alpha / 2)).mean())


def power(gates: int, cap: int, rng: np.random.Generator) -> Table:
    """Questions to a verdict, and the two classical tests with the median number of them."""
    table = Table(
        "true loss", "flips", "regression", "pass", "none", "median", "p95", "McNemar", "unpaired z",
        title=f"{gates:,} gates: verdicts, questions to a verdict, and the power of other tests at the median",
    )  # fmt: skip
    seed = [(0.68 - 0.125, 0.555, 0.68), (1.0 - 0.125, 0.875, 1.0)]
    usual = [
        (loss, flips, REFERENCE_ACCURACY) for loss in (0.0, 0.02, 0.03, 0.05, 0.1) for flips in (0.0, 0.02, 0.05, 0.1)
    ]
    seen = set()
    for loss, flips, accuracy in (*seed, *usual):
        flips = max(flips, loss)
        if (loss, flips) in seen:
            continue
        seen.add((loss, flips))
        made = simulate(loss, flips, gates, cap, rng)
        over = made.verdict_at
        red = (made.regression <= cap) & (made.regression <= made.passed)
        green = (made.passed <= cap) & ~red
        n = int(min(np.median(over), cap))
        at = (made.lost[:, n - 1], made.gained[:, n - 1])
        table.add_row(
            f"{100 * loss:g} points", f"{100 * flips:g} %", made.share(red), made.share(green), made.share(~red & ~green),
            *(f"{q:,.0f}" if (q := float(np.quantile(over, share))) <= cap else f"> {cap:,}" for share in (0.5, 0.95)),
            f"{100 * mcnemar_power(*at):.0f} %", f"{100 * unpaired_power(*at, n, accuracy):.0f} %",
        )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gates", type=int, default=10_000, help="simulated gates for the error rates")
    parser.add_argument("--runs", type=int, default=2_000, help="simulated gates of each kind for the power")
    args = parser.parse_args()
    console, rng = Console(width=150), np.random.default_rng(0)
    console.print(error_rates(args.gates, SPEC.workload.questions, rng))
    console.print(power(args.runs, SPEC.workload.questions, rng))


if __name__ == "__main__":
    main()
