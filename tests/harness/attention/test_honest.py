from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from assay.harness.attention import oracle as oracle_module
from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.declaration import Declaration, declares
from assay.harness.attention.honest import _WAYS, _Draw, _rounded_to, added_key_by_key, here, honest_outputs, sample_rows
from assay.harness.attention.matrix import cases
from assay.harness.attention.matrix_features import _stored
from assay.harness.attention.noise import FAMILIES, FORMATS, NoiseFamily, Quantised
from assay.harness.attention.oracle import log_sum_exp, oracle
from assay.harness.attention.sample_calls import call_of
from assay.harness.checks.check import assert_correct

CALL = call_of([(60, 76), (1, 33), (10, 119)], (4, 2), 64, torch.float16, "cpu")


def noise(call: AttentionCall, family: NoiseFamily, members: int = 16) -> torch.Tensor:
    """Relative L1 of each member over the whole call."""
    right = oracle(call)
    return (honest_outputs(call, family, members=members) - right).abs().sum((1, 2, 3)) / right.abs().sum()


def test_the_same_seed_gives_the_same_members_and_another_seed_others() -> None:
    family = FAMILIES["int8_qk"]
    assert torch.equal(honest_outputs(CALL, family), honest_outputs(CALL, family))
    assert not torch.equal(honest_outputs(CALL, family), honest_outputs(CALL, family, seed=1))


@pytest.mark.parametrize("name", FAMILIES)
def test_members_are_near_the_truth_and_differ(name: str) -> None:
    errors = noise(CALL, FAMILIES[name])
    assert float(errors.min()) > 1e-4
    assert float(errors.max()) < 0.25
    assert float(errors.max()) < 1.3 * float(errors.min())
    assert len(errors.unique()) == len(errors)


def test_parts_that_are_stored_before_they_are_merged_cost_what_a_kernel_pays_that_does_so() -> None:
    """As SGLang's flashinfer does behind a cached prefix: outputs on cached and on new keys, in 16 bits, by their log-sum-exps."""
    call = call_of([(64, 80)], (4, 2), 64, torch.bfloat16, "cpu")
    wide = replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double())
    old = replace(wide, k=wide.k[:80], v=wide.v[:80], cu_seqlens_k=torch.tensor([0, 80], dtype=torch.int32))
    parts = [old.with_spec(mask=Mask(causal=False)), replace(wide, k=wide.k[80:], v=wide.v[80:], cu_seqlens_k=call.cu_seqlens_q)]
    weights = torch.stack([log_sum_exp(part) for part in parts]).softmax(0)[..., None]
    merged = sum(weight * oracle(part).bfloat16() for weight, part in zip(weights, parts, strict=True)).bfloat16()
    right = oracle(call)
    once, both = (float((out - right).abs().sum() / right.abs().sum()) for out in (right.bfloat16(), merged))
    exact, stored = (float(noise(call, FAMILIES[name]).mean()) for name in ("", "merged_prefix"))
    assert stored == pytest.approx((exact**2 + both**2 - once**2) ** 0.5, rel=0.05)
    assert stored > 1.1 * exact
    fresh = call_of([(64, 0)], (4, 2), 64, torch.bfloat16, "cpu")
    alone, merged_alone = (float(noise(fresh, FAMILIES[name]).mean()) for name in ("", "merged_prefix"))
    assert merged_alone == pytest.approx(alone, rel=0.02)


