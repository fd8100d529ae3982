"""The cells of two tensors: what differs, where it is first, and where it is worst."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assay.harness.ingest import tensor_diff as cells
from assay.harness.ingest.tensor_diff import Cells, _default_bound, compare_cells
from assay.harness.ingest.tensor_layout import layout_of

TOKENS, HEADS, DIM = 40, 4, 16


def _pair(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    a = torch.randn(TOKENS, HEADS, DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    return a, a.clone()


def _found(a: Tensor, b: Tensor, bound: float | None = 0.03, axes: str = "thd") -> Cells:
    return compare_cells(a, b, layout_of(a.shape, axes), bound)


@pytest.fixture(params=[1 << 18, 200])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block, and blocks of three tokens of a head."""
    monkeypatch.setattr(cells, "_BLOCK", request.param)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize(
    ("change", "first", "count"),
    [
        (lambda x: x[:, 2].mul_(1.2), (0, 2), TOKENS),
        (lambda x: x[17, 3].mul_(1.2), (17, 3), 1),
        (lambda x: x.mul_(1.2), (0, 0), TOKENS * HEADS),
        (lambda x: x[9, 1, 5].fill_(math.nan), (9, 1), 1),
        (lambda x: x.copy_(x[[*range(5), 6, 5, *range(7, TOKENS)]]), (5, 0), 2 * HEADS),
    ],
)
def test_the_first_cell_is_named(change: Callable[[Tensor], Tensor], first: tuple[int, int], count: int) -> None:
    a, b = _pair()
    change(b)
    found = _found(a, b)
    assert found.first is not None
    assert found.first.at == first
    assert found.differing == count
    assert found.total == TOKENS * HEADS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_errors_are_those_of_float64(dtype: torch.dtype) -> None:
    a, b = _pair(dtype)
    b += (0.1 * torch.randn(b.shape)).to(dtype)
    gap, size = (b.double() - a.double()).abs(), a.double().abs()
    right = torch.maximum(gap.sum(-1) / size.sum(-1), gap.amax(-1) / size.amax(-1))
    found = _found(a, b)
    assert found.worst is not None
    assert found.worst.error == pytest.approx(float(right.max()), rel=1e-3)
    at = found.worst.at
    assert at == divmod(int(right.argmax()), HEADS)
    assert found.by_head == pytest.approx(right.max(0).values.numpy(), rel=1e-3)
    assert found.differing == int((right > 0.03).sum())


def test_exact_sees_one_bit_and_the_sign_of_zero() -> None:
    a, b = _pair()
    a[3, 1, 2] = b[3, 1, 2] = 0.0
    b[3, 1, 2] = -0.0
    assert _found(a, b).differing == 0
    found = _found(a, b, None)
    assert found.differing == 1
    assert found.first is not None
    assert found.first.at == (3, 1)


def test_the_same_nan_on_both_sides_is_no_difference() -> None:
    a, b = _pair()
    a[3, 1, 2] = b[3, 1, 2] = math.nan
    a[4, 1, 2] = b[4, 1, 2] = math.inf
    b[20, 0] *= 1.5
    found = _found(a, b)
    assert found.differing == 1
    a[3, 1, 3] += 1.0  # beside a NaN, another element differs
    assert _found(a, b).differing == 2


def test_a_nan_is_worse_than_an_infinite_ratio_and_zeros_on_both_sides_are_equal() -> None:
    a, b = _pair()
    assert _found(a, b, None).worst is None
    a[5] = b[5] = 0
    b[5, 2] = 1e-3
    found = _found(a, b)
    assert (found.differing, found.worst and found.worst.error) == (1, math.inf)
    b[31, 3, 0] = math.nan
    found = _found(a, b)
    assert found.worst is not None
    assert found.worst.at == (31, 3)
    assert math.isnan(found.worst.error)
    assert math.isnan(found.by_head[3])


def test_double_precision_and_integers_are_compared_in_float64() -> None:
    a, _ = _pair(torch.float64)
    a = a + 1e-8 * torch.randn(a.shape, dtype=torch.float64)
    assert _found(a, a.float(), 1e-9).differing == TOKENS * HEADS
    assert _found(torch.tensor([7, 5]), torch.tensor([7, 6]), _default_bound(torch.int64), "positions").differing == 1
    strided = torch.arange(12).view(3, 4).t().contiguous().t()
    assert _found(strided, strided.contiguous(), 0.0, "positions").differing == 0
