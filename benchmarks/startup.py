"""What assay costs before it does anything: CPU time of processes that import it, beside those that do not.

python benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from rich.console import Console
from rich.table import Table

WAYS = {
    "import assay": ("import assay", "pass"),
    "import the pytest plugin": ("import pytest, assay.suites.plugin", "import pytest"),
    "assay --help": ("import sys; sys.argv = ['assay', '--help']; from assay.harness.cli import main; main()", "pass"),
}
"""What a user does -> Python that does it, and Python that does everything but it."""


def cpu_seconds(code: str) -> float:
    """CPU time of a Python process that runs some code."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{code!r} exited with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    turns = parser.parse_args().turns
    table = Table(
        "what", "ms", "lowest", "highest", title=f"CPU time beyond that of the process without it, {turns} turns"
    )
    for name, (with_it, without) in WAYS.items():
        cpu_seconds(with_it)  # fills the caches that later turns use
        times = sorted((cpu_seconds(with_it) - cpu_seconds(without)) * 1000 for _ in range(turns))
        table.add_row(name, *(f"{time:.0f}" for time in (statistics.median(times), times[0], times[-1])))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
