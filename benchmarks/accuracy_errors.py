"""Error rates and power of the test of accuracy, and of that of lengths: simulated gates, as tables.

    python benchmarks/accuracy_errors.py

Each gate asks up to 4,096 questions and looks after each one, with the policy's defaults: margin 2 points, alpha 0.05, which the
five tests of a regression share. Beside it: McNemar's exact test and an unpaired z-test, with as many questions as the gate
typically needs. Both test "no loss", not the margin. Takes four minutes on one core; the seed is fixed. --lengths prints
the table of lengths alone.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from statistics import NormalDist
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import binom

from assay.harness.config import RunSpec
from assay.harness.judge.answer_lengths import LIMIT, AnswerEnd, check_lengths, compare_lengths
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


@dataclass(frozen=True)
class Lengths:
    """Answers of a candidate: the share whose lengths scatter, by a sigma; and answers that run to a limit, in means.

    Attributes:
        share: of prompts whose answers differ in length; the candidate's mean is the reference's.
        sigma: of the logarithm of the ratio of both lengths.
        limit: of tokens, in mean lengths.
        cut: share of the candidate's answers that run to it.
        both: share of either role's answers that do, independently.
    """

    share: float = 1.0
    sigma: float = 0.0
    limit: float = 36.0
    cut: float = 0.0
    both: float = 0.0


LENGTHS = {
    "equal, all differ by a sigma of .3": Lengths(sigma=0.3),
    "equal, all by .5": Lengths(sigma=0.5),
    "equal, half by .3": Lengths(share=0.5, sigma=0.3),
    "equal, half by .5": Lengths(share=0.5, sigma=0.5),
    "equal, 5 % of either run to a limit of 4 means": Lengths(limit=4, both=0.05),
    "1 % run to a limit of 36 means": Lengths(cut=0.01),
    "1 % run to a limit of 4 means": Lengths(limit=4, cut=0.01),
    "5 % run to a limit of 4 means": Lengths(limit=4, cut=0.05),
}


def answers(kind: Lengths, n: int, rng: np.random.Generator) -> list[tuple[AnswerEnd, AnswerEnd]]:
    """Draw both roles' answers to n prompts."""
    ours = rng.lognormal(4, 0.6, n)
    scattered = np.where(rng.random(n) < kind.share, rng.lognormal(-(kind.sigma**2) / 2, kind.sigma, n), 1.0)
    limit = round(kind.limit * math.exp(4 + 0.6**2 / 2))
    cuts = rng.random((2, n)) < np.array([[kind.both], [kind.both + kind.cut]])
    lengths = np.where(cuts, limit, np.minimum([ours, ours * scattered], limit - 1))
    ends = [
        [AnswerEnd(LIMIT if cut else "stop", round(tokens)) for tokens, cut in zip(row, cut_row, strict=True)]
        for row, cut_row in zip(lengths.tolist(), cuts.tolist(), strict=True)
    ]
    return [*zip(*ends, strict=True)]


def lengths_table(sets: int, rng: np.random.Generator) -> Table:
    """Share of sets of answers that may not pass, and of those in which an answer of the candidate alone ran to the limit."""
    columns = [f"{n:,} prompts: {of}" for n in (50, 200, 1000) for of in ("not met", "any cut")]
    table = Table(
        "candidate", *columns, title=f"{sets:,} sets of answers: not met, and with an answer that ran to the limit"
    )
    for name, kind in LENGTHS.items():
        row = []
        for n in (50, 200, 1000):
            drawn = [answers(kind, n, rng) for _ in range(sets)]
            # Whether a ratio was measured beyond the bound decides, and no draw of a bootstrap.
            with patch("assay.harness.stats.bootstrap.DRAWS", 99):
                unmet = [
                    check_lengths(compare_lengths(pairs, SPEC.policy.alpha)).status == "missing" for pairs in drawn
                ]
            cut = [any(ours.reason != LIMIT == theirs.reason for ours, theirs in pairs) for pairs in drawn]
            row += [f"{100 * np.mean(of):.1f} %" for of in (unmet, cut)]
        table.add_row(name, *row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gates", type=int, default=10_000, help="simulated gates for the error rates")
    parser.add_argument("--runs", type=int, default=2_000, help="simulated gates of each kind for the power")
    parser.add_argument("--lengths", action="store_true", help="the table of lengths alone")
    args = parser.parse_args()
    console, rng = Console(width=150), np.random.default_rng(0)
    console.print(lengths_table(args.runs // 2, rng))
    if args.lengths:
        return
    console.print(error_rates(args.gates, SPEC.workload.questions, rng))
    console.print(power(args.runs, SPEC.workload.questions, rng))


if __name__ == "__main__":
    main()
