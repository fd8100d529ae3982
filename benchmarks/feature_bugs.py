"""Which bugs of features are caught and named: each is seeded into a right kernel, and checked on calls that ask for its feature.

python benchmarks/feature_bugs.py           # --only ID for one of them, --phase decode for one phase
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, tensor_of
from assay.harness.attention.kernels import declaration, declares
from assay.harness.attention.matrix import cases
from assay.harness.bugs.bug import Bug, links
from assay.harness.bugs.faults import fault, rounded_oracle
from assay.harness.bugs.features import BUGS
from assay.harness.explain.examples import example
from assay.harness.offline.check import check


def seeded(bug: Bug, phase: str) -> Kernel:
    """Make a kernel with a bug, in one phase or in both."""
    wrong = fault(bug.id)

    def kernel(call: AttentionCall) -> Tensor:
        return tensor_of(wrong(call)) if phase in ("", call.phase) else rounded_oracle(call)

    return declares(features=example(bug).features)(kernel)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only")
    parser.add_argument("--phase", default="", choices=("", "extend", "decode"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("bug", "verdict", "named", "calls", "wrong", "first wrong", "s", "reports", box=None)
    for bug in BUGS:
        if asked.only not in (None, bug.id):
            continue
        kernel, start = seeded(bug, asked.phase), time.perf_counter()
        asking = [case for case in cases(declared=declaration(kernel)) if case.condition["asked for"] != "nothing"]
        result = check(kernel, cases=asking, read_out=0, calls=0)
        wrong = [case.name for case in result.failing]
        first = next((number for number, case in enumerate(asking, 1) if case.name in wrong), 0)
        table.add_row(
            bug.id, result.exit_code.name.lower(), ", ".join(finding.id for finding in result.findings), str(len(asking)),
            str(len(wrong)), str(first), f"{time.perf_counter() - start:.1f}", " ".join(links(*bug.reports)),
        )  # fmt: skip
    Console(width=220).print(table)


if __name__ == "__main__":
    main()
