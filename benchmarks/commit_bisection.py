"""Probes and correctness of `assay bisect commits` on synthetic kernel repositories, as tables.

    python benchmarks/commit_bisection.py

- real: 1,000 commits, one in ten unbuildable, a regression planted at random (three seeds), one history full of merges, one
  bisection killed and resumed, and two regressions with a fix between them: real git, real kernel processes;
- simulated: the search alone, with outcomes that are wrong at several rates;
- parallel: the same with several workers: rounds of probes at once;
- flaky: an outcome is wrong one time in ten; the search with simulated outcomes, and `git bisect run` with the same ones (its
  own algorithm, on a real repository), and one real kernel that misaligns its mask nine times in ten.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import kernel_histories
from rich.console import Console
from rich.table import Table

from assay.harness.bisect.commits.search import End, History, OutcomeCounts, SearchAnswer, next_round
from assay.harness.bisect.commits.state import BisectFolder, BisectSpec, BisectState

console = Console(width=150)
CONFIDENCE = BisectSpec.model_fields["confidence"].default
PARTS = ("simulated", "parallel", "real", "two", "flaky", "dice")
STUB = """
import random, sys
from pathlib import Path
source = Path("attn.py").read_text()
number = int(source.split("commit ")[1].split(".")[0])
bad = number >= {culprit}
rolls = Path({rolls!r})
seed = len(rolls.read_text())
rolls.write_text("x" * (seed + 1))
sys.exit(bad ^ (random.Random({seed} * 100003 + seed).random() < {noise}))
"""


def bisect(made: kernel_histories.Made, out: Path, *flags: str, kill_after: int = 0) -> tuple[BisectState, int, float]:
    """Run the command, optionally killed once after `kill_after` probes; return its state, exit code and duration."""
    command = [sys.executable, "-m", "assay", "bisect", "commits", "--repo", str(made.path), "--good", made.commits[0]]
    command += ["--bad", "main", "--kernel", "attn:forward", "--out", str(out), *flags]
    begun = time.monotonic()
    if kill_after:
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as first:
            while not (out / "probes" / f"{kill_after:04d}.json").exists() and first.poll() is None:
                time.sleep(0.02)
            first.send_signal(signal.SIGKILL)
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    return BisectFolder(out).read(), code, time.monotonic() - begun


def searched(state: BisectState) -> int:
    """Number of probes of the search itself, including skipped commits."""
    return sum(p.purpose in ("search", "verify") for p in state.probes)


def real(folder: Path, count: int, seeds: Sequence[int]) -> None:
    """Real bisections of histories with one regression."""
    table = Table(
        "history", "seed", "culprit", "named", "confidence", "range", "search probes (skips)", "log2(n) + skips", "ends + confirm",
        "s per probe (median)", "total s", "exit", title="One regression, one commit in ten unbuildable",
    )  # fmt: skip
    for seed in seeds:
        for kind in ("straight", "merges") if seed == seeds[0] else ("straight",):
            rng = random.Random(seed)
            parents = kernel_histories.straight(count) if kind == "straight" else kernel_histories.merging(count, rng)
            culprit = rng.randrange(1, len(parents) - 1)
            near = {culprit, *parents[culprit], len(parents) - 1, 0}
            broken = {i for i in range(len(parents)) if rng.random() < 0.1} - near
            made = kernel_histories.planted(folder / f"{kind}-{seed}", parents, culprit, broken)
            killed = 9 if seed == seeds[-1] else 0
            state, code, seconds = bisect(made, folder / f"out-{kind}-{seed}", kill_after=killed)
            assert state.result is not None
            skips = sum(p.outcome == "skip" and p.purpose == "search" for p in state.probes)
            others = sum(p.purpose in ("good-end", "bad-end", "confirm") for p in state.probes)
            goal = math.log2(len(state.history)) + skips
            right = "right" if state.result.suspects == (made.commits[culprit],) else "WRONG"
            table.add_row(
                kind + (", killed once" if killed else ""), str(seed), str(culprit), right, f"{state.result.confidence:.4f}",
                str(len(state.history)), f"{searched(state)} ({skips})", f"{goal:.2f}", str(others),
                f"{statistics.median(p.seconds for p in state.probes):.2f}", f"{seconds:.0f}", str(code),
            )  # fmt: skip
    console.print(table)


def two_regressions(folder: Path) -> None:
    """Of 100 commits, 20 misaligns the mask, 45 fixes it, and 75 drops the scale."""
    made = kernel_histories.make(
        folder / "two", kernel_histories.straight(100), lambda i: kernel_histories.source(i, 20 <= i < 45, i >= 75)
    )
    state, code, _ = bisect(made, folder / "out-two")
    assert state.result is not None
    numbers = [made.commits.index(commit) for commit in state.result.suspects]
    console.print(f"Two regressions (20, 75) and a fix (45), of 100 commits: named {numbers}, exit {code}:")
    for line in (*(f.diagnosis for f in state.result.findings), *state.result.notes):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


@functools.cache
def straight_history(count: int) -> History:
    return History([str(i) for i in range(count)], [[i - 1] if i else [] for i in range(count)])


def simulate(
    count: int,
    culprit: int,
    good_as_bad: float,
    bad_as_good: float,
    confidence: float,
    rng: random.Random,
    workers: int = 1,
) -> tuple[str, int, int]:
    """The command's search on a straight history with simulated outcomes.

    Returns:
        "right", "wrong" or "none"; its probes, and its rounds of probes at once; those of the ends included.
    """
    history = straight_history(count)
    probes = rounds = 0

    def probed(count: OutcomeCounts, bad: bool) -> OutcomeCounts:
        seen_bad = rng.random() >= bad_as_good if bad else rng.random() < good_as_bad
        return count + OutcomeCounts(int(not seen_bad), int(seen_bad))

    last = str(count - 1)
    seen: dict[str, OutcomeCounts] = {}  # outcomes of the ends, and by commit
    while True:
        good, bad = (
            End(commit, seen.get(end, OutcomeCounts())) for end, commit in (("good-end", "good"), ("bad-end", last))
        )
        counts = {commit: count for commit, count in seen.items() if commit.isdecimal()}
        counts[last] = counts.get(last, OutcomeCounts()) + bad.seen
        step = next_round(history, counts, set(), good.seen, (good, bad), 1, confidence, workers)
        if isinstance(step, str):
            return "none", probes, rounds
        if isinstance(step, SearchAnswer):
            found = step.outcome == "found"
            return ("none" if not found else "right" if step.commits == (str(culprit),) else "wrong"), probes, rounds
        rounds += 1
        probes += len(step)
        for probe in step:
            key = probe.purpose if probe.purpose in ("good-end", "bad-end") else probe.commit
            seen[key] = probed(seen.get(key, OutcomeCounts()), probe.commit != "good" and int(probe.commit) >= culprit)


RATES = ((0.0, 0.0), (0.05, 0.05), (0.1, 0.1), (0.3, 0.3), (0.5, 0.5), (0.0, 0.1), (0.0, 0.3), (0.0, 0.5), (0.1, 0.0))
"""Rates of good commits that come out bad, and of bad commits that come out good."""


def simulated(count: int, runs: int, confidences: Sequence[float]) -> None:
    """Right answers and probes, ends included, by how often outcomes are wrong."""
    table = Table(
        "good as bad", "bad as good", "confidence", "right", "wrong", "no answer", "probes: median", "mean", "95 %",
        title=f"{runs} simulated bisections of {count} commits; log2(n) + 4 = {math.log2(count) + 4:.1f}",
    )  # fmt: skip
    for rates in RATES:
        for confidence in confidences:
            outcomes, probes = [], []
            for seed in range(runs):
                rng = random.Random(seed)
                # The first commit is the good revision.
                outcome, cost, _ = simulate(count - 1, rng.randrange(count - 1), *rates, confidence, rng)
                outcomes.append(outcome)
                probes.append(cost)
            shares = [str(outcomes.count(name)) for name in ("right", "wrong", "none")]
            costs = (statistics.median(probes), statistics.mean(probes), sorted(probes)[int(0.95 * runs)])
            table.add_row(*(f"{rate:.0%}" for rate in rates), str(confidence), *shares, *(f"{c:.1f}" for c in costs))
    console.print(table)


def in_parallel(count: int, runs: int, several: Sequence[int]) -> None:
    """Rounds of probes at once, ends included, by workers."""
    table = Table(
        "good as bad", "bad as good", "workers", "right", "wrong", "no answer", "rounds: mean", "95 %", "most", "probes: mean",
        title=f"{runs} simulated bisections of {count} commits, several probes at once",
    )  # fmt: skip
    for rates in ((0.0, 0.0), (0.05, 0.05), (0.1, 0.1), (0.0, 0.3)):
        for workers in several:
            ended = []
            for seed in range(runs):
                rng = random.Random(seed)
                ended.append(simulate(count - 1, rng.randrange(count - 1), *rates, CONFIDENCE, rng, workers))
            outcomes, probes, rounds = zip(*ended, strict=True)
            shares = [str(outcomes.count(name)) for name in ("right", "wrong", "none")]
            ordered = sorted(rounds)
            costs = (f"{statistics.mean(rounds):.2f}", str(ordered[int(0.95 * runs)]), str(ordered[-1]))
            table.add_row(
                *(f"{rate:.0%}" for rate in rates), str(workers), *shares, *costs, f"{statistics.mean(probes):.1f}"
            )
    console.print(table)


def flaky(folder: Path, count: int, runs: int, noise: float) -> None:
    """Share of right answers with flaky outcomes, compared with plain ``git bisect run``."""
    ours, theirs, probes, steps = 0, 0, [], []
    made = kernel_histories.planted(folder / "flaky", kernel_histories.straight(count), count // 2)
    git = kernel_histories.git
    for seed in range(runs):
        rng = random.Random(seed)
        culprit = rng.randrange(1, count)
        # The first commit is the good revision.
        outcome, cost, _ = simulate(count - 1, culprit - 1, noise, noise, CONFIDENCE, rng)
        ours, probes = ours + (outcome == "right"), [*probes, cost]
        rolls, script = folder / "rolls", folder / "stub.py"
        rolls.write_text("")
        script.write_text(STUB.format(culprit=culprit, rolls=str(rolls), seed=seed, noise=noise))
        git(made.path, "bisect", "start", "main", made.commits[0])
        said = git(made.path, "bisect", "run", sys.executable, str(script))
        git(made.path, "bisect", "reset", "main")
        theirs += f"{made.commits[culprit]} is the first bad commit" in said
        steps.append(len(rolls.read_text()))
    table = Table(
        "search", "right", "outcomes (median)", title=f"Outcomes wrong {noise:.0%} of the time, {count} commits"
    )
    table.add_row("assay bisect commits", f"{ours} of {runs}", f"{statistics.median(probes):.0f} (ends included)")
    table.add_row("git bisect run", f"{theirs} of {runs}", f"{statistics.median(steps):.0f}")
    console.print(table)


def flaky_kernel(folder: Path, count: int, chance: float) -> None:
    """One real kernel whose mask is misaligned in nine of ten processes, from one commit on."""
    rng = random.Random(11)
    culprit = rng.randrange(1, count)

    def text(i: int) -> str:
        source = kernel_histories.source(i, mask_wrong=False)
        if i < culprit:
            return source
        dice = f"import random\n\nWRONG = random.random() < {chance}\n"
        return source.replace("import torch\n", "import torch\n" + dice).replace(
            "offset = length - new", "offset = 0 if WRONG else length - new"
        )

    made = kernel_histories.make(folder / "dice", kernel_histories.straight(count), text)
    state, code, seconds = bisect(made, folder / "out-dice", "--calls", "12", "--scan", "0")
    assert state.result is not None
    named = [made.commits.index(commit) for commit in state.result.suspects]
    console.print(
        f"A real kernel that is wrong in {chance:.0%} of its processes from commit {culprit} of {count} on: named {named[:3]}, "
        f"confidence {state.result.confidence:.4f}, {len(state.probes)} probes, {seconds:.0f} s, exit {code}; estimated "
        f"misclassification of bad commits {state.result.misclassification[1]:.0%}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=int, default=100, help="number of simulated flaky bisections")
    parser.add_argument("--confidence", type=float, nargs="+", default=[CONFIDENCE], help="for --only simulated")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 7, 14, 28], help="for --only parallel")
    parser.add_argument("--only", choices=PARTS, nargs="+")
    args = parser.parse_args()
    parts = args.only or PARTS
    with tempfile.TemporaryDirectory(prefix="assay-bisect-bench-") as made:
        folder = Path(made)
        if "simulated" in parts:
            simulated(args.commits, args.runs, args.confidence)
        if "parallel" in parts:
            in_parallel(args.commits, args.runs, args.workers)
        if "real" in parts:
            real(folder, args.commits, args.seeds)
        if "two" in parts:
            two_regressions(folder)
        if "flaky" in parts:
            flaky(folder, args.commits, args.runs, 0.1)
        if "dice" in parts:
            flaky_kernel(folder, args.commits, 0.9)


if __name__ == "__main__":
    main()
