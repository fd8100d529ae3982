from __future__ import annotations

import pytest
import torch

from assay.harness.attention import paging
from assay.harness.attention.matrix import DTYPES
from assay.harness.attention.sample_calls import call_of


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("page", [1, 16, 64])
def test_a_pool_holds_the_keys_and_values_of_a_call_in_shuffled_pages(page: int, dtype: torch.dtype) -> None:
    call = call_of([(20, 0), (5, 77), (1, 64), (1, 0)], (4, 2), 64, dtype, "cpu")
    pool = paging.paged(call, page)
    for numbers, given in ((pool.k, call.k), (pool.v, call.v)):
        assert torch.equal(numbers.flatten(0, 1)[pool.slots], given)
    starts = torch.cat(pool.pages)
    assert len(set(starts.tolist())) == len(starts)
    assert bool((starts.diff() < 0).any()), "no sequence has its pages in order"
    assert [len(own) for own in pool.pages] == [-(-length // page) for length in call.lens_k]


def test_slots_are_those_of_the_rows_that_are_asked_for() -> None:
    table = torch.tensor([[5, 3, 9], [0, 7, 2]])
    assert paging.slots_of(table, [1, 0], [2, 3]).tolist() == [0, 7, 5, 3, 9]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_belongs_to_no_sequence_is_nan(dtype: torch.dtype) -> None:
    call = call_of([(3, 30), (1, 5)], (4, 2), 64, dtype, "cpu")
    pool = paging.paged(call, 16)
    for numbers, given in ((pool.k, call.k), (pool.v, call.v)):
        assert torch.equal(numbers.flatten(0, 1)[pool.slots], given)
        assert int(numbers.isnan().sum()) == numbers.numel() - given.numel() > 0
