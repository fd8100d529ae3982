from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from assay.harness.attention import oracle as oracle_module
from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.oracle import attend, log_sum_exp, oracle, requests
from assay.harness.attention.sample_calls import call_of


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("lens", [[(5, 0)], [(5, 3)], [(1, 9), (7, 0), (3, 4)]])
def test_agrees_with_sdpa_on_each_sequence(lens: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    call = call_of(lens, heads, 8, torch.float64, "cpu")
    out = oracle(call)
    start_q = start_k = 0
    for new, prefix in lens:
        q = call.q[start_q : start_q + new].transpose(0, 1)
        k = call.k[start_k : start_k + new + prefix].transpose(0, 1)
        v = call.v[start_k : start_k + new + prefix].transpose(0, 1)
        mask = Mask().visible(torch.arange(new, device=q.device), new, new + prefix)
        truth = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale, enable_gqa=True)
        torch.testing.assert_close(out[start_q : start_q + new], truth.transpose(0, 1))
        start_q, start_k = start_q + new, start_k + new + prefix


@pytest.mark.parametrize("lens", [[(5, 0)], [(1, 9), (7, 0), (3, 4)]])
def test_blocks_of_queries_give_the_same_result(lens: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(lens, (4, 2), 8, torch.float64, "cpu")
    whole = oracle(call)
    monkeypatch.setattr(oracle_module, "NUMBERS_AT_ONCE", 4 * 7 * 3)
    torch.testing.assert_close(oracle(call), whole, rtol=1e-13, atol=1e-13)


def test_a_mask_tells_each_query_its_keys_in_batches_too() -> None:
    rows, lens_q, lens_k = torch.tensor([[0, 1], [2, 0]]), torch.tensor([[2], [3]]), torch.tensor([[5], [3]])
    seen = Mask().visible(rows, lens_q, lens_k, torch.arange(5))
    assert seen.sum(-1).tolist() == [[4, 5], [3, 1]]
    everything = Mask(causal=False)
    assert everything.visible(rows, lens_q, lens_k, torch.arange(5)).sum(-1).tolist() == [[5, 5], [3, 3]]
    assert Mask().span(1, 2, 5) == (0, 5)


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"mask": Mask(window=3)},
    "softcap": {"softcap": 0.7},
    "temperature": {"temperature": 4},
    "sinks": {"sinks": (0.3, -1.1, 2.2, 0.0)},
    "padding": {"padded_rows": 2},
    "all": {"mask": Mask(window=4), "softcap": 2.0, "temperature": 3, "sinks": (0.3, -1.1, 2.2, 0.0), "padded_rows": 3},
}  # fmt: skip


def asking(call: AttentionCall, **spec: Any) -> AttentionCall:
    """Ask for fields of the spec."""
    return replace(call.with_spec(**spec), q=torch.cat([call.q, call.q[: spec.get("padded_rows", 0)]]))


