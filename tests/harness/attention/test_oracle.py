from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from assay.harness.attention.oracle import oracle, right_aligned
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
        mask = right_aligned(new, new + prefix, q.device)
        truth = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale, enable_gqa=True)
        torch.testing.assert_close(out[start_q : start_q + new], truth.transpose(0, 1))
        start_q, start_k = start_q + new, start_k + new + prefix


@pytest.mark.parametrize("lens", [[(5, 0)], [(1, 9), (7, 0), (3, 4)]])
def test_blocks_of_queries_give_the_same_result(lens: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(lens, (4, 2), 8, torch.float64, "cpu")
    whole = oracle(call)
    monkeypatch.setattr("assay.harness.attention.oracle.SCORES_BYTES", 8 * 4 * 7 * 3)
    torch.testing.assert_close(oracle(call), whole, rtol=1e-13, atol=1e-13)


def test_right_aligned_mask_lets_the_last_query_see_everything() -> None:
    mask = right_aligned(2, 5, torch.device("cpu"))
    assert mask.tolist() == [[True, True, True, True, False], [True] * 5]


def test_lens_and_prefixes() -> None:
    call = call_of([(5, 3), (1, 9)], (2, 1), 8, torch.float32, "cpu")
    assert (call.lens_q, call.lens_k, call.prefixes) == ([5, 1], [8, 10], [3, 9])
