from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from assay.harness.evidence.error_sums import Floats, elements, nonfinite_share, ratio, relative_l1, sums_of


def sums(out: list[float], truth: list[float], dtype: type[np.floating] = np.float64) -> Floats:
    return sums_of(np.array(out, dtype), np.array(truth, dtype), (0,))


def test_known_figures() -> None:
    found = sums([1, 2, 3, 6], [1, 2, 3, 4])
    assert relative_l1(found) == pytest.approx(0.2)
    assert (nonfinite_share(found), elements(found)) == (0.0, 4)


def test_equal_outputs_have_no_error_and_opposite_ones_twice_their_size() -> None:
    truth = np.random.default_rng(0).normal(size=15).tolist()
    assert relative_l1(sums(truth, truth)) == 0
    assert relative_l1(sums([-x for x in truth], truth)) == pytest.approx(2.0)


def test_zeros_are_defined() -> None:
    zero, one = [0.0] * 4, [1.0] * 4
    assert relative_l1(sums(zero, zero)) == 0
    assert relative_l1(sums(one, zero)) == math.inf
    assert relative_l1(sums(zero, one)) == 1.0


def test_nonfinite_elements_are_counted_and_left_out_of_other_sums() -> None:
    found = sums([math.nan, math.inf, 1.0, 2.0, 5.0], [1.0, 1.0, 1.0, 1.0, math.nan])
    assert (nonfinite_share(found), relative_l1(found), elements(found)) == (0.5, 0.5, 4)
    nothing = sums([math.nan] * 3, [1.0] * 3)
    assert (nonfinite_share(nothing), relative_l1(nothing)) == (1, math.inf)
    unseen = sums([], [])
    assert all(np.isnan(f(unseen)) for f in (nonfinite_share, relative_l1, elements))


def test_half_precision_is_compared_in_float64() -> None:
    assert relative_l1(sums([1.0] * 70000, [2.0] * 70000, np.float16)) == 0.5  # the sum alone is beyond fp16


def test_sums_are_merged_by_adding() -> None:
    first, second = sums([1.0, 2.0], [1.0, 1.0]), sums([5.0], [4.0])
    assert relative_l1(first + second) == relative_l1(sums([1.0, 2.0, 5.0], [1.0, 1.0, 4.0])) == pytest.approx(2 / 6)


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_a_ratio_of_arrays_and_of_tensors(array: type) -> None:
    assert ratio(array([0.0, 0.0, 1.0, 1.0]), array([0.0, 2.0, 0.0, 4.0])).tolist() == [0.0, 0.0, math.inf, 0.25]  # type: ignore[attr-defined]
