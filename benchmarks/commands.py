"""Wall and CPU seconds of the commands that need no server.

    python benchmarks/commands.py runs/A runs/B

Takes folders of complete runs. Checks the wrong kernel of the README, and the same kernel put right. Each command runs several
times; the table has medians, with the command's children included.

    python benchmarks/commands.py --new-user

Does what a new user types, in a new clone and a new environment, from nothing to the diagnosis of that kernel.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import HERE
from rich.console import Console
from rich.table import Table

_BLOCK = re.compile(r"```python\n(# mine\.py\n.*?)```", re.DOTALL)
_WRONG, _RIGHT = "mask.tril()", "mask.tril(k.shape[1] - q.shape[1])"


def readme_kernels(folder: Path) -> None:
    """Write the README's kernel as ``mine.py``, and put right as ``right.py``.

    Raises:
        SystemExit: the README has no such kernel.
    """
    found = _BLOCK.search((HERE.parent / "README.md").read_text(encoding="utf-8"))
    if found is None or _WRONG not in found[1]:
        raise SystemExit(f"README.md has no block of mine.py with {_WRONG}")
    (folder / "mine.py").write_text(found[1], encoding="utf-8")
    (folder / "right.py").write_text(found[1].replace(_WRONG, _RIGHT), encoding="utf-8")


def measure(arguments: Sequence[str], folder: Path, times: int) -> tuple[float, float, int]:
    """Median wall and CPU seconds of a command, and its exit code."""
    walls, cpus, code = [], [], 0
    for _ in range(times):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        code = subprocess.run(
            [sys.executable, "-m", "assay", *arguments], cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        ).returncode  # fmt: skip
        walls.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(walls), statistics.median(cpus), code


def new_user(table: Table) -> None:
    """What is typed from nothing to the first diagnosis, and the seconds that each step takes. Downloads are as fast as here."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        typed = (
            (f"git clone {HERE.parent} assay", "git clone ADDRESS assay"),
            ("python3 -m venv env", ""),
            ("env/bin/pip install --quiet ./assay", ""),
            ("env/bin/assay check mine:forward", ""),
            ("env/bin/assay check right:forward", ""),
        )
        readme_kernels(folder)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        whole = 0.0
        for command, shown in typed:
            start = time.perf_counter()
            done = subprocess.run(command, shell=True, cwd=folder, env=clean, stdout=subprocess.DEVNULL, check=False)
            seconds = time.perf_counter() - start
            whole += seconds
            table.add_row(shown or command, str(done.returncode), f"{seconds:.1f}", f"{whole:.1f}")


def timed(runs: Sequence[Path], times: int, table: Table) -> None:
    """A row for each command."""
    a, b = (str(run.resolve()) for run in runs)
    commands = (
        ("--help",),
        ("check", "right:forward"),
        ("check", "mine:forward"),
        ("check", "mine:forward", "--read-out", "0"),
        ("show", a),
        ("show", b),
        ("show", b, "--json"),
        ("runs", str(Path(b).parent)),
        ("compare", a, b),
        ("compare", a, b, "--html", "compare.html"),
        ("report", b),
        ("explain", "mask-top-left"),
        ("doctor",),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        readme_kernels(folder)
        for arguments in commands:
            wall, cpu, code = measure(arguments, folder, times)
            shown = " ".join({a: "A", b: "B", str(Path(b).parent): "RUNS"}.get(one, one) for one in arguments)
            table.add_row(f"assay {shown}", str(code), f"{wall:.2f}", f"{cpu:.2f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="two folders of complete runs, the accepted one first")
    parser.add_argument("--new-user", action="store_true")
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    if args.new_user:
        table = Table("typed", "exit code", "seconds", "in all")
        new_user(table)
    elif len(args.runs) == 2:
        table = Table("command", "exit code", "seconds", "CPU seconds")
        timed(args.runs, args.times, table)
    else:
        parser.error("name two runs, or --new-user")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
