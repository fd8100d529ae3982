"""The sped-up interpreter gives the same bits."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from assay.harness.attention.interpreter_speed import _dot

_OUTPUTS = """
import hashlib, os, sys
from unittest.mock import patch
if sys.argv[1] == "slow":
    patch("assay.harness.attention.interpreter.speed_up_interpreter").start()
from assay.harness.attention import kernels
from assay.harness.attention.matrix import cases
from assay.harness.attention.call import KernelRefused
import torch
kernel, total = kernels.load("sage_attn"), hashlib.sha256()
done = 0
for case in cases(("extend",), seed=3, head_dims=(64,))[:12:3]:
    out = kernel(case.make())
    total.update(out.contiguous().view(torch.uint8).numpy().tobytes())
    done += 1
interpreter = sys.modules["triton.runtime.interpreter"]
changes = [getattr(change, "__name__", "") for change in interpreter.assay_changes]
print(done, "speed_up_interpreter" in changes, total.hexdigest())
"""


def _outputs(speed: str) -> list[str]:
    command = [sys.executable, "-c", _OUTPUTS, speed]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
def test_sageattention_computes_the_same_bits_with_and_without_it() -> None:
    fast, slow = _outputs("fast"), _outputs("slow")
    assert (fast[1], slow[1]) == ("True", "False")
    assert fast[0] == slow[0] == "4"
    assert fast[2] == slow[2]


@pytest.mark.parametrize("terms", [1, 64, 300])
def test_a_product_of_float16_has_the_bits_of_numpy(terms: int) -> None:
    draw = np.random.default_rng(terms)
    x, y = (draw.normal(size=shape).astype(np.float16) for shape in ((48, terms), (terms, 32)))
    a, b, start = (SimpleNamespace(data=data, dtype=SimpleNamespace(scalar="")) for data in (x, y, np.zeros((48, 32), np.float16)))
    product = _dot(SimpleNamespace(TensorHandle=lambda data, dtype: data), pytest.fail)(None, a, b, start)
    assert product.tobytes() == np.matmul(x, y, dtype=np.float16).tobytes()
