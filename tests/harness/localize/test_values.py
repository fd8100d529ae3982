from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from assay.harness.localize.cells import all_finite, same_values

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], True),
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.5], False),
        ([NAN, 2.0], [NAN, 2.0], True),
        ([NAN, 2.0], [1.0, 2.0], False),
        ([0.0, INF], [-0.0, INF], True),
        ([INF], [-INF], False),
        ([], [], True),
        ([1.0], [1.0, 1.0], False),
    ],
)
def test_the_same_values(dtype: torch.dtype, a: list[float], b: list[float], same: bool) -> None:
    assert same_values(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)) is same


@pytest.mark.parametrize("place", [0, 4_999, 9_999])
def test_one_changed_element_is_seen(place: int) -> None:
    for dtype in (torch.float16, torch.int32):
        values = torch.arange(10_000).to(dtype)
        changed = values.clone()
        changed[place] += 1000
        assert not same_values(values, changed)


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        (torch.full((9,), 1e308, dtype=torch.float64), True),  # their sum is not
        (torch.full((9,), 65_504.0, dtype=torch.float16), True),
        (torch.tensor([1.0, NAN]), False),
        (torch.tensor([INF, -INF]), False),
        (torch.zeros(0), True),
    ],
)
def test_all_finite(values: Tensor, finite: bool) -> None:
    assert all_finite(values) is finite
