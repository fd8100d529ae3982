from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from assay.harness.attention import paging
from assay.harness.attention.matrix import DTYPES, PAGES
from assay.harness.attention.sample_calls import call_of


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [p for p in PAGES if p])
def test_pages_hold_the_same_as_the_packed_call(page: int, dtype: torch.dtype) -> None:
    packed = call_of([(20, 0), (5, 77), (1, 64), (1, 0)], (4, 2), 64, dtype, "cpu")
    paged = paging.through_pages(packed, page)
    for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"):
        assert torch.equal(getattr(paged, name), getattr(packed, name)), name
    assert (paged.scale, paged.phase, paged.layer) == (packed.scale, packed.phase, packed.layer)


def test_pages_are_gathered_from_a_shuffled_block_table(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = call_of([(3, 50), (4, 20)], (4, 2), 64, torch.float16, "cpu")
    tables: list[Tensor] = []
    real = paging.slots_of

    def spied(table: Tensor, requests: Sequence[int], lens: Sequence[int]) -> Tensor:
        tables.append(table)
        return real(table, requests, lens)

    monkeypatch.setattr(paging, "slots_of", spied)
    paging.through_pages(packed, 4)
    [table] = tables
    starts = table[:, : min(packed.lens_k) : 4]
    assert bool((starts.diff(dim=1) < 0).any())  # pages in shuffled order
    assert bool((starts % 4 == 0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_belongs_to_no_sequence_is_nan(dtype: torch.dtype) -> None:
    call = call_of([(3, 30), (1, 5)], (4, 2), 64, dtype, "cpu")
    pool = paging.paged(call, 16)
    for numbers, given in ((pool.k, call.k), (pool.v, call.v)):
        assert torch.equal(numbers.flatten(0, 1)[pool.slots], given)
        assert int(numbers.isnan().sum()) == numbers.numel() - given.numel() > 0
