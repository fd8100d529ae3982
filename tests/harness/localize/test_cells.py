from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from assay.harness.attention.sample_calls import call_of
from assay.harness.localize.cells import all_finite, cells_of, deviation, same_values
from assay.harness.stats.error_sums import relative_l1

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("lens", "sequence", "position", "rows"),
    [
        ([(20, 5), (1, 9)], (0, 0, 0, 1), (0, 1, 2, 0), [1, 15, 4, 1]),
        ([(300, 0), (256, 0)], (0,) * 5 + (1,) * 4, (0, 1, 2, 3, 4, 0, 1, 2, 3), [1, 15, 48, 192, 44, 1, 15, 48, 192]),
    ],
)
def test_cells_are_sequence_by_bucket_of_query_position(
    lens: list[tuple[int, int]], sequence: tuple[int, ...], position: tuple[int, ...], rows: list[int]
) -> None:
    cells = cells_of(call_of(lens, (2, 1), 8, torch.float32, "cpu"))
    assert (cells.sequence, cells.position, cells.of_row.bincount().tolist()) == (sequence, position, rows)


def test_a_wrong_head_of_a_wrong_query_affects_only_its_own_cell() -> None:
    call = call_of([(20, 5), (1, 9)], (2, 1), 8, torch.float32, "cpu")
    truth = torch.ones(21, 2, 8, dtype=torch.float64)
    out = truth.clone()
    out[17, 1] = 3.0
    found = relative_l1(deviation(out, truth, cells_of(call)))
    expected = torch.zeros(4, 2, dtype=torch.float64)
    expected[2, 1] = 0.5  # 2 off on one of four queries
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.5], False),
        ([NAN, 2.0], [NAN, 2.0], True),
        ([NAN, 2.0], [1.0, 2.0], False),
        ([0.0, INF], [-0.0, INF], True),
        ([], [], True),
        ([1.0], [1.0, 1.0], False),
    ],
)
def test_the_same_values(dtype: torch.dtype, a: list[float], b: list[float], same: bool) -> None:
    assert same_values(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)) is same


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        (torch.full((9,), 1e308, dtype=torch.float64), True),  # their sum is not
        (torch.tensor([1.0, NAN]), False),
        (torch.tensor([INF, -INF]), False),
    ],
)
def test_all_finite(values: Tensor, finite: bool) -> None:
    assert all_finite(values) is finite