ASKED = {
    "plain": CALL,
    "window": CALL.with_spec(mask=Mask(window=20)),
    "sinks": CALL.with_spec(sinks=(0.5, -1.0, 2.0, 0.0)),
    "temperature": CALL.with_spec(temperature=8),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", ["", "int8_qk"])
def test_members_compute_what_is_asked_for_and_its_log_sum_exp(asked: str, name: str) -> None:
    call, wide = ASKED[asked], replace(ASKED[asked], q=CALL.q.float(), k=CALL.k.float(), v=CALL.v.float())
    assert 1e-5 < float(noise(call, FAMILIES[name]).mean()) < 0.03
    off = honest_outputs(call, FAMILIES[name], lse=True) - log_sum_exp(call)[..., None]
    assert off.shape == (16, 71, 4, 1)
    assert 1e-7 < float(off.abs().mean()) < (0.03 if name else 1e-3)
    exact = honest_outputs(wide, FAMILIES[""], lse=True) - log_sum_exp(wide)[..., None]
    assert 1e-8 < float(exact.abs().mean()) < 2e-6
    assert float((added_key_by_key(wide) - oracle(wide)).abs().max()) < 1e-5


@declares(features=("softcap",))
def _caps_by_sigmoid(call: AttentionCall) -> torch.Tensor:
    """Cap scores as the Triton kernels of SGLang and vLLM do: tanh(x) as 2 sigmoid(2x) - 1, in float32. One sequence."""
    q = call.q.transpose(0, 1)
    k, v = (x.transpose(0, 1).repeat_interleave(call.heads.group, 0) for x in (call.k, call.v))
    scores = call.scale * q @ k.mT / call.spec.softcap
    scores = call.spec.softcap * (2 * torch.sigmoid(2 * scores) - 1)
    seen = call.spec.mask.visible(torch.arange(q.shape[1]), q.shape[1], k.shape[1])
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0])
@pytest.mark.parametrize("lens", [(6, 0), (70, 0), (64, 512)])
def test_a_cap_by_way_of_a_sigmoid_is_within_bounds_in_float32(lens: tuple[int, int], cap: float) -> None:
    call = call_of([lens], (4, 2), 64, torch.float32, "cpu").with_spec(softcap=cap)
    assert_correct(_caps_by_sigmoid, call)


@pytest.mark.parametrize("name", ["", "int8_qk", "fp8_pv"])
def test_some_rows_have_the_noise_that_all_rows_have_there(name: str) -> None:
    family, rows, right = FAMILIES[name], torch.arange(20, 40), oracle(CALL)[20:40]
    few = (honest_outputs(CALL, family, rows) - right).abs().sum((1, 2, 3)).mean()
    many = (honest_outputs(CALL, family)[:, 20:40] - right).abs().sum((1, 2, 3)).mean()
    assert float(few) == pytest.approx(float(many), rel=0.1)


def test_what_is_held_at_a_time_does_not_change_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    many = float(noise(CALL, FAMILIES["int8_qk"]).mean())
    monkeypatch.setattr(oracle_module, "NUMBERS_AT_ONCE", 20_000)
    assert float(noise(CALL, FAMILIES["int8_qk"]).mean()) == pytest.approx(many, rel=0.05)


def test_noise_is_that_of_the_rounding_that_is_declared() -> None:
    exact, int8, e4m3, e5m2 = (float(noise(CALL, FAMILIES[name]).mean()) for name in ("", "int8_kv", "fp8_kv", "fp8_e5m2_kv"))
    assert exact < int8 / 10
    # Each bit of mantissa halves the noise.
    assert e5m2 / e4m3 == pytest.approx(2, rel=0.1)
    # The published average over layers of this quantisation: arXiv 2410.02367, table 4.
    assert 0.005 < float(noise(CALL, FAMILIES["int8_qk"]).mean()) < 0.019


def test_roundings_of_integers_are_uniform_and_those_of_two_elements_independent() -> None:
    call = call_of([(4, 0)], (1, 1), 64, torch.float16, "cpu")
    draw = _Draw(
        torch.Generator().manual_seed(3), FAMILIES["int8_kv"], _WAYS[0], call.q.dtype, torch.float32, {}, call.k, 1.0, False, False
    )  # fmt: skip
    members = 20_000
    x = torch.tensor([[0.3, -7.0, 2.6], [0.3, 100.9, 0.0]]).expand(members, 2, 3)
    errors = (draw.quantised(x, Quantised("int8", "token")) - x).flatten(1).double()
    assert float(errors.abs().max()) <= 0.5 + 1e-5
    covariance = errors.T @ errors / members
    assert torch.allclose(covariance, torch.eye(6, dtype=torch.float64) / 12, atol=5 / 12 / math.sqrt(members))


def test_what_is_cast_to_the_dtype_of_k_and_v_is_cast_to_fewer_bits_beside_a_cache_of_these_alone() -> None:
    exact, beside = FAMILIES[""], FAMILIES["fp8_qp"]
    assert torch.equal(honest_outputs(CALL, beside), honest_outputs(CALL, exact))
    stored = _stored("e4m3", "tensor", CALL)
    assert float(noise(stored, beside).mean()) > 10 * float(noise(stored, exact).mean())


def test_a_finer_scale_costs_less() -> None:
    errors = [float(noise(CALL, NoiseFamily(k=Quantised("int8", per))).mean()) for per in ("tensor", "head", "block", "token")]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1.2 * errors[-1]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("sinks", [(), (0.5, 1.0, 1.5, 2.0)])
