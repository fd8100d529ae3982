from __future__ import annotations

import math

import pytest
import torch

from assay.harness.compare.tensors import errors


def test_known_figures() -> None:
    found = errors(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64))
    assert found.relative_l1 == pytest.approx(0.2)
    assert found.rmse == pytest.approx(1.0)
    assert found.max_abs == 2.0
    assert found.cosine == pytest.approx(38 / math.sqrt(50 * 30))
    assert (found.nonfinite_share, found.elements) == (0.0, 4)


def test_the_same_is_no_error_and_the_opposite_points_away() -> None:
    truth = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    same, opposite = errors(truth, truth), errors(-truth, truth)
    assert (same.relative_l1, same.rmse, same.max_abs) == (0.0, 0.0, 0.0)
    assert same.cosine == pytest.approx(1.0)
    assert opposite.cosine == pytest.approx(-1.0)
    assert opposite.relative_l1 == pytest.approx(2.0)


def test_zeros_are_defined() -> None:
    zero, one = torch.zeros(4), torch.ones(4)
    assert (errors(zero, zero).cosine, errors(zero, zero).relative_l1) == (1.0, 0.0)
    assert (errors(one, zero).cosine, errors(one, zero).relative_l1) == (0.0, math.inf)
    assert (errors(zero, one).cosine, errors(zero, one).relative_l1) == (0.0, 1.0)


def test_what_is_not_finite_is_counted_and_left_out_of_the_rest() -> None:
    found = errors(torch.tensor([math.nan, math.inf, 1.0, 2.0]), torch.tensor([1.0, 1.0, 1.0, 1.0]))
    assert found.nonfinite_share == 0.5
    assert (found.max_abs, found.elements) == (1.0, 4)
    nothing = errors(torch.full((3,), math.nan), torch.ones(3))
    assert (nothing.nonfinite_share, nothing.cosine, nothing.relative_l1) == (1.0, 0.0, math.inf)


def test_half_precision_is_compared_in_float64() -> None:
    found = errors(torch.full((70000,), 1.0, dtype=torch.float16), torch.full((70000,), 2.0, dtype=torch.float16))
    assert found.relative_l1 == 0.5  # the sum alone is beyond fp16


@pytest.mark.parametrize(
    ("out", "truth", "message"),
    [
        (torch.zeros(0, 4), torch.zeros(0, 4), "nothing to compare"),
        (torch.zeros(2), torch.zeros(3), r"shape \[2\].*\[3\]"),
        (torch.zeros(2), torch.tensor([1.0, math.nan]), "truth is not finite"),
    ],
)
def test_what_cannot_be_compared_raises(out: torch.Tensor, truth: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        errors(out, truth)
