"""How often the suites ``greedy`` and ``logits`` are right, and arms of ``assay invariance``, by simulation.

    python benchmarks/logit_verdicts.py

Four tables: the coverage of the bootstrap-t interval beside +-1.96 standard errors, for 8 to 128 prompts, normal and skewed data;
the verdicts of greedy for candidates of which 0 to 20 % of the texts are apart; and those of logits for honest candidates, as noisy
as the reference's own floor, and for worse ones; and those of logits with heavy tails, beside those of the mean alone. Takes ten
minutes; fewer with --runs. --tails prints the last table alone, and --invariance one of its own: arms in half precision.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import binom

from assay.harness.config import RunSpec
from assay.harness.evidence.logit_files import CACHE_STATES
from assay.harness.judge.greedy_suite import MIN_PROMPTS as GREEDY_PROMPTS
from assay.harness.judge.greedy_suite import decide_share
from assay.harness.judge.logits import LogitsComparison, LogitsRow, PromptMeans
from assay.harness.judge.logits_suite import FLOOR_FACTOR, MIN_PROMPTS, judge_logits
from assay.harness.judge.noise_limits import kl_limit
from assay.harness.judge.probe_scores import Distance, ProbePlace, bound_of
from assay.harness.stats.bootstrap import bootstrap_t

Array = NDArray[np.float64]
RNG = np.random.default_rng(0)
ALPHA, MARGIN = 0.05, 0.10
FLOOR_PROMPTS, POSITIONS = 32, 25
SPEC = RunSpec.of(reference="torch_native", candidate="triton")
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
    return decide_share(apart, GREEDY_PROMPTS, MARGIN, ALPHA)


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
    return verdict_on(
        [(floor + excess) * lognormal(sigma)(MIN_PROMPTS) for _ in CACHE_STATES],
        floor * lognormal(sigma)(FLOOR_PROMPTS),
    )


def verdict_on(kls: Sequence[Array], floor: Array) -> str:
    """The verdict on the mean KLs of prompts, cold and cached."""
    prompts, rows = [], []
    for condition, kl in zip(CACHE_STATES, kls, strict=True):
        change = np.sqrt(2 * kl / POSITIONS) * RNG.normal(size=len(kl))
        prompts.append(PromptMeans(condition, kl, change, floor))
        unknown = dict.fromkeys(("mean_kl", "median", "p99", "p999", "max", "same_top"))
        rows.append(
            LogitsRow(
                condition=condition,
                positions=len(kl) * POSITIONS,
                sequences=len(kl),
                max_at="",
                top_k=20,
                **unknown,
            )
        )
    return judge_logits(LogitsComparison(tuple(rows), tuple(prompts), ()), SPEC.policy, (), synthetic=True).verdict


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


def mixed(share: float) -> Callable[[int], Array]:
    """A fifth of the limit, but for a share of prompts that has 1 nat."""
    usual, limit = lognormal(0.8), kl_limit(())
    return lambda n: np.where(RNG.random(n) < share, 1.0 / limit, 0.2 * usual(n))


def scaled(mean: float, sigma: float) -> Callable[[int], Array]:
    return lambda n: mean * lognormal(sigma)(n)


TAILS: dict[str, Callable[[int], Array]] = {
    "honest: a fifth of the limit, sigma 0.8": scaled(0.2, 0.8),
    "honest: half the limit, sigma 1.2": scaled(0.5, 1.2),
    "at the limit, sigma 1": scaled(1.0, 1.0),
    "at the limit, sigma 2": scaled(1.0, 2.0),
    "at the limit, sigma 3": scaled(1.0, 3.0),
    "1 nat in 0.5 % of prompts": mixed(0.005),
    "1 nat in 1 % of prompts": mixed(0.01),
    "1 nat in 3 % of prompts": mixed(0.03),
}
"""Mean KLs of prompts over the limit, under one condition; the other one has the same prompts."""


def tails(runs: int) -> Table:
    """Shares of passes of the mean alone, as before there were other rules, and of the suite; and of its regressions."""
    table = Table("mean KL of a prompt", "prompts", "pass, by the mean alone", "pass", "regression")
    limit = kl_limit(())
    for name, draw in TAILS.items():
        for n in (64, 256):
            alone, seen = 0, []
            for _ in range(runs):
                kl = draw(n)
                alone += bootstrap_t(kl, ALPHA / 2).high <= 1
                seen.append(verdict_on([limit * kl] * 2, np.zeros(FLOOR_PROMPTS)))
            shares = (alone / runs, seen.count("pass") / runs, seen.count("regression") / runs)
            table.add_row(name, str(n), *(f"{share:.3f}" for share in shares))
    return table


PREFILLED = (2, 14, 15, 16, 8, 8, 8, 13, 126, 127, 128, 256, 15, 11, 12, 10, 9, 130, 11, 19, 136)
"""Scored positions of each probe of the CPU's load."""
DECODED = tuple(64 if number % 10 == 0 else 48 if number % 5 == 0 else 8 for number in range(len(PREFILLED)))
LOADS = {"prefill": PREFILLED, "decode": DECODED}
FLIPS = {
    "dense": (0.0, 0.0, 0.0),
    "2 % of positions flip, .01 nats": (0.02, 0.01, 0.0),
    "2 %, .03 nats, later positions move": (0.02, 0.03, 0.1),
    "0.5 %, .1 nats": (0.005, 0.1, 0.0),
    "2 %, .1 nats, later positions move": (0.02, 0.1, 0.1),
    "1 %, .3 nats": (0.01, 0.3, 0.0),
    "1 %, .3 nats, later positions move": (0.01, 0.3, 0.1),
}
"""Share of positions at which an expert flips, what it costs, and how much of that later positions keep."""


