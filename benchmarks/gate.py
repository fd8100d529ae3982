"""What the gate says, as one table: ``python benchmarks/gate.py --questions 96``. Takes some minutes; more flags go to `gate`.

Rows: the reference against itself, SageAttention as shipped and repaired, a kernel that is right and slow, a required suite that
did not run, and, with the first row's results accepted, a stored reference and a stale baseline. Exits with 1 if an exit code is
not the one expected. With the --out of an earlier call, its runs are gone on with: nothing is asked twice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.kernels import declares
from assay.harness.config import SuiteName
from assay.harness.evidence.baseline import FILE
from assay.harness.offline.timing import torch_sdpa
from assay.reports.json_report import load

HERE = Path(__file__).parent
SLEEP_S = 0.01
"""Of each call of the slow kernel: 40 ms of a prefill of the tiny model's four layers, which takes about as long by itself."""
LATENCY = ("--suites", "mmlu,greedy,layers,latency", "--latency-shapes", "short", "--latency-seconds", "40")
ANOTHER_ENGINE = "SGLang 0.5.17 on another machine"


@declares(phases=("extend",), about="PyTorch's attention, and a sleep")
def slow(call: AttentionCall) -> Tensor:
    """A kernel whose only fault is its latency."""
    time.sleep(SLEEP_S)
    return torch_sdpa(call)


def nothing(folder: Path) -> None:
    """No preparation."""


def accept(folder: Path) -> None:
    """Accept the first row's results."""
    command = [sys.executable, "-m", "assay", "baseline", "accept", "1", "--yes"]
    subprocess.run(command, cwd=folder, env=_environment(), check=True)


def make_stale(folder: Path) -> None:
    """Let what was accepted have been measured with another engine."""
    for path in (folder / "baselines").glob(f"*/{FILE}"):
        kept = json.loads(path.read_text())
        kept["key"]["engine"] = ANOTHER_ENGINE
        path.write_text(json.dumps(kept))


@dataclass(frozen=True)
class Row:
    """A run of the gate: what it is of, what is done before, and the exit code that it must have."""

    title: str
    candidate: str
    expected: int
    flags: tuple[str, ...] = ()
    before: Callable[[Path], None] = nothing
    needs: str = ""


def rows(reference: str) -> tuple[Row, ...]:
    """The table's rows, in order: the later ones use what the first one left."""
    only_questions = ("--suites", "mmlu")
    return (
        Row("identical backends", reference, 0),
        Row("as shipped", "sage_attn_as_shipped", 1),
        Row("repaired", "sage_attn", 0),
        Row("right, but slow", "gate:slow", 1, LATENCY, needs="latency"),
        Row("a required suite did not run", reference, 3, (*only_questions, "--require", "layers")),
        Row("as shipped, reference stored", "sage_attn_as_shipped", 1, ("--reference-from", "baseline"), accept),
        Row("stale baseline", reference, 3, (), make_stale),
    )


def _environment() -> dict[str, str]:
    paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=None, help="folder for the runs; a temporary one by default")
    parser.add_argument("--rows", default="", help="numbers of the rows to run, such as 1,2,5; all by default")
    args, more = parser.parse_known_args()
    reference = "torch_native" if args.device == "cpu" else "triton"
    out = args.out or Path(tempfile.mkdtemp(prefix="assay-gate-"))
    out.mkdir(parents=True, exist_ok=True)
    columns = ("row", "candidate", "verdict", "exit", "expected", "servers", "s", "first reason")
    table = Table(
        *columns, title=f"assay gate on {args.device}, reference {reference} {' '.join(more)}", show_lines=True
    )
    wrong = 0
    wanted = {int(number) for number in args.rows.split(",") if number}
    for number, row in enumerate(rows(reference), 1):
        if wanted and number not in wanted:
            continue
        if row.needs and row.needs not in get_args(SuiteName):
            table.add_row(
                row.title, row.candidate, "skipped", "", str(row.expected), "", "", f"no suite {row.needs} here"
            )
            continue
        row.before(out)
        folder = out / str(number)
        flags = ["--device", args.device, "--candidate", row.candidate, "--out", folder.name, *more, *row.flags]
        command = [sys.executable, "-m", "assay", "gate", *flags]
        code = subprocess.run(command, cwd=out, env=_environment(), check=False).returncode
        wrong += code != row.expected
        made = load(folder / "report.json") if (folder / "report.json").exists() else None
        verdict, reason, seconds = (made.verdict, made.reasons[0], made.seconds) if made else ("no report", "", 0.0)
        servers = str(len(list(folder.glob("*.log"))))
        cells = (row.title, row.candidate, verdict, str(code), str(row.expected), servers, f"{seconds:.0f}", reason)
        table.add_row(*cells)
    Console(width=200).print(table)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
