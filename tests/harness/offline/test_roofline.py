from __future__ import annotations

import pytest
import torch

from assay.harness.attention.sample_calls import call_of
from assay.harness.offline.roofline import limit_s, work_of


def test_the_work_of_a_call_is_that_of_the_correct_mask() -> None:
    call = call_of([(3, 2)], (4, 2), 16, torch.bfloat16, "cpu")
    pairs = 3 + 4 + 5
    work = work_of(call)
    assert work.qk_flops == work.pv_flops == 2 * pairs * 4 * 16
    assert work.flops == 4 * pairs * 4 * 16
    assert work.bytes == 2 * (3 * 4 * 16 + 2 * 5 * 2 * 16 + 3 * 4 * 16)


def test_limits_are_those_of_the_data_sheet_and_of_no_other_device() -> None:
    prefill = call_of([(4096, 0)], (8, 2), 128, torch.bfloat16, "cpu")
    work = work_of(prefill)
    assert limit_s(prefill, "NVIDIA H200") == pytest.approx(work.flops / 989.5e12)
    assert limit_s(prefill, "NVIDIA H200", "int8_qk") == pytest.approx(0.75 * work.flops / 989.5e12)
    decode = call_of([(1, 4095)], (8, 2), 128, torch.bfloat16, "cpu").with_spec(phase="decode")
    assert limit_s(decode, "NVIDIA H200") == pytest.approx(work_of(decode).bytes / 4.8e12)
    assert limit_s(prefill, "cpu") is None
    assert limit_s(prefill, "NVIDIA H100") is None