def written_out(call: AttentionCall, b: int, i: int, head: int) -> tuple[Tensor, float]:
    """Compute one output and its log-sum-exp from the formulas, term by term: of query i of sequence b."""
    spec, k0 = call.spec, int(call.cu_seqlens_k[b])
    q = call.q[int(call.cu_seqlens_q[b]) + i, head]
    position = call.prefixes[b] + i
    total, out = 0.0, torch.zeros(call.v.shape[2], dtype=torch.float64)
    for j in range(max(0, position + 1 - spec.mask.window) if spec.mask.window else 0, position + 1):
        score = call.scale * float(q @ call.k[k0 + j, head // 2])
        if spec.softcap:
            score = spec.softcap * math.tanh(score / spec.softcap)
        if spec.temperature and position > spec.temperature:
            score *= math.log(position) / math.log(spec.temperature)
        total += math.exp(score)
        out += math.exp(score) * call.v[k0 + j, head // 2]
    total += math.exp(spec.sinks[head]) if spec.sinks else 0.0
    return out / total, math.log(total)


@pytest.mark.parametrize("feature", FEATURES)
def test_features_are_computed_as_their_formulas_say(feature: str) -> None:
    call = asking(call_of([(1, 9), (7, 0), (3, 4)], (4, 2), 8, torch.float64, "cpu"), **FEATURES[feature])
    rows = [[written_out(call, b, i, head) for head in range(4)] for b, new in enumerate(call.lens_q) for i in range(new)]
    outs = torch.stack([torch.stack([out for out, _ in row]) for row in rows])
    torch.testing.assert_close(oracle(call), outs)
    torch.testing.assert_close(torch.cat([attend(one) for one in requests(call)], dim=1).transpose(0, 1), outs)
    torch.testing.assert_close(log_sum_exp(call), torch.tensor([[lse for _, lse in row] for row in rows]).double())
    some = torch.tensor([0, 2, 3, 8, 10])
    torch.testing.assert_close(oracle(call, some), oracle(call)[some])
    torch.testing.assert_close(log_sum_exp(call, some), log_sum_exp(call)[some])
    asked = ("window", "softcap", "temperature", "sinks", "padding")
    assert call.features == (asked if feature == "all" else (feature,))


def test_queries_of_cross_attention_see_all_keys_however_few() -> None:
    call = call_of([(5, -3), (2, 7), (4, -3)], (4, 2), 8, torch.float64, "cpu").with_spec(mask=Mask(causal=False))
    outs = []
    for (q0, q1), (k0, k1) in zip(pairwise(call.cu_seqlens_q.tolist()), pairwise(call.cu_seqlens_k.tolist()), strict=True):
        q, k, v = (t.transpose(0, 1) for t in (call.q[q0:q1], call.k[k0:k1], call.v[k0:k1]))
        outs.append(scaled_dot_product_attention(q, k, v, scale=call.scale, enable_gqa=True).transpose(0, 1))
    torch.testing.assert_close(oracle(call), torch.cat(outs))
    assert call.features == ("not_causal",)
    more = call_of([(5, 3)], (4, 2), 8, torch.float64, "cpu").with_spec(mask=Mask(causal=False))
    assert more.features == ()  # as the contract always was


def test_a_call_of_some_heads_keeps_their_sinks() -> None:
    call = asking(call_of([(1, 9), (7, 0), (3, 4)], (4, 2), 8, torch.float64, "cpu"), **FEATURES["all"])
    torch.testing.assert_close(oracle(call.of_heads([3, 2], [1])), oracle(call)[:, [3, 2]])
    for same in (call.clone(), call.to("cpu")):
        assert same.spec == call.spec
        assert same.tensors.keys() == call.tensors.keys()
        assert all(torch.equal(tensor, call.tensors[name]) for name, tensor in same.tensors.items())


def test_a_call_asks_for_nothing_that_has_no_meaning() -> None:
    for wrong in ({"softcap": -1.0}, {"temperature": 1}, {"temperature": -2}):
        with pytest.raises(ValueError, match="expected 0 for none"):
            call_of([(3, 2)], (2, 1), 8, torch.float64, "cpu").with_spec(**wrong)
    for mask in ({"window": -1}, {"window": 4, "causal": False}):
        with pytest.raises(ValueError, match="expected a number of keys, 0 for all of them"):
            Mask(**mask)  # type: ignore[arg-type]


def test_right_aligned_mask_lets_the_last_query_see_everything() -> None:
    mask = Mask().visible(torch.arange(2, device=torch.device("cpu")), 2, 5)
    assert mask.tolist() == [[True, True, True, True, False], [True] * 5]


def test_lens_and_prefixes() -> None:
    call = call_of([(5, 3), (1, 9)], (2, 1), 8, torch.float32, "cpu")
    assert (call.lens_q, call.lens_k, call.prefixes) == ([5, 1], [8, 10], [3, 9])
