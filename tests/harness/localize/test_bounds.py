from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.declaration import declares
from assay.harness.attention.matrix import Size, cases
from assay.harness.attention.noise import FAMILIES, NoiseFamily, family
from assay.harness.attention.oracle import oracle, requests, scores, sequences
from assay.harness.attention.sample_calls import call_of
from assay.harness.localize import bounds
from assay.harness.localize.bounds import CallNoise
from assay.harness.localize.cells import cells_of, deviation
from assay.harness.localize.diagnose import diagnose
from assay.harness.localize.guard import run_and_repeat
from assay.harness.localize.kernel_runs import CallResult, measure
from assay.harness.localize.lse import lse_errors
from assay.harness.stats.error_sums import relative_l1

LENS = [[(1, 0), (2, 0)], [(41, 0)], [(1, 3)], [(20, 77)], [(60, 76), (10, 119)]]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def peaky(call: AttentionCall, times: float) -> AttentionCall:
    return replace(call, q=call.q * times, k=call.k * times)


def sdpa(call: AttentionCall) -> Tensor:
    outs = []
    for rows_q, rows_k in sequences(call):
        q, k, v = (t.transpose(0, 1)[None] for t in (call.q[rows_q], call.k[rows_k], call.v[rows_k]))
        mask = Mask().visible(torch.arange(q.shape[2], device=q.device), q.shape[2], k.shape[2])
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def own(out: Tensor, call: AttentionCall) -> Tensor:
    return relative_l1(deviation(out, oracle(call), cells_of(call)))


