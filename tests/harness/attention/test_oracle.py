from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from assay.harness.attention import oracle as oracle_module
from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.oracle import oracle
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
    monkeypatch.setattr(oracle_module, "_FEW", 0)  # in groups, as large calls are
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
    "sinks": {"sinks": (0.5, -1.0, 2.0, 0.0)},
    "all": {"mask": Mask(window=4), "softcap": 2.0, "temperature": 3, "sinks": (0.5, -1.0, 2.0, 0.0)},
}


def written_out(call: AttentionCall, starts: tuple[int, int], i: int, head: int) -> Tensor:
    """Compute one output from the formulas, term by term. `starts`: the first row of its sequence in q, and in k and v."""
    (q0, k0), spec = starts, call.spec
    sequence = call.cu_seqlens_q.tolist().index(q0)
    position = call.prefixes[sequence] + i
    first = max(0, position - spec.mask.window + 1) if spec.mask.window else 0
    q = call.q[q0 + i, head]
    total, out = 0.0, torch.zeros(call.v.shape[2], dtype=torch.float64)
    for j in range(first, position + 1):
        score = call.scale * float(q @ call.k[k0 + j, head // 2])
        if spec.softcap:
            score = spec.softcap * math.tanh(score / spec.softcap)
        if spec.temperature and position > spec.temperature:
            score *= math.log(position) / math.log(spec.temperature)
        total += math.exp(score)
        out += math.exp(score) * call.v[k0 + j, head // 2]
    return out / (total + (math.exp(spec.sinks[head]) if spec.sinks else 0.0))


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("few", [0, 4], ids=["in groups", "one by one"])
def test_features_are_computed_as_their_formulas_say(feature: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle_module, "_FEW", few)
    call = call_of([(1, 9), (7, 0), (3, 4)], (4, 2), 8, torch.float64, "cpu").with_spec(**FEATURES[feature])
    starts = list(zip(call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist(), strict=True))
    rows = [
        torch.stack([written_out(call, start, i, head) for head in range(4)])
        for start, new in zip(starts, call.lens_q, strict=False)
        for i in range(new)
    ]
    torch.testing.assert_close(oracle(call), torch.stack(rows))
    assert call.spec.features == (tuple(FEATURES)[:4] if feature == "all" else (feature,))


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
