"""Decisions that were wrong before, and what they are now, as one table: erratic references, heavy tails, questions answered alike.

    python benchmarks/decisions.py

Each row is simulated twice: by the rule as it was before (an erratic answer of the reference sets the limit; the mean alone decides
on logits; each question is a unit) and by the present one. Under a minute on one core; the seed is fixed.
"""

from __future__ import annotations

import argparse
from collections import Counter

import numpy as np
from logit_verdicts import TAILS, verdict_on
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from assay.evals.alike import alike
from assay.harness.compare.noise_limits import kl_limit
from assay.harness.config import RunSpec
from assay.harness.judge.logits_suite import FLOOR_FACTOR
from assay.harness.stats.betting import log_wealth_below
from assay.harness.stats.bootstrap import bootstrap_t

SPEC = RunSpec.of(reference="torch_native", candidate="triton")
PROMPTS, FLOOR_PROMPTS = 256, 32
ERRATIC = 8.0
"""Mean KL, in nats, of one prompt that an erratic reference was asked twice."""
QUESTIONS = 4096
SETS = 2
"""Sets of templates that are looked for; the units that are found do not depend on the answers."""
RNG = np.random.default_rng(25)


def erratic(runs: int) -> tuple[float, float]:
    """Passes of a candidate with 1 nat under every prompt, where one answer of the reference was erratic."""
    floor = np.zeros(FLOOR_PROMPTS)
    floor[0] = ERRATIC
    before = after = 0
    for _ in range(runs):
        kl = RNG.lognormal(-0.32, 0.8, PROMPTS)
        before += bootstrap_t(kl, SPEC.policy.alpha / 2).high <= FLOOR_FACTOR * float(floor.mean())
        after += verdict_on([kl, kl], floor) == "pass"
    return before / runs, after / runs


def tails(name: str, runs: int) -> tuple[float, float]:
    """Passes by the mean alone, and of the suite."""
    before = after = 0
    for _ in range(runs):
        kl = TAILS[name](PROMPTS)
        before += bootstrap_t(kl, SPEC.policy.alpha / 2).high <= 1
        after += verdict_on([kl_limit(()) * kl] * 2, np.zeros(FLOOR_PROMPTS)) == "pass"
    return before / runs, after / runs


def templates(size: int) -> list[str]:
    """Questions in templates of one size: 24 drawn words with two names and a number."""
    words = np.array([f"w{n}" for n in range(3000)])
    asked = []
    for _ in range(QUESTIONS // size):
        fixed = list(RNG.choice(words, 24))
        for _ in range(size):
            first, second = RNG.choice(words, 2)
            asked.append(" ".join([*fixed[:8], first, *fixed[8:16], str(RNG.integers(900)), *fixed[16:], second]))
    return asked


def passes(losses: NDArray[np.float64]) -> bool:
    """Whether the wager on "the loss is below the margin" is won at any look."""
    return bool(log_wealth_below(losses, SPEC.policy.margin, -1, 1).max() >= np.log(1 / SPEC.policy.alpha))


def clusters(size: int, runs: int) -> tuple[float, float]:
    """Passes of a candidate that loses as much as the margin, all questions of a template alike: one by one, and by unit."""
    found = [alike(templates(size)) for _ in range(min(SETS, runs))]
    before = after = 0
    for run in range(runs):
        lost = np.repeat(RNG.random(QUESTIONS // size) < SPEC.policy.margin, size).astype(float)
        before += passes(RNG.permutation(lost))  # not known to belong together, so not drawn together
        units = found[run % len(found)]
        counts = Counter(units)
        sums = np.bincount(units, lost, QUESTIONS)
        after += passes(np.array([sums[unit] / count for unit, count in counts.items()]))
    return before / runs, after / runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", type=int, default=200, help="simulated runs for each row of questions; a quarter for logits"
    )
    runs = parser.parse_args().runs
    table = Table(
        "case",
        "passes before",
        "passes now",
        title=f"Share of runs that pass ({PROMPTS} prompts, {QUESTIONS} questions)",
    )
    rows = [("wrong: 1 nat under every prompt, one erratic answer of the reference", erratic(runs // 16))]
    rows += [(name, tails(name, runs // 4)) for name in TAILS]
    rows += [
        (f"a loss of the margin, questions answered alike in templates of {size}", clusters(size, runs))
        for size in (1, 4, 8, 32)
    ]  # fmt: skip
    for name, (before, after) in rows:
        table.add_row(name, f"{before:.3f}", f"{after:.3f}")
    again = 1 - (1 - SPEC.policy.alpha) ** 5
    table.add_row(
        "a loss of the margin, five runs with other seeds, the best of them",
        f"{again:.3f}",
        f"{again:.3f}, and counted",
    )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