def asking(flips: tuple[float, float, float], prone: Array) -> dict[str, list[Array]]:
    """Return the divergences from the base of each probe; `prone` probes flip more often."""
    share, cost, kept = flips
    asked: dict[str, list[Array]] = {}
    for measure, lengths in LOADS.items():
        asked[measure] = []
        for own, n in zip(prone, lengths, strict=True):
            flipped = cost * (RNG.random(n) < share * own) * RNG.lognormal(0, 1.2, n)
            before = np.concatenate([[0.0], np.cumsum(flipped)[:-1] / np.arange(1, n)])
            asked[measure].append(2e-5 * RNG.lognormal(0, 1, n) + flipped + kept * before)
    return asked


def distances(asked: dict[str, list[Array]]) -> list[Distance]:
    return [
        Distance.of(
            [ProbePlace(str(probe), at, kl) for probe, kls in enumerate(each) for at, kl in enumerate(kls.tolist())]
        )
        for each in asked.values()
    ]


def invariance(runs: int) -> Table:
    """Shares of honest arms that differ and that are the same, and of those of which one probe is wrong at each position."""
    wrongs = (160, 40)
    table = Table(
        "noise", "honest: differs", "same", *(f"{by} x the mean: {o}" for by in wrongs for o in ("differs", "same"))
    )
    for name, flips in FLIPS.items():
        seen: list[list[bool]] = []
        for _ in range(runs):
            prone = RNG.gamma(0.5, 2, len(PREFILLED))
            again = [each for _ in range(3) for each in distances(asking(flips, prone))]
            bound = bound_of(again, 3, "bfloat16")
            assert bound.floor is not None
            arm, row = asking(flips, prone), []
            for by in (0, *wrongs):
                probe = RNG.integers(len(DECODED))
                added = by * max(each.mean for each in again) * RNG.lognormal(0, 0.3, DECODED[probe])
                decode = [kls + added if number == probe else kls for number, kls in enumerate(arm["decode"])]
                found = distances(arm | {"decode": decode})
                row += [not all(map(bound.floor.holds, found)), all(map(bound.holds, found))]
            seen.append(row)
        table.add_row(name, *(f"{share:.3f}" for share in np.mean(seen, axis=0)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400, help="simulated runs for each row")
    parser.add_argument("--tails", action="store_true", help="the table of heavy tails alone")
    parser.add_argument("--invariance", action="store_true", help="the table of arms in half precision alone")
    given = parser.parse_args()
    runs, console = given.runs, Console()
    if given.invariance:
        console.print(f"Arms of 21 probes, three askings of the base ({runs} runs)", invariance(runs))
        return
    console.print(f"Heavy tails, the limit that of rounding ({runs} runs)", tails(runs))
    if given.tails:
        return
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
