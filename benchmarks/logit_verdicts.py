"""How often the suites ``greedy`` and ``logits`` are right, by simulation.

    python benchmarks/logit_verdicts.py

Three tables: the coverage of the bootstrap-t interval beside +-1.96 standard errors, for 8 to 128 prompts, normal and skewed data;
the verdicts of greedy for candidates of which 0 to 20 % of the texts are apart; and those of logits for honest candidates, as noisy
as the reference's own floor, and for worse ones. Takes ten minutes; fewer with --runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import binom

from assay.harness.compare.logits import LogitsComparison, LogitsRow, PromptMeans
from assay.harness.compare.noise_limits import kl_limit
from assay.harness.config import RunSpec
from assay.harness.evidence.logit_files import CACHE_STATES
from assay.harness.judge.greedy_suite import MIN_PROMPTS as GREEDY_PROMPTS
from assay.harness.judge.logits_suite import FLOOR_FACTOR, MIN_PROMPTS, judge_logits
from assay.harness.judge.suite_decisions import decide_share
from assay.harness.stats.bootstrap import bootstrap_t

Array = NDArray[np.float64]
RNG = np.random.default_rng(0)
ALPHA, MARGIN = 0.05, 0.10
FLOOR_PROMPTS, POSITIONS = 32, 25
SPEC = RunSpec(reference="torch_native", candidate="triton")
VERDICTS = ("pass", "inconclusive", "regression")


def lognormal(sigma: float) -> Callable[[int], Array]:
    """Log-normal values with a mean of 1. Mean KLs of prompts, measured with the tiny model, have a sigma of 0.8."""
    return lambda n: RNG.lognormal(-sigma * sigma / 2, sigma, n)


DATA: dict[str, Callable[[int], Array]] = {
    "normal": lambda n: RNG.normal(1, 1, n),
    "chi squared, 1 degree": lambda n: RNG.chisquare(1, n),
    "log-normal, 1": lognormal(1.0),
    "log-normal, 1.5": lognormal(1.5),
    "Pareto, 3": lambda n: 2 * RNG.pareto(3, n),
}
"""Distributions with a mean of 1."""


def coverage(runs: int) -> Table:
    """How often two intervals of level 0.95 contain the mean, and on which side they miss it."""
    table = Table("data", "prompts", "bootstrap-t", "above the mean", "below the mean", "±1.96 SE")
    for name, draw in DATA.items():
        for n in (8, 16, 32, 64, 128):
            above = below = near = 0
            for _ in range(runs):
                values = draw(n)
                mean = bootstrap_t(values, ALPHA / 2)
                above, below = above + (mean.low > 1), below + (mean.high < 1)
                near += abs(mean.value - 1) <= 1.96 * mean.error
            shares = (1 - (above + below) / runs, above / runs, below / runs, near / runs)
            table.add_row(name, str(n), *(f"{share:.3f}" for share in shares))
    return table


@cache
def greedy_verdict(apart: int) -> str:
    """The verdict on so many texts apart."""
    return decide_share(apart, GREEDY_PROMPTS, MARGIN, ALPHA).verdict


def greedy() -> Table:
    """Probability of each verdict, computed exactly."""
    table = Table("share apart", *VERDICTS)
    for share in (0.0, 0.01, 0.02, 0.03, 0.05, 0.10, 0.15, 0.20, 0.25):
        by_verdict = dict.fromkeys(VERDICTS, 0.0)
        for apart in range(GREEDY_PROMPTS + 1):
            by_verdict[greedy_verdict(apart)] += float(binom.pmf(apart, GREEDY_PROMPTS, share))
        table.add_row(f"{100 * share:.0f} %", *(f"{by_verdict[verdict]:.4f}" for verdict in VERDICTS))
    return table


def logits_verdict(floor: float, excess: float, sigma: float) -> str:
    """The verdict on a candidate whose mean KL is the floor's plus an excess, in nats."""
    prompts, rows = [], []
    for condition in CACHE_STATES:
        kl = (floor + excess) * lognormal(sigma)(MIN_PROMPTS)
        change = np.sqrt(2 * kl / POSITIONS) * RNG.normal(size=MIN_PROMPTS)
        prompts.append(PromptMeans(condition, kl, change, floor * lognormal(sigma)(FLOOR_PROMPTS)))
        unknown = dict.fromkeys(("mean_kl", "stderr", "median", "p99", "p999", "max", "same_top"))
        rows.append(
            LogitsRow(
                condition=condition,
                positions=MIN_PROMPTS * POSITIONS,
                sequences=MIN_PROMPTS,
                max_at="",
                top_k=20,
                **unknown,
            )
        )
    return judge_logits(LogitsComparison(tuple(rows), tuple(prompts), ()), SPEC, ()).verdict


def logits(runs: int) -> Table:
    """Share of each verdict: honest candidates have no excess over the floor; the others' is a multiple of the limit."""
    table = Table("sigma", "floor, nats", "candidate", *VERDICTS)
    limit = kl_limit(())
    candidates = [
        ("as noisy as the floor", 0.0),
        ("half the limit more", 0.5),
        ("the limit more", 1.0),
        ("4 limits more", 4.0),
    ]
    for sigma in (0.8, 1.2):
        for floor in (0.0, 1e-4, 1e-2):
            for name, multiple in candidates:
                excess = multiple * max(limit, FLOOR_FACTOR * floor)
                seen = [logits_verdict(floor, excess, sigma) for _ in range(runs)]
                shares = (f"{seen.count(verdict) / runs:.3f}" for verdict in VERDICTS)
                table.add_row(f"{sigma:g}", f"{floor:g}", name, *shares)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400, help="simulated runs for each row")
    runs = parser.parse_args().runs
    console = Console()
    console.print(
        f"Intervals of level 0.95 ({runs} runs; standard error of a share of 0.95: {math.sqrt(0.0475 / runs):.3f})",
        coverage(runs),
    )
    console.print(f"Greedy: {GREEDY_PROMPTS} prompts, margin {MARGIN:g}, alpha {ALPHA:g}", greedy())
    console.print(
        f"Logits: {MIN_PROMPTS} prompts, floor over {FLOOR_PROMPTS}, alpha {ALPHA:g} ({runs} runs)", logits(runs)
    )


if __name__ == "__main__":
    main()
