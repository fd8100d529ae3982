"""Limits of values and scores, found by doubling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.faults import rounded_oracle
from assay.harness.attention.oracle import attend, oracle, requests, scores, sequences
from assay.harness.readout.probing import Plan, Prober
from assay.harness.readout.ranges import limits

Kernel = Callable[[AttentionCall], Tensor]
PLAN = Plan(((1, 0),), (4, 2), 64)


def found(kernel: Kernel, plan: Plan = PLAN) -> list[tuple[str, float, str]]:
    asked: list[AttentionCall] = []

    def ask(call: AttentionCall) -> Tensor:
        asked.append(call)
        return kernel(call).double()

    limited = [(one.what, one.limit, one.how) for one in limits(ask, plan)]
    assert len(asked) < 80
    return limited


def bent(change: Callable[[Tensor], Tensor], scaled: bool = False) -> Kernel:
    """A kernel whose scores are changed before the softmax scale, or after."""

    def kernel(call: AttentionCall) -> Tensor:
        parts = []
        for one in requests(call):
            products = scores(one)
            products = change(products) if scaled else change(products / call.scale) * call.scale
            parts.append((products.softmax(-1) @ one.v[one.kv_head]).transpose(0, 1))
        return torch.cat(parts)

    return kernel


def values(change: Callable[[Tensor], Tensor]) -> Kernel:
    return lambda call: oracle(replace(call, v=change(call.v)))


def beyond(limit: float, what: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.where(x > limit, what, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_right_kernel_has_no_limits(dtype: torch.dtype) -> None:
    assert found(rounded_oracle, replace(PLAN, dtype=dtype)) == []


@pytest.mark.parametrize("limit", [448.0, 57344.0, 65504.0, 240.0, 127.0, 1000.0, 3.5])
def test_clamped_values(limit: float) -> None:
    assert found(values(lambda v: v.clamp(-limit, limit))) == [("values", limit, "clamped")]


def test_a_limit_is_found_through_the_rounding_of_a_narrow_output() -> None:
    narrow = replace(PLAN, dtype=torch.bfloat16)
    assert found(values(lambda v: v.clamp(-448, 448)), narrow) == [("values", 448, "clamped")]


def test_a_limit_is_found_behind_an_error_of_bfloat16() -> None:
    def kernel(call: AttentionCall) -> Tensor:
        return (1 + 2**-8) * values(beyond(65504, float("inf")))(call)

    assert found(kernel) == [("values", 65504, "infinite")]


@pytest.mark.parametrize(("near", "limit"), [(448.7, 448), (57400.0, 57344), (65450.0, 65504), (450.0, 450)])
def test_a_limit_near_the_largest_number_of_a_format_is_that(near: float, limit: float) -> None:
    assert found(values(lambda v: v.clamp(-near, near))) == [("values", limit, "clamped")]


@pytest.mark.parametrize(("what", "how"), [(float("inf"), "infinite"), (float("nan"), "NaN")])
def test_values_that_overflow(what: float, how: str) -> None:
    assert found(values(beyond(65504, what))) == [("values", 65504, how)]


@pytest.mark.parametrize("limit", [448.0, 65504.0, 5000.0])
def test_clamped_scores(limit: float) -> None:
    assert found(bent(lambda s: s.clamp(-limit, limit))) == [("scores", limit, "clamped")]


@pytest.mark.parametrize("cap", [7.0, 30.0, 50.0])
def test_capped_scores(cap: float) -> None:
    assert found(bent(lambda s: cap * torch.tanh(s / cap), scaled=True)) == [("scores", cap, "capped")]


@pytest.mark.parametrize(("what", "how"), [(float("inf"), "NaN"), (float("nan"), "NaN")])
def test_scores_that_overflow(what: float, how: str) -> None:
    assert found(bent(beyond(65504, what))) == [("scores", 65504, how)]


def test_an_output_that_becomes_infinite_with_the_scores() -> None:
    def kernel(call: AttentionCall) -> Tensor:
        large = (call.q[..., 0].max() * call.k[..., 0].max()) > 4096
        return oracle(call) + (float("inf") if large else 0.0)

    assert found(kernel) == [("scores", pytest.approx(4096, rel=1e-3), "infinite")]


def test_both_are_found() -> None:
    def kernel(call: AttentionCall) -> Tensor:
        return bent(lambda s: s.clamp(max=512))(replace(call, v=call.v.clamp(-448, 448)))

    assert found(kernel) == [("values", 448, "clamped"), ("scores", 512, "clamped")]


@pytest.mark.parametrize(
    "kernel",
    [
        lambda call: 2 * oracle(call),
        lambda call: torch.zeros(*call.q.shape[:2], call.v.shape[2]),
        lambda call: (
            torch.cat([attend(replace(one, scale=2 * one.scale)).transpose(0, 1) for one in requests(call)]) * 1.5
        ),
    ],
    ids=["doubled", "zero", "scale and factor"],
)
def test_what_is_wrong_at_any_size_has_no_limit(kernel: Kernel) -> None:
    assert found(kernel) == []


def test_a_kernel_that_raises_beyond_a_size_has_no_limit() -> None:
    def ask(call: AttentionCall) -> Tensor | None:
        return oracle(call) if call.v.abs().max() < 100 and call.k.abs().max() < 100 else None

    assert limits(ask, PLAN) == []


def test_scores_that_are_bent_otherwise_have_no_cap() -> None:
    assert found(bent(lambda s: torch.where(s > 20, 20 + (s - 20) / 2, s), scaled=True)) == []


def test_values_that_come_out_too_large_have_no_limit() -> None:
    assert found(values(lambda v: torch.where(v > 100, 1.5 * v, v))) == []


def test_a_clamp_of_small_scores_is_told_from_a_soft_cap() -> None:
    def clamped(call: AttentionCall) -> Tensor:
        outs = []
        for rows_q, rows_k in sequences(call):
            q, k, v = call.q[rows_q].double(), call.k[rows_k].double(), call.v[rows_k].double()
            group = q.shape[1] // k.shape[1]
            scores = torch.einsum("thd,khd->htk", q, k.repeat_interleave(group, 1)) * call.scale
            weights = scores.clamp(-2, 2).softmax(-1)  # one query, which sees all keys
            outs.append(torch.einsum("htk,khd->thd", weights, v.repeat_interleave(group, 1)))
        return torch.cat(outs).to(call.q.dtype)

    found = limits(Prober(clamped), Plan(((1, 0),), (4, 2), 64))
    assert [(one.what, one.how) for one in found] == [("scores", "clamped")]
    assert found[0].limit == pytest.approx(2 * 64**0.5, rel=0.02)
