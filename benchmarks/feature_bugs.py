"""Which bugs of features, and which with a public report, are caught and named: each is seeded into a right kernel, and checked on
the calls that ask for its feature, or on all.

python benchmarks/feature_bugs.py           # --only ID for one of them, --phase decode for one phase
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, Outputs, tensor_of
from assay.harness.attention.kernels import declaration, declares
from assay.harness.attention.matrix import Case, cases
from assay.harness.attention.oracle import log_sum_exp
from assay.harness.bugs import features, lse, merges
from assay.harness.bugs.bug import Bug, links
from assay.harness.bugs.family import FAMILY
from assay.harness.bugs.faults import fault, rounded_oracle
from assay.harness.explain.examples import example
from assay.harness.offline.check import check


def seeded(bug: Bug, phase: str) -> Kernel:
    """Make a kernel with a bug, in one phase or in both."""
    if bug in lse.BUGS:
        return declares(features=("sinks", "lse"))(partial(_with_lse, bug))
    wrong = fault(bug.id)

    def kernel(call: AttentionCall) -> Tensor:
        return tensor_of(wrong(call)) if phase in ("", call.phase) else rounded_oracle(call)

    dims = {"head_dims": (192,), "head_dims_v": (128,)} if bug.id == "values-at-key-stride" else {}
    return declares(features=example(bug).features, **dims)(kernel)  # type: ignore[arg-type]


def _with_lse(bug: Bug, call: AttentionCall) -> Outputs:
    """Return right outputs, and the log-sum-exps of a bug where it shows."""
    wrong = bug.compute(call)
    found = log_sum_exp(call) if wrong is None else wrong
    return Outputs(rounded_oracle(call), found.float())


def calls_of(kernel: Kernel) -> list[Case]:
    """The calls of the matrix that ask for what a kernel declares; all calls for one that declares nothing."""
    declared = declaration(kernel)
    asking = cases(declared=declared, head_dims=declared.head_dims)
    return [case for case in asking if case.condition.get("asked for") != "nothing"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only")
    parser.add_argument("--phase", default="", choices=("", "extend", "decode"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("bug", "verdict", "named", "calls", "wrong", "first wrong", "s", "reports", box=None)
    public = [bug for bug in (*merges.BUGS, *FAMILY) if bug.reports]
    for bug in dict.fromkeys((*features.BUGS, *lse.BUGS, *public)):
        if asked.only not in (None, bug.id):
            continue
        kernel, start = seeded(bug, asked.phase), time.perf_counter()
        asking = calls_of(kernel)
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
