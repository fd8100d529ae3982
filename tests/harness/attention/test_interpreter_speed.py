"""The sped-up interpreter computes what the plain one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from assay.harness.attention.interpreter_speed import _MOST_TERMS, _dot

_OUTPUTS = """
import sys
from unittest.mock import patch
if sys.argv[1] == "slow":
    patch("assay.harness.attention.interpreter.speed_up_interpreter").start()
from assay.harness.attention import kernels
from assay.harness.attention.matrix import cases
import torch
kernel = kernels.load("sage_attn")
outputs = [kernel(case.make()) for case in cases(("extend",), seed=3, head_dims=(64,))[:12:3]]
interpreter = sys.modules["triton.runtime.interpreter"]
changes = [getattr(change, "__name__", "") for change in interpreter.assay_changes]
torch.save(("speed_up_interpreter" in changes, outputs), sys.argv[2])
"""


@pytest.mark.slow
def test_sageattention_computes_the_same_with_and_without_it(tmp_path: Path) -> None:
    for speed in ("fast", "slow"):
        subprocess.run([sys.executable, "-c", _OUTPUTS, speed, str(tmp_path / speed)], check=True)
    (is_fast, fast), (is_slow, slow) = (torch.load(tmp_path / speed) for speed in ("fast", "slow"))
    assert (is_fast, is_slow, len(fast)) == (True, False, 4)
    for ours, theirs in zip(fast, slow, strict=True):
        # Sums of float16 products in another order: some hundredths of the kernel's own error, which is about 1 %.
        assert (ours - theirs).abs().sum() <= 5e-4 * theirs.abs().sum()


def _product(x: np.ndarray, y: np.ndarray, start: np.dtype) -> np.ndarray:
    sum_of = np.zeros((len(x), y.shape[1]), start)
    a, b, d = (SimpleNamespace(data=data, dtype=SimpleNamespace(scalar="")) for data in (x, y, sum_of))
    return _dot(SimpleNamespace(TensorHandle=lambda data, dtype: data), lambda *_: None)(None, a, b, d)


@pytest.mark.parametrize("terms", [1, 64, 300])
def test_a_product_of_float16_is_rounded_once(terms: int) -> None:
    draw = np.random.default_rng(terms)
    x, y = (draw.normal(size=shape).astype(np.float16) for shape in ((48, terms), (terms, 32)))
    exact = x.astype(np.float64) @ y.astype(np.float64)
    assert np.abs(_product(x, y, np.dtype(np.float16)) - exact).max() <= 2**-11 * np.abs(exact).max() * 1.01


def test_a_product_of_int8_is_exact_up_to_the_most_terms() -> None:
    x, y = np.full((2, _MOST_TERMS), -128, np.int8), np.full((_MOST_TERMS, 3), -128, np.int8)
    x[:, -1] = y[-1] = 127  # an odd sum needs all 24 bits
    assert (_product(x, y, np.dtype(np.int32)) == x.astype(np.int64) @ y.astype(np.int64)).all()
    more = np.ones((2, _MOST_TERMS + 1), np.int8)
    assert _product(more, more.T, np.dtype(np.int32)) is None  # left to the interpreter
