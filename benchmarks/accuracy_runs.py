"""Complete runs of the built-in job, as one table: identical backends, SageAttention repaired, as shipped, and without a cache.

    python benchmarks/accuracy_runs.py --device cuda
    python benchmarks/accuracy_runs.py --equal 20     # the reference against itself, each time with another order of the questions

Measures verdicts, accuracy and duration (as the run reports it, including the start of the servers). Takes a few minutes. Further
flags are passed to `assay run`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from common import REFERENCE, assay
from rich.console import Console
from rich.table import Table

from assay.harness.judge.report_file import read_report

CACHE_OFF = ("--engine-arg=--disable-radix-cache",)
RUNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("sage_attn", ()),
    ("sage_attn_as_shipped", ()),
    ("sage_attn_as_shipped", CACHE_OFF),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=None, help="folder for the runs; a temporary one by default")
    parser.add_argument(
        "--equal", type=int, default=0, help="runs of the reference against itself, in place of the others"
    )
    args, more = parser.parse_known_args()
    reference = REFERENCE[args.device]
    equal = [(reference, (f"--order-seed={number}",)) for number in range(args.equal)]
    out = args.out or Path(tempfile.mkdtemp(prefix="assay-accuracy-runs-"))
    columns = (
        "candidate",
        "flags",
        "verdict",
        "exit",
        "reference",
        "candidate",
        "lost",
        "gained",
        "cached",
        "calls",
        "s",
    )
    table = Table(*columns, title=f"{args.device}, reference {reference}")
    for number, (candidate, flags) in enumerate(equal or ((reference, ()), *RUNS)):
        folder = out / str(number)
        code = assay("run", "--device", args.device, "--candidate", candidate, "--out", str(folder), *flags, *more)
        if not (folder / "report.json").exists():
            table.add_row(candidate, " ".join(flags), "no report", str(code))
            continue
        report = read_report(folder / "report.json")
        tallies = {t.role: t for s in report.suites if s.id == "accuracy" for t in s.tallies}
        right = [
            f"{tallies[role].right}/{tallies[role].total}" if role in tallies else "-"
            for role in ("reference", "candidate")
        ]
        flips = [f.direction for s in report.suites for f in s.flips]
        cached = [row for s in report.suites for row in s.conditions if row.id == "cached-prefix-at-least-16"]
        table.add_row(
            candidate,
            " ".join(flags),
            report.verdict,
            str(code),
            *right,
            str(flips.count("lost")),
            str(flips.count("gained")),
            str(sum(row.items for row in cached)),
            "; ".join(call.sentence for call in report.candidate.calls),
            f"{report.seconds:.0f}",
        )
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
