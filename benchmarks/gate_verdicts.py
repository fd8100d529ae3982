"""Verdicts of `assay gate` in seven situations, as one table.

    python benchmarks/gate_verdicts.py --questions 96

Rows: the reference against itself, SageAttention as shipped and repaired, a kernel that is correct but slow, a required suite that
did not run, and, with the first row's results accepted, a stored reference and a stale baseline. Takes a few minutes. Exits with 1
if an exit code is not the expected one. With the --out of an earlier call, its runs are resumed. Further flags are passed to
`assay gate`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from common import REFERENCE, assay
from rich.console import Console
from rich.table import Table
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.kernels import declares
from assay.harness.attention.sdpa import torch_sdpa
from assay.harness.evidence.baseline import FILE
from assay.harness.judge.report_file import read_report
from assay.harness.policy import SuiteName

SLEEP_S = 0.01
"""Sleep in each call of the slow kernel: 40 ms for the tiny model's four layers, about as long as its prefill takes."""
LATENCY = ("--suites", "accuracy,greedy,layers,latency", "--latency-shapes", "short", "--latency-seconds", "40")
ANOTHER_ENGINE = "SGLang 0.5.17 on another machine"


@declares(phases=("extend",), about="PyTorch's attention and a sleep")
def slow(call: AttentionCall) -> Tensor:
    """A kernel whose only fault is its latency."""
    time.sleep(SLEEP_S)
    return torch_sdpa(call)


def nothing(folder: Path) -> None:
    """No preparation."""


def accept(folder: Path) -> None:
    """Accept the first row's results."""
    if assay("baseline", "accept", "1", "--yes", cwd=folder):
        sys.exit("The results of the first row cannot be accepted.")


def make_stale(folder: Path) -> None:
    """Make the accepted results look as if another engine had produced them."""
    for path in (folder / "baselines").glob(f"*/{FILE}"):
        kept = json.loads(path.read_text())
        kept["key"]["engine"] = ANOTHER_ENGINE
        path.write_text(json.dumps(kept))


@dataclass(frozen=True)
class Row:
    """A run of the gate: its preparation and its expected exit code."""

    title: str
    candidate: str
    expected: int
    flags: tuple[str, ...] = ()
    before: Callable[[Path], None] = nothing
    needs: str = ""


def rows(reference: str) -> tuple[Row, ...]:
    """The rows in order; the later ones use the results of the first one."""
    only_questions = ("--suites", "accuracy")
    return (
        Row("identical backends", reference, 0),
        Row("as shipped", "sage_attn_as_shipped", 1),
        Row("repaired", "sage_attn", 0),
        Row("correct, but slow", "gate_verdicts:slow", 1, LATENCY, needs="latency"),
        Row("a required suite did not run", reference, 3, (*only_questions, "--require", "layers")),
        Row("as shipped, reference stored", "sage_attn_as_shipped", 1, ("--reference-from", "baseline"), accept),
        Row("stale baseline", reference, 3, (), make_stale),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=None, help="folder for the runs; a temporary one by default")
    parser.add_argument("--rows", default="", help="numbers of the rows to run, such as 1,2,5; by default all")
    args, more = parser.parse_known_args()
    reference = REFERENCE[args.device]
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
        code = assay("gate", *flags, cwd=out)
        wrong += code != row.expected
        made = read_report(folder / "report.json") if (folder / "report.json").exists() else None
        verdict, reason, seconds = (made.verdict, made.reasons[0], made.seconds) if made else ("no report", "", 0.0)
        servers = str(len(list(folder.glob("*.log"))))
        cells = (row.title, row.candidate, verdict, str(code), str(row.expected), servers, f"{seconds:.0f}", reason)
        table.add_row(*cells)
    Console(width=200).print(table)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
