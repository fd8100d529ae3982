"""What a cell costs beyond its command, on this machine and on a warm worker of Ray: seconds, and memory of the worker.

    python benchmarks/sweep_cell.py [--cells 10]

The command is a stand-in for ``assay`` (``tests/stand_ins/cells``) that ends at once, so that what is left is the cost: its
process, its guardian, the hashes of its evidence, its record, and what travels. The first cell of a process also has its start.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from assay.harness.sweep.cell_process import CellWork
from assay.harness.sweep.executor import Executor, Needs, Task, Workplace
from assay.harness.sweep.executors import executor_of
from assay.harness.sweep.on_ray import LOCAL
from assay.harness.sweep.spec import Limits

STAND_IN = Path(__file__).parents[1] / "tests" / "stand_ins" / "cells"


class There(CellWork):
    """A cell that tells which process runs it, and what that takes: its own memory, and with that shared with others, in MB."""

    def __call__(self, place: Workplace) -> tuple[int, float, float]:  # type: ignore[override]
        with contextlib.chdir(STAND_IN):
            assert super().__call__(place).verdict == "pass"
        taken = psutil.Process().memory_full_info()
        return os.getpid(), taken.uss / 1e6, taken.rss / 1e6


def measured(executor: Executor, cells: int, place: Path) -> tuple[list[float], list[float], float, float]:
    """Run cells one after the other; return the seconds of the first of each process, those of the others, and the memory."""
    first, later = dict[int, float](), list[float]()
    own = resident = 0.0
    with executor:
        for number in range(cells):
            begun = time.monotonic()
            executor.submit(Task(f"{number}", There(f"{number}", ("check", "pass"), {}, Limits()), place / f"{number}"))
            (ended,) = executor.ended()
            if ended.error is not None:
                raise ended.error
            seconds = time.monotonic() - begun
            pid, own, resident = ended.value
            if pid in first:
                later.append(seconds)
            first.setdefault(pid, seconds)
    return [*first.values()], later, own, resident


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=10)
    cells = parser.parse_args().cells
    alone = []
    for _ in range(cells):
        begun = time.monotonic()
        subprocess.run([sys.executable, "-m", "assay", "check", "pass"], cwd=STAND_IN, check=True, capture_output=True)
        alone.append(time.monotonic() - begun)
    command_s = statistics.median(alone)
    table = Table("where", "first of a process, s (median, most)", "later cells, s", "own memory, MB", "resident, MB")
    for name, ray in (("this machine", None), ("a worker of Ray", LOCAL)):
        with tempfile.TemporaryDirectory(prefix="sweep-cell-") as made:
            first, later, own, resident = measured(executor_of(Needs(), 1, ray), cells, Path(made))
        texts = [f"{statistics.median(part) - command_s:.2f}, {max(part) - command_s:.2f}" for part in (first, later)]
        table.add_row(name, *texts, f"{own:.0f}", f"{resident:.0f}")
    console = Console(width=120)
    console.print(table)
    console.print(f"The command alone: {command_s:.2f} s. Load: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")


if __name__ == "__main__":
    main()