def test_sequences_without_keys_have_at_most_the_rounding_of_their_sinks(name: str, sinks: tuple[float, ...]) -> None:
    call, rows = call_of([(5, 3), (2, -2)], (4, 2), 64, torch.float16, "cpu").with_spec(sinks=sinks), torch.tensor([5, 6])
    assert not (honest_outputs(call, FAMILIES[name], rows) - oracle(call, rows)).nan_to_num(nan=0.0).any()
    off = honest_outputs(call, FAMILIES[name], rows, lse=True)[..., 0] - log_sum_exp(call, rows)
    assert (
        float(off.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max()) < 1e-2
    )  # sums in float16; without sinks it would be .5 to 2


def test_smoothing_removes_what_all_keys_share() -> None:
    common = torch.linspace(-6, 6, 64).half()
    call = replace(CALL, k=CALL.k + common)
    plain = NoiseFamily(k=Quantised("int8", "block"))
    smooth = NoiseFamily(k=Quantised("int8", "block", smooth=True))
    assert float(noise(call, plain).mean()) > 2 * float(noise(call, smooth).mean())


def test_tf32_is_of_the_exact_family_only_where_the_device_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    single = replace(CALL, q=CALL.q.float(), k=CALL.k.float(), v=CALL.v.float())
    assert here(FAMILIES[""], single) == FAMILIES[""]
    assert float(noise(single, FAMILIES["tf32"]).mean()) > 100 * float(noise(single, FAMILIES[""]).mean())
    assert torch.equal(honest_outputs(CALL, FAMILIES["tf32"]), honest_outputs(CALL, FAMILIES[""]))  # fp16 fits into TF32


def test_sampled_rows_are_the_ends_the_borders_of_blocks_and_others() -> None:
    call = call_of([(500, 30), (1, 7), (300, 0)], (1, 1), 8, torch.float32, "cpu")
    rows = sample_rows(call, 120)
    assert torch.equal(rows, rows.unique())
    assert {0, 499, 500, 501, 800} <= set(rows.tolist())
    assert len(rows) <= 120
    borders = set(range(128, 500, 128)) | {at - 30 for at in range(128, 530, 128)}
    assert len(borders & set(rows.tolist())) >= 3
    assert torch.equal(sample_rows(call, 801), torch.arange(801))


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2), ("fp16", torch.float16)])
def test_a_format_rounds_as_pytorch_does(name: str, dtype: torch.dtype) -> None:
    format = FORMATS[name]
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(50_000, generator=draw) * 2.0 ** torch.randint(-30, 20, (50_000,), generator=draw)
    step = 2.0 ** (format.least - (format.mantissa or 0))  # half-way cases, of normal numbers and below them
    ties = torch.arange(-40, 41) * step / 2
    x = torch.cat([x, ties, torch.tensor([0.0, 1e30, -1e30, format.largest, 1.0625, 1.1875])])
    expected = x.clamp(-format.largest, format.largest).to(dtype).float()
    assert torch.equal(_rounded_to(x, format), expected)
    assert torch.equal(_rounded_to(x.double(), format), expected.double())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["int8_qk", "int8_kv", "fp8_kv", "fp8_qkv", "int8_qk_fp8_pv"])
def test_on_the_grid_a_quantisation_costs_nothing(name: str) -> None:
    noisy = FAMILIES[name]
    made = cases(declared=Declaration(noise=name), head_dims=[64])
    some = [case.make() for case in made if case.condition["data"].startswith("on the grid")]
    assert len(some) == (20 if noisy.p is None else 10)
    for call in some[::5]:
        for tensor in (call.q, call.k, call.v):
            assert set(tensor.unique().tolist()) == {-1.0, 0.0, 1.0}
            assert 0.7 < float((tensor == 0).double().mean()) < 0.9
        assert torch.equal(honest_outputs(call, noisy), honest_outputs(call, FAMILIES[""]))
        for format in (format for format in FORMATS.values() if format.scaled):
            for x in (call.q.float(), call.k.float(), call.v.float()):
                for axes in ((0, 1, 2), (0, 2), (2,)):
                    top = x.abs().amax(axes, keepdim=True)
                    scale = torch.where(top == 0, 1.0, top / format.largest)
                    stored = (x / scale).round() if format.mantissa is None else _rounded_to(x / scale, format)
                    torch.testing.assert_close(stored * scale, x, rtol=1e-6, atol=0)
        for start, stop in pairwise(call.cu_seqlens_k.tolist()):
            assert not call.k[start:stop].sum(0).any()
    assert float((honest_outputs(CALL, noisy) - oracle(CALL)).abs().max()) > 1e-2
