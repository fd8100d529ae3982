"""Operators that follow plans: the same outputs, without working out types again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = """
import sys
from unittest.mock import patch
if sys.argv[1] == "unplanned":
    patch("assay.harness.attention.interpreter_speed._PLANNED", frozenset()).start()
import torch
from assay.harness.attention.interpreter import interpret_without_gpu
interpret_without_gpu()
import triton, triton.language as tl

@triton.jit
def operands(x_ptr, y_ptr, out_ptr, n, fill, scale, N: tl.constexpr):
    at = tl.arange(0, N)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, x + x)
    tl.store(out_ptr + N + at, x + y)
    tl.store(out_ptr + 2 * N + at, 1.0 / (x * 0.0))
    tl.store(out_ptr + 3 * N + at, 1.0 / (x * -0.0))
    tl.store(out_ptr + 4 * N + at, (at + 1) // 2 + (at + True) % 3 - (at + 1.0) / 2)
    tl.store(out_ptr + 5 * N + at, tl.load(x_ptr + at, mask=at < n, other=fill))
    tl.store(out_ptr + 6 * N + at, tl.load(x_ptr + at, mask=at < n, other=scale))
    tl.store(out_ptr + 7 * N, tl.load(x_ptr, mask=n > 3, other=fill))
    tl.store(out_ptr + 7 * N + 1, x_ptr.to(tl.int64) % 4, mask=n > 3)
    rows = tl.where(x[:, None] >= y[None, :], x[:, None], -y[None, :])
    tl.store(out_ptr + 8 * N + at, tl.sum(rows * scale, 1).to(tl.float16).to(tl.float32))
    tl.store(out_ptr + 9 * N + at, tl.exp2(tl.minimum(x, y).to(tl.float32)) + tl.abs(tl.max(rows, 0)))

def launch(n, fill, scale, dtype):
    x, y = torch.arange(1, 17).to(dtype), torch.arange(16, 0, -1).to(dtype)
    out = torch.full((10 * 16,), -7.0)
    operands[(1,)](x, y, out, n, fill, scale, N=16)
    print(out.view(10, 16).tolist())
"""
LAUNCHES = """
for dtype in (torch.float32, torch.float16, torch.int32):
    for n, fill, scale in ((0, 0, 0.0), (0, 7, 2.5), (9, 7, -0.0), (9, 2**40, 1.0), (0, 0, 0.0)):
        launch(n, fill, scale, dtype)
"""
COUNTED = """
from triton.language.semantic import TritonSemantic
typed, check = [], TritonSemantic.binary_op_type_checking_impl
TritonSemantic.binary_op_type_checking_impl = lambda *args, **more: (typed.append(0), check(*args, **more))[1]
for n in (5, 6, 7):
    typed.clear()
    launch(n, n, 0.5, torch.float32)
    print("typed", len(typed))
"""


def _printed(folder: Path, planned: str, script: str) -> list[str]:
    (folder / "kernels.py").write_text(KERNELS + script)
    done = subprocess.run([sys.executable, "kernels.py", planned], cwd=folder, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_outputs_are_those_of_the_interpreter_whatever_came_before(tmp_path: Path) -> None:
    planned, unplanned = (_printed(tmp_path, mode, LAUNCHES) for mode in ("planned", "unplanned"))
    assert planned == unplanned
    assert len(planned) == 15
    assert len(set(planned)) >= 4  # so many launches differ, whatever their dtype


@pytest.mark.slow
def test_types_are_worked_out_once(tmp_path: Path) -> None:
    first, again, last = (int(line.split()[1]) for line in _printed(tmp_path, "planned", COUNTED) if "typed" in line)
    assert first > 20
    assert again == last <= 1  # x + x has one handle twice, and no plan
    counted = [int(line.split()[1]) for line in _printed(tmp_path, "unplanned", COUNTED) if "typed" in line]
    assert min(counted) > first
