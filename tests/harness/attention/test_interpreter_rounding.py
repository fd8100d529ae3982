"""The interpreter rounds float32 to bfloat16 as PyTorch and compiled kernels do."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from assay.harness.attention.interpreter import _bfloat16_bits, _fp8_bits

_COPY = """
from assay.harness.attention.interpreter import interpret_without_gpu
interpret_without_gpu()
import torch
from copied import copy
x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
halves = [torch.bfloat16, torch.float16]
for dtype in (*halves, torch.float8_e4m3fn, torch.float8_e5m2):
    for given in (x, x.half(), x.bfloat16()):
        y = torch.empty(1024, dtype=dtype)
        copy[(1,)](given, y, 1024)
        assert torch.equal(y.float(), given.to(dtype).float()), (given.dtype, dtype)
"""
_KERNEL = """
import triton
import triton.language as tl


@triton.jit
def copy(x, y, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(y + i, tl.load(x + i).to(y.dtype.element_ty))
"""


def test_bits_are_those_of_pytorch() -> None:
    special = [0.0, -0.0, 1.0, 3.3895e38, -3.4e38, 1e-40, float("inf"), float("-inf"), 1 + 2**-8, 1 + 3 * 2**-8]
    x = torch.cat([torch.tensor(special), 10.0 ** torch.linspace(-44, 38, 9991), torch.randn(9999)])
    expected = x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(_bfloat16_bits(x.numpy()), expected)
    nan = torch.tensor([float("nan"), -float("nan")]).numpy()
    assert bool(torch.from_numpy(_bfloat16_bits(nan).view(np.int16)).view(torch.bfloat16).isnan().all())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_bits_are_those_of_pytorch_up_to_the_largest(dtype: torch.dtype) -> None:
    x = torch.cat(
        [torch.tensor([0.0, -0.0, 0.999, 1.97, 2.0**-10, 448.0]), 10.0 ** torch.linspace(-9, 2.5, 9991), torch.randn(9999)]
    )
    name = str(dtype).removeprefix("torch.")
    assert np.array_equal(_fp8_bits(x.numpy(), name), x.to(dtype).view(torch.uint8).numpy())
    largest = torch.finfo(dtype).max
    beyond = torch.from_numpy(_fp8_bits(np.array([1e6, -1e6, np.nan], np.float32), name)).view(dtype).float()
    assert beyond[:2].tolist() == [largest, -largest]
    assert bool(beyond[2].isnan())


def test_an_interpreted_kernel_rounds_to_nearest(python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    (tmp_path / "copied.py").write_text(_KERNEL)
    done = python("-c", _COPY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
