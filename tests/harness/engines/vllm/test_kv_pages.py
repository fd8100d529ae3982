"""K and V from pages whose order only a store knows; vLLM's own operator is in test_inside.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import KernelRefused
from assay.harness.engines.vllm.kv_pages import Pages, places_in

PAGE, DIM, HEADS, COUNT = 32, 16, 2, 7


def transposed(k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store K as [dim, page] and V in tiles of 4 tokens, as an operator might, in the dtype of the page."""
    as_stored = torch.float8_e4m3fn if keys.dtype is torch.uint8 else keys.dtype
    k, v = (x.to(as_stored).view(keys.dtype) for x in (k, v))
    keys.view(-1).copy_(k[:, 0].T.reshape(-1))
    values.view(-1).copy_(v[:, 0].view(PAGE // 4, 4, DIM).transpose(1, 2).reshape(-1))


@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_k_and_v_come_back_bit_by_bit_from_pages_in_any_order(dtype: torch.dtype, stored: torch.dtype | None) -> None:
    places = places_in(transposed, PAGE, DIM, dtype, stored)
    cache = torch.full((COUNT, HEADS, PAGE, 2 * DIM), 255, dtype=torch.uint8).to(torch.uint8 if stored else dtype)
    tokens = 2 * PAGE
    k, v = torch.randn(2, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    table = torch.tensor([[3, 1], [5, 6]], dtype=torch.int32)
    halves = cache.view(COUNT, HEADS, 2 * PAGE, DIM).chunk(2, dim=2)
    for page, start in ((3, 0), (1, PAGE)):
        for head in range(HEADS):
            at = slice(start, start + PAGE)
            part = [half[page : page + 1, head : head + 1] for half in halves]
            transposed(k[at, head : head + 1], v[at, head : head + 1], *part)
    pages = Pages(cache, places, stored, (2.0, 0.5) if stored else (1.0, 1.0))
    got_k, got_v, kept = pages.gathered(table[:1], [5], [40], dtype)
    seen = slice(5, 45)
    if stored is None:
        assert kept is None
        assert torch.equal(got_k, k[seen])
        assert torch.equal(got_v, v[seen])
    else:
        assert kept is not None
        assert torch.equal(kept.k.view(torch.uint8), k[seen].to(stored).view(torch.uint8))
        assert torch.equal(got_k, (k[seen].to(stored).float() * 2.0).to(dtype))
        assert torch.equal(got_v, (v[seen].to(stored).float() * 0.5).to(dtype))


def test_k_and_v_lie_side_by_side_in_any_strides() -> None:
    k, v = torch.randn(2, COUNT * PAGE, HEADS, DIM)
    by_token = torch.cat([k, v], dim=-1).view(COUNT, PAGE, HEADS, 2 * DIM)
    pages = Pages(by_token.transpose(1, 2), None)
    table = torch.tensor([[4, 0], [2, 6]])
    got_k, got_v, kept = pages.gathered(table, [0, 30], [33, 4], torch.float32)
    slots = [*range(4 * PAGE, 5 * PAGE), 0, 2 * PAGE + 30, 2 * PAGE + 31, 6 * PAGE, 6 * PAGE + 1]
    assert kept is None
    assert torch.equal(got_k, k[slots])
    assert torch.equal(got_v, v[slots])


def test_a_page_that_drops_numbers_is_refused() -> None:
    def lossy(k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> None:
        transposed(k, v, keys, values)
        keys.view(-1)[3] = keys.view(-1)[4]

    with pytest.raises(KernelRefused, match="do not hold K and V as given"):
        places_in(lossy, PAGE, DIM, torch.float32, None)
