from __future__ import annotations

import pytest
import torch

from assay.harness.attention.matrix import cases
from assay.harness.attention.matrix_data import ONE_SIGN, excluded
from assay.harness.attention.noise import family


@pytest.mark.parametrize(("noise", "out"), [("", False), ("int8_qk", False), ("fp8_pv", True), ("fp16_accumulation", True)])
def test_values_of_one_sign_are_no_call_for_kernels_whose_declared_rounding_adds_up(noise: str, out: bool) -> None:
    assert bool(excluded(family(noise), ONE_SIGN)) is out
    assert not excluded(family(noise), "normal")


@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_sums_over_values_of_one_sign_exceed_fp16(phase: str) -> None:
    (call, *_) = (case.make() for case in cases([phase], seed=1) if case.condition["data"] == ONE_SIGN)
    weights = torch.softmax(call.scale * call.q[:1, 0].float() @ call.k[:, 0].float().T, -1)
    sums = (weights / weights.max()) @ call.v[:, 0].float()
    assert sums.min() > torch.finfo(torch.float16).max / 2
    assert sums.max() > torch.finfo(torch.float16).max
