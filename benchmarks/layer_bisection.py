"""Number of probes of a layer bisection, with simulated answers and no server.

    python benchmarks/layer_bisection.py

Guilty layers are drawn at random. A noisy probe is wrong with the probability that the search is given.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from assay.harness.bisect.layer_search import find_layers

ALPHA = 0.05
Task = Callable[[frozenset[int]], bool]


def alone(guilty: frozenset[int]) -> Task:
    """Wrong with any of the guilty layers."""
    return lambda candidate: not candidate & guilty


def together(guilty: frozenset[int]) -> Task:
    """Wrong only with all of the guilty layers."""
    return lambda candidate: not guilty <= candidate


def noisy(task: Task, noise: float, draw: random.Random) -> Task:
    """Invert the answer of `task` with this probability."""
    return lambda candidate: task(candidate) != (draw.random() < noise)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--runs", type=int, default=500)
    args = parser.parse_args()
    layers = range(args.layers)
    cases = [(f"{count} wrong alone", count, alone) for count in (1, 2, 4, 8, args.layers // 2, args.layers)]
    cases.append(("2 wrong only together", 2, together))
    table = Table("layers", "noise", "probes: fewest", "mean", "most", "right", "no verdict")
    for noise in (0.0, 0.01, 0.05):
        for name, count, kind in cases:
            draw = random.Random(count)
            probes, right, open_ = [], 0, 0
            for _ in range(args.runs):
                guilty = frozenset(draw.sample(layers, count))
                search = find_layers(layers, noisy(kind(guilty), noise, draw), noise, ALPHA)
                found = {one.layer for one in search.restored}
                probes.append(sum(right + wrong for _, right, wrong in search.probed))
                right += found == guilty if kind is alone else len(found) == 1 and found <= guilty
                open_ += search.outcome == "inconclusive"
            mean = f"{sum(probes) / len(probes):.1f}"
            shares = (f"{right / args.runs:.1%}", f"{open_ / args.runs:.1%}")
            table.add_row(name, f"{noise:g}", str(min(probes)), mean, str(max(probes)), *shares)
    Console().print(table)


if __name__ == "__main__":
    main()
