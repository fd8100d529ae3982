"""Interpreted kernels that access memory outside of what they were given: seen, and without harm."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

KERNEL = """
import torch
from assay.harness.attention.interpreter import interpret_without_gpu
interpret_without_gpu()
import triton, triton.language as tl
from assay.harness.attention.interpreter_bounds import memory

@triton.jit
def copy(in_ptr, out_ptr, first, count, N: tl.constexpr):
    at = first + tl.arange(0, N)
    x = tl.load(in_ptr + at, mask=at < count, other=0.0)
    tl.store(out_ptr + at, x)

def run(length, out_length, first, count, offset=0):
    x = torch.arange(float(length + offset))[offset:]
    out = torch.full((out_length,), -1.0)
    with memory.watching() as seen:
        copy[(1,)](x, out, first, count, N=16)
    print([one.words for one in seen], out[:16].tolist())

run(16, 16, 0, 16)
run(16, 16, 0, 4)
run(16, 10, 0, 16)
run(10, 16, 0, 16)
run(16, 16, -2, 16)
run(16, 16, 0, 16, offset=5)
"""


def test_accesses_outside_are_seen_and_do_no_harm(python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    done = python("kernel.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    whole = [float(n) for n in range(16)]
    assert lines[0] == f"[] {whole}"
    assert lines[1] == f"[] {[float(n) if n < 4 else 0.0 for n in range(16)]}"
    assert lines[2] == f"['writes 6 elements beyond the end of out_ptr (kernel.py, line 12, in copy)'] {whole[:10]}"
    assert lines[3] == f"['reads 6 elements beyond the end of in_ptr (kernel.py, line 11, in copy)'] {whole[:10] + [0.0] * 6}"
    assert lines[4].startswith(
        "['reads 2 elements before the start of in_ptr (kernel.py, line 11, in copy)', "
        "'writes 2 elements before the start of out_ptr (kernel.py, line 12, in copy)']"
    )
    assert lines[5].startswith("[] [5.0, 6.0, ")
