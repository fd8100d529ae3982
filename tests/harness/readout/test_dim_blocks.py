"""Kernels that compute a block of their output dims otherwise than the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.faults import fault, rounded_oracle
from assay.harness.attention.kernels import declares
from assay.harness.attention.oracle import Request, attend, requests
from assay.harness.readout.dim_blocks import BlockProber, DimBlock, InDims, blocks_apart
from assay.harness.readout.effects import Constant
from assay.harness.readout.probing import Plan, Prober
from assay.harness.readout.queries import Queries
from assay.harness.readout.readout import read_out
from assay.harness.readout.samples import Sample

Kernel = Callable[[AttentionCall], Tensor]


def in_dims(first: int, last: int, wrong: Kernel, only: Callable[[AttentionCall], bool] = lambda call: True) -> Kernel:
    """Attention, but another kernel in dims first to last - 1; a last of 0 is the end, a first of -1 the middle."""

    def kernel(call: AttentionCall) -> Tensor:
        out = rounded_oracle(call)
        if only(call):
            dims = slice(call.v.shape[2] // 2 if first < 0 else first, last or None)
            out[..., dims] = wrong(call)[..., dims]
        return out

    return kernel


def halves(first: Kernel, second: Kernel) -> Kernel:
    """One kernel in the first half of the dims, another in the second."""

    def kernel(call: AttentionCall) -> Tensor:
        half = call.v.shape[2] // 2
        return torch.cat([first(call)[..., :half], second(call)[..., half:]], -1)

    return kernel


def next_value(call: AttentionCall) -> Tensor:
    found = []
    for one in requests(call):
        v = one.v.clone()
        v[:, :-1] = one.v[:, 1:]
        found.append(attend(replace(one, v=v)).transpose(0, 1))
    return torch.cat(found).to(call.q.dtype)


def no_mask(call: AttentionCall) -> Tensor:
    return rounded_oracle(call.with_spec(mask=Mask(causal=False)))


def unscaled(call: AttentionCall) -> Tensor:
    return rounded_oracle(call.with_spec(scale=1.0))


def next_kv_head(call: AttentionCall) -> Tensor:
    return rounded_oracle(replace(call, v=call.v.roll(-1, 1)))


def lost_cached(call: AttentionCall) -> Tensor:
    def without(one: Request) -> Request:
        seen = one.visible.clone()
        seen[:, : one.prefix] = False
        return replace(one, visible=seen)

    return torch.cat([attend(without(one)).transpose(0, 1) for one in requests(call)]).to(call.q.dtype)


def decodes(call: AttentionCall) -> bool:
    return call.phase == "decode"


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "says"), [
    (in_dims(-1, 0, lost_cached), "output dims in the second half: query i does not see cached keys"),
    (in_dims(64, 0, next_value), "output dims from 64 on: V of key j is read from key j + 1"),
    (in_dims(32, 64, next_kv_head), "output dims 32 to 63: V is read from the next kv head"),
    (in_dims(16, 32, no_mask), "output dims 16 to 31: no causal mask: query i also sees keys j > p"),
    (in_dims(0, 32, unscaled), "output dims below 32: scores are multiplied by 1 / scale: the softmax scale is missing"),
    (halves(lost_cached, next_value),
     "output dims in the first half: query i does not see cached keys. "
     "Output dims in the second half: V of key j is read from key j + 1"),
    (in_dims(-1, 0, lambda call: 0.5 * rounded_oracle(call), decodes),
     "output dims in the second half: the output is multiplied by 0.5, only in decode"),
],
    ids=["half, cached", "from 64, V", "32 to 63, kv head", "16 to 31, mask", "below 32, scale", "two halves", "half, decode"],
)  # fmt: skip
def test_a_block_of_output_dims_is_read_apart(kernel: Kernel, says: str) -> None:
    found = read_out(kernel)
    text, place = says.partition(", only")[::2]
    rest = "" if ". " in says else "; the others are attention"
    assert found.sentence == f"{text}{rest}" + (f", only{place}" if place else "")
    assert found.exact
    assert found.fresh.wrong == found.fresh.explained > 0


def sample_of(kernel: Kernel, plan: Plan) -> Sample:
    call = plan.make()
    queries = Queries(call, range(call.q.shape[0]))
    actual = kernel(call).double().numpy()
    found = Sample(plan, queries, actual, np.zeros(actual.shape[0] * actual.shape[1], bool), 3e-4)
    found.bad = found.errors > found.error
    return found


PLANS = [Plan(((9, 20),), head_dim=dim) for dim in (32, 64, 128)]


def blocks_of(kernel: Kernel) -> list[DimBlock]:
    return blocks_apart(Prober(kernel), [sample_of(kernel, plan) for plan in PLANS])


@pytest.mark.parametrize(
    "kernel",
    [
        rounded_oracle,
        fault("scale-twice"),
        in_dims(32, 0, lambda call: 0 * rounded_oracle(call)),  # said by what is zero
        in_dims(2, 4, no_mask),  # too few to be read apart
    ],
    ids=["right", "all dims", "zero", "two dims"],
)
def test_no_block_is_sought_where_none_is_read_apart(kernel: Kernel) -> None:
    assert not blocks_of(kernel)


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [(-1, 0, "output dims in the second half"), (64, 0, "output dims from 64 on"), (32, 64, "output dims 32 to 63")],
)
def test_the_block_is_what_is_wrong_in_every_head_dim(first: int, last: int, words: str) -> None:
    (block,) = blocks_of(in_dims(first, last, no_mask))
    assert block.words == words
    assert block.dims(128).tolist() == list(range(first if first >= 0 else 64, last or 128))


@pytest.mark.slow
def test_a_block_that_changes_with_the_head_dim_alone_is_not_said_as_exact() -> None:
    odd = declares(head_dims=(64,))(in_dims(-1, 0, lambda call: rounded_oracle(call).sin()))
    assert not read_out(odd, seconds=20).exact


@pytest.mark.parametrize(("first", "last"), [(-1, 0), (64, 0), (16, 32)])
def test_other_dims_are_computed_as_those_of_the_block(first: int, last: int) -> None:
    kernel = in_dims(first, last, no_mask)
    (block,) = blocks_of(kernel)
    asked = Prober(kernel)
    inside = BlockProber(kernel, whole=asked, block=block)
    call = Plan(((9, 20),), head_dim=80).make()
    out = inside(call)
    assert out is not None
    assert torch.allclose(out, no_mask(call).double(), atol=1e-6)
    assert (inside.asked, asked.asked) == (1, -(-80 // len(block.dims(80))))


def test_a_call_without_dims_of_the_block_has_no_answer() -> None:
    (block,) = blocks_of(in_dims(64, 0, no_mask))
    asked = Prober(rounded_oracle)
    assert BlockProber(rounded_oracle, whole=asked, block=block)(PLANS[0].make()) is None
    assert asked.asked == 0


def test_an_effect_in_a_block_leaves_the_other_dims_right() -> None:
    constant = in_dims(64, 0, lambda call: 0 * rounded_oracle(call) + 1)
    sample = sample_of(constant, PLANS[2])
    (block,) = blocks_apart(Prober(constant), [sample])
    assert sample.agrees(InDims(block, Constant(1.0)).outputs(sample.queries)).all()
    assert not sample.agrees(Constant(1.0).outputs(sample.queries)).any()
