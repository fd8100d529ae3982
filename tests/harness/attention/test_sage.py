"""The package's real Triton kernels, through Triton's interpreter, against the float64 oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Kernel, KernelRefused
from assay.harness.attention.oracle import oracle
from assay.harness.attention.sage import sage_attn, sage_attn_as_shipped
from assay.harness.attention.sample_calls import call_of

pytestmark = pytest.mark.interpreter

INT8_NOISE = 0.02
"""Relative L1 of int8 QK on normal data: 0.019 for the "T" kernel in the SageAttention paper (arXiv 2410.02367, table 9)."""

NO_PREFIX = [[(41, 0)], [(130, 0), (7, 0)]]
PREFIX = [[(41, 1)], [(20, 77)], [(60, 76), (10, 119)], [(1, 140), (33, 0)], [(130, 128)], [(5, 200)]]


def relative_l1(out: Tensor, truth: Tensor) -> float:
    return float((out.double() - truth).abs().sum() / truth.abs().sum())


def top_left(call: AttentionCall) -> Tensor:
    """The oracle with the mask aligned top-left: query i of the new tokens sees keys 0 to i, so the last keys never count."""
    first_keys = torch.cat(
        [torch.arange(start, start + new) for start, new in zip(call.cu_seqlens_k[:-1].tolist(), call.lens_q, strict=True)]
    )
    return oracle(replace(call, k=call.k[first_keys], v=call.v[first_keys], cu_seqlens_k=call.cu_seqlens_q))


@pytest.mark.few(4)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("lens", NO_PREFIX + PREFIX)
def test_sage_attn_is_correct_up_to_int8_noise(lens: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    call = call_of(lens, heads, 64, torch.float16, "cpu")
    out = sage_attn(call)
    assert out.dtype == call.q.dtype
    assert out.shape == call.q.shape
    assert relative_l1(out, oracle(call)) < INT8_NOISE


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dtypes_and_head_dims(dtype: torch.dtype, head_dim: int) -> None:
    call = call_of([(20, 30)], (2, 1), head_dim, dtype, "cpu")
    assert relative_l1(sage_attn(call), oracle(call)) < INT8_NOISE


@pytest.mark.few(2)
@pytest.mark.parametrize("lens", NO_PREFIX)
def test_as_shipped_is_correct_without_a_prefix(lens: list[tuple[int, int]]) -> None:
    call = call_of(lens, (4, 2), 64, torch.float16, "cpu")
    assert relative_l1(sage_attn_as_shipped(call), oracle(call)) < INT8_NOISE


@pytest.mark.parametrize("lens", [[(41, 1)], [(20, 77)], [(60, 76), (10, 119)]])
def test_as_shipped_is_top_left_with_a_prefix(lens: list[tuple[int, int]]) -> None:
    call = call_of(lens, (4, 2), 64, torch.float16, "cpu")
    out = sage_attn_as_shipped(call)
    assert relative_l1(out, oracle(call)) > 0.2
    assert relative_l1(out, top_left(call)) < INT8_NOISE


@pytest.mark.parametrize("kernel", [sage_attn, sage_attn_as_shipped])
def test_inputs_are_not_modified(kernel: Kernel) -> None:
    call = call_of([(20, 30), (9, 0)], (4, 2), 64, torch.float16, "cpu")
    before = [t.clone() for t in (call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k)]
    kernel(call)
    after = (call.q, call.k, call.v, call.cu_seqlens_q, call.cu_seqlens_k)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_an_answer_does_not_depend_on_the_batch_beyond_noise() -> None:
    alone = call_of([(20, 30)], (4, 2), 64, torch.float16, "cpu", seed=1)
    other = call_of([(50, 9)], (4, 2), 64, torch.float16, "cpu", seed=2)
    both = replace(
        alone,
        q=torch.cat([other.q, alone.q]),
        k=torch.cat([other.k, alone.k]),
        v=torch.cat([other.v, alone.v]),
        cu_seqlens_q=torch.tensor([0, 50, 70], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 59, 109], dtype=torch.int32),
    )
    assert relative_l1(sage_attn(both)[50:], sage_attn(alone).double()) < INT8_NOISE


@pytest.mark.parametrize(
    ("heads", "head_dim"), [((2, 2), 80), ((2, 2), 96), ((3, 2), 64)], ids=["head_dim 80", "head_dim 96", "3 heads on 2"]
)
def test_unsupported_calls_are_refused(heads: tuple[int, int], head_dim: int) -> None:
    with pytest.raises(KernelRefused, match="head_dim 64 or 128"):
        sage_attn(call_of([(4, 0)], heads, head_dim, torch.float16, "cpu"))


class TorchAmongNans:
    """``torch``, except that ``empty`` gives memory filled with NaN, as it may be."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    @staticmethod
    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = math.prod(int(n) for n in shape)
        fill = math.nan if dtype.is_floating_point else 0
        return torch.full((size + 4096,), fill, dtype=dtype, device=device)[:size].view(tuple(int(n) for n in shape))


@pytest.mark.few(2)
@pytest.mark.parametrize("kernel", [sage_attn, sage_attn_as_shipped])
@pytest.mark.parametrize("lens", [[(41, 0)], [(100, 0), (48, 0)], [(150, 0)]])
def test_memory_after_the_scales_has_no_effect(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel, lens: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr("sageattention.quant_per_block_varlen.torch", TorchAmongNans())
    call = call_of(lens, (4, 2), 64, torch.float16, "cpu")
    assert relative_l1(kernel(call), oracle(call)) < INT8_NOISE