@pytest.mark.few(6)
@pytest.mark.parametrize("times", [1.0, 3.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", LENS)
def test_a_correct_kernel_of_the_same_dtype_is_within_bounds(lens: list[tuple[int, int]], dtype: torch.dtype, times: float) -> None:
    call = peaky(call_of(lens, (4, 2), 64, dtype, "cpu"), times)
    assert bool((own(sdpa(call), call) <= CallNoise(call).bounds).all())


def key_by_key(call: AttentionCall) -> Tensor:
    """Online softmax with blocks of one key: every sum is rounded once per key."""
    outs = []
    for rows_q, rows_k in sequences(call):
        q, k, v = (t.transpose(0, 1) for t in (call.q[rows_q], call.k[rows_k], call.v[rows_k]))
        k, v = (t.repeat_interleave(len(q) // len(t), 0) for t in (k, v))
        seen = Mask().visible(torch.arange(q.shape[1], device=q.device), q.shape[1], k.shape[1])
        top = torch.full((*q.shape[:2], 1), float("-inf"))
        total, sums = torch.zeros_like(top), torch.zeros(*q.shape[:2], v.shape[2])
        for key in range(k.shape[1]):
            score = (call.scale * (q @ k[:, key, :, None])).masked_fill(~seen[:, key, None], float("-inf"))
            new = torch.maximum(top, score)
            fade, weight = (top - new).exp(), (score - new).exp()
            total, sums, top = total * fade + weight, sums * fade + weight * v[:, None, key], new
        outs.append((sums / total).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("lost", [4e-8, 5.9e-8])
def test_terms_that_a_float32_sum_of_single_keys_loses_are_within_bounds(lost: float) -> None:
    # One key has nearly all the weight, and each of the others less than half an ulp of it: added one by one, all are lost.
    call = call_of([(1, 400)], (4, 1), 64, torch.float32, "cpu", 5)
    k, along = torch.zeros_like(call.k), call.q.mean(1, keepdim=True)
    k[0] = along[0] / along.square().sum() / call.scale * -math.log(lost)
    call = replace(call, q=along.expand_as(call.q).contiguous(), k=k, v=call.v.abs() - 2 * (torch.arange(401) == 0)[:, None, None])
    result = measure(call, key_by_key(call))
    assert float(result.own.max()) > 5 * float(CallNoise(call).largest_bound)
    assert not result.fails


def test_bounds_stay_near_the_published_noise() -> None:
    # arXiv 2410.02367: .0156 on average, .0511 in the worst layer, .019 for this kernel on normal data.
    call = call_of([(60, 76), (10, 119)], (4, 2), 64, torch.float16, "cpu")
    noise = CallNoise(call, "int8_qk")
    assert 0.005 < float(noise.ensemble.noise.mean()) < 0.019
    assert 0.008 < float(noise.bounds.median()) < 0.03
    assert CallNoise(call, "int8_qk").largest_bound < 0.08


def test_a_bound_is_that_of_its_own_cell() -> None:
    calm = call_of([(20, 40)], (4, 2), 64, torch.bfloat16, "cpu")
    one_head = calm.q.clone()
    one_head[:, 3] *= 6
    peak = CallNoise(replace(calm, q=one_head), "int8_qk")
    assert int(peak.ensemble.noise.amax(0).argmax()) == 3
    assert float(peak.bounds[:, 3].max()) > 2 * float(peak.bounds[:, 0].max())
    assert float(peak.bounds[:, 0].max()) == pytest.approx(float(CallNoise(calm, "int8_qk").bounds[:, 0].max()), rel=0.3)


@pytest.mark.parametrize("factor", [1.001, 0.999])
def test_a_thousandth_too_much_is_out_of_bounds_in_fp16_and_fp32(factor: float) -> None:
    for dtype in (torch.float16, torch.float32):
        call = call_of([(60, 76)], (4, 2), 64, dtype, "cpu")
        assert measure(call, (oracle(call) * factor).to(dtype)).fails


def test_a_long_call_is_compared_on_some_of_its_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.harness.localize.kernel_runs._MAX_SCORES", 1000)
    monkeypatch.setattr("assay.harness.localize.kernel_runs._MAX_ROWS", 40)
    call = call_of([(300, 28), (1, 5)], (4, 2), 16, torch.float16, "cpu")

    def result(wrong_from: int) -> CallResult:
        out = oracle(call)
        out[wrong_from:300] *= 1.5
        return measure(call, out.half())

    right = result(300)
    assert right.cells.rows is not None
    assert len(right.cells.rows) <= 40
    assert not right.fails
    assert result(299).fails  # the last query is always among them
    assert result(150).fails


def test_the_bound_of_a_cell_holds_for_the_members_of_another_seed() -> None:
    flagged = cells = 0
    for seed in range(12):
        call = call_of([(3, 2), (1, seed), (20, 9)], (4, 2), 64, DTYPES[seed % 3], "cpu", seed=seed)
        for noise in ("", "int8_kv", "fp8_pv"):
            found = CallNoise(call, noise)
            other = bounds.honest_outputs(call, FAMILIES[noise], members=16, seed=99)
            right = oracle(call)
            for out in other:
                error = relative_l1(deviation(out, right, found.cells))
                flagged, cells = flagged + int((error > found.bounds).sum()), cells + error.numel()
    assert (flagged, cells > 9000) == (0, True)


@pytest.mark.parametrize("size", ["small", pytest.param("full", marks=pytest.mark.slow)])
def test_no_matrix_has_more_cells_than_the_rate_is_shared_by(size: Size) -> None:
    calls = [case.make() for case in cases(size=size)]
    assert 0 < sum(len(cells_of(call).sequence) * call.q.shape[1] for call in calls) <= bounds.CELLS


def dropping(share: float, call: AttentionCall) -> Tensor:
    """Attends to the keys with the largest weights, leaving out others of this share at most."""
    outs = []
    for request in requests(call):
        logits = scores(request)
        weights = logits.softmax(-1)
        ordered, order = weights.sort(-1)
        lost = torch.zeros_like(weights, dtype=torch.bool).scatter(-1, order, ordered.cumsum(-1) <= share)
        outs.append(logits.masked_fill(lost, -math.inf).softmax(-1) @ request.v[request.kv_head])
    return torch.cat(outs, 1).transpose(0, 1).to(call.q.dtype)


@pytest.mark.slow
def test_a_kernel_may_leave_out_the_share_of_the_weights_that_it_declares() -> None:
    few = NoiseFamily(dropped=0.02).name
    assert (few, family(few)) == ("dropped:0.02", NoiseFamily(dropped=0.02))
    calls = [
        call_of([(40, 60), (9, 0)], (4, 2), 64, torch.float16, "cpu"),
        call_of([(1, 300), (1, 90)], (8, 2), 64, torch.bfloat16, "cpu"),
    ]
    for call in calls:
        assert not measure(call, rounded_oracle(call), few).fails
        assert not measure(call, dropping(0.02, call), few).fails
        assert measure(call, dropping(0.02, call)).fails
        assert measure(call, dropping(0.5, call), few).fails
        lse = torch.cat([(scores(request).logsumexp(-1) + math.log(0.985)).T for request in requests(call)]).float()
        assert not lse_errors(call, lse, family(few), None).wrong
        assert lse_errors(call, lse + math.log(0.985), family(few), None).wrong
    many = [call_of([(n, 60)], (4, 2), 64, torch.float32, "cpu", seed=n) for n in range(20, 32)]
    for share, ids in ((0.02, []), (0.0, ["unexplained"])):
        kernel = declares(noise=NoiseFamily(dropped=share))(partial(dropping, 0.02))
        assert [finding.id for finding in diagnose(run_and_repeat(kernel, many))] == ids
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError, match="expected one from 0 to below 1"):
            NoiseFamily(dropped=wrong)
