"""How much faster Triton's interpreter is with `assay.harness.attention.interpreter_speed`, on SageAttention.

python benchmarks/interpreter_speed.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from assay.harness.attention import kernels
from assay.harness.attention.interpreter_speed import speed_up_interpreter
from assay.harness.attention.sample_calls import call_of

LENGTHS = ((34, 157), (64, 0), (512, 0))
"""New tokens and cached prefix of a sequence: a question behind the shared header, a short prompt, a long one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    with patch("assay.harness.attention.interpreter.speed_up_interpreter"):
        kernel = kernels.load("sage_attn")
    calls = [call_of([lens] * 4, (4, 2), 64, torch.bfloat16, "cpu", 0) for lens in LENGTHS]

    def seconds() -> list[float]:
        found = []
        for call in calls:
            begun = time.process_time()
            kernel(call)
            found.append(time.process_time() - begun)
        return found

    seconds()  # imports
    slow = [seconds() for _ in range(turns)]
    speed_up_interpreter(sys.modules["triton.runtime.interpreter"])
    fast = [seconds() for _ in range(turns)]
    table = Table("new + cached tokens, 4 sequences", "plain s", "sped up s", "ratio")
    for lens, before, after in zip(LENGTHS, zip(*slow, strict=True), zip(*fast, strict=True), strict=True):
        one, other = statistics.median(before), statistics.median(after)
        table.add_row("{} + {}".format(*lens), f"{one:.2f}", f"{other:.2f}", f"{one / other:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
