from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from assay.harness.attention import oracle as oracle_module
from assay.harness.attention.call import Mask
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


def test_a_feature_that_is_not_computed_is_no_silent_answer() -> None:
    call = call_of([(3, 2)], (2, 1), 8, torch.float64, "cpu").with_spec(features=("soft cap",))
    with pytest.raises(ValueError, match="does not compute soft cap"):
        oracle(call)


def test_right_aligned_mask_lets_the_last_query_see_everything() -> None:
    mask = Mask().visible(torch.arange(2, device=torch.device("cpu")), 2, 5)
    assert mask.tolist() == [[True, True, True, True, False], [True] * 5]


def test_lens_and_prefixes() -> None:
    call = call_of([(5, 3), (1, 9)], (2, 1), 8, torch.float32, "cpu")
    assert (call.lens_q, call.lens_k, call.prefixes) == ([5, 1], [8, 10], [3, 9])
