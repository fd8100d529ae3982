from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from assay.harness.compare.traces import FreeRunningError, compare, joined, split
from assay.harness.evidence.error_sums import elements, nonfinite_share, relative_l1
from assay.harness.evidence.trace import Trace

LAYERS, HEADS, DIM = (0, 3), 2, 4


def trace(tokens: Sequence[int], positions: Sequence[int] | None = None, seed: int = 0) -> Trace:
    """A trace whose outputs depend on the position only, so that rows can be distinguished."""
    at = list(range(len(tokens))) if positions is None else list(positions)
    everything = np.random.default_rng(seed).normal(size=(100, HEADS, DIM)).astype(np.float32)
    outputs = {layer: everything[at] * (layer + 1) for layer in LAYERS}
    return Trace("t", np.array(tokens), np.array(at), ("extend",) * len(tokens), outputs)


def changed(of: Trace, layer: int, out: NDArray[np.float32]) -> Trace:
    return Trace(of.label, of.tokens, of.positions, of.phases, of.outputs | {layer: out})


def rows(found: FreeRunningError) -> int:
    """Rows that were compared: the same in each layer and head."""
    (count,) = set(elements(found.sums).ravel().tolist())
    return int(count) // DIM


def test_a_layer_and_a_head_that_are_off_are_found_with_known_figures() -> None:
    reference = trace([7, 8, 9])
    out = reference.outputs[3].copy()
    out[:, 1] *= 1.5
    found = compare(reference, changed(reference, 3, out))
    assert (found.layers, rows(found)) == (LAYERS, 3)
    assert relative_l1(found.sums) == pytest.approx(np.array([[0, 0], [0, 0.5]]))
    truth = reference.outputs[3].astype(float)
    share = np.abs(truth[:, 1]).sum() / np.abs(truth).sum()
    assert found.relative_l1 == pytest.approx([0, 0.5 * share])


def test_rows_match_by_position_in_any_order() -> None:
    reference, candidate = trace([1, 2, 3, 4]), trace([4, 2, 9], positions=[3, 1, 6])
    found = compare(reference, candidate)
    assert rows(found) == 2
    assert found.relative_l1.tolist() == [0, 0]


def test_nothing_matches_from_where_the_tokens_first_differ() -> None:
    reference, candidate = trace([1, 2, 3, 4, 5, 6]), trace([1, 2, 3, 7, 5, 6], seed=0)
    candidate.outputs[0][4:] = np.nan  # the fourth and fifth tokens are alike again, in another text
    found = compare(reference, candidate)
    assert rows(found) == 3
    assert nonfinite_share(found.sums).max() == 0


def test_a_row_that_was_computed_twice_counts_once() -> None:
    reference, candidate = trace([1, 2, 2, 3], positions=[0, 1, 1, 2]), trace([1, 2, 3])
    reference.outputs[0][2] += 1  # the second time
    found = compare(reference, candidate)
    assert rows(found) == 3
    assert found.relative_l1.tolist() == [0, 0]


def test_joining_adds_sums_and_not_ratios() -> None:
    short, long = trace([1]), trace(range(20, 40), seed=1)
    parts = [
        compare(short, changed(short, 0, short.outputs[0] * 3)),
        compare(long, changed(long, 0, long.outputs[0] * 2)),
    ]
    whole = joined(parts)
    sizes = [np.abs(one.outputs[0].astype(float)).sum() for one in (short, long)]
    assert whole.relative_l1[0] == pytest.approx((2 * sizes[0] + 1 * sizes[1]) / sum(sizes))
    assert rows(whole) == 21
    assert joined([parts[0]]).relative_l1.tolist() == parts[0].relative_l1.tolist()


def test_what_cannot_be_joined_or_compared_says_so() -> None:
    reference = trace([1, 2])
    other = Trace("o", reference.tokens, reference.positions, reference.phases, {0: reference.outputs[0]})
    with pytest.raises(ValueError, match="different models"):
        compare(reference, other)
    with pytest.raises(ValueError, match="cannot be joined"):
        joined([])
    with pytest.raises(ValueError, match="cannot be joined"):
        joined([compare(reference, reference), compare(other, other)])


def test_elements_that_are_not_finite_are_reported_and_not_averaged() -> None:
    reference = trace([1, 2])
    part, lost = reference.outputs[0].copy(), np.full_like(reference.outputs[3], np.inf)
    part[0, 0, 0] = np.nan
    found = compare(reference, changed(changed(reference, 0, part), 3, lost))
    assert found.relative_l1.tolist() == [0, math.inf]
    assert nonfinite_share(found.sums.sum(1)) == pytest.approx([1 / 16, 1])
    undefined = changed(reference, 0, part)
    assert compare(undefined, reference).relative_l1[0] == 0


def test_without_a_matching_row_nothing_is_known() -> None:
    found = compare(trace([1, 2]), trace([3, 2]))
    assert np.isnan(elements(found.sums)).all()
    assert np.isnan(found.relative_l1).all()


def test_what_is_not_its_own_is_inherited() -> None:
    total = np.array([0.4, 0.5, np.nan, 0.1, np.inf, np.inf, 0.3])
    own = np.array([0.4, 0.2, 0.1, 0.3, 0.2, np.inf])
    parts = split(range(7), total, own)
    assert parts.inherited[:2] == pytest.approx([0, 0.3])
    assert parts.inherited[3:5].tolist() == [0, math.inf]
    assert np.isnan(parts.inherited[[2, 5, 6]]).all()
    assert np.isnan(parts.own[6])
    assert split((1, 0), total[:2], own).own.tolist() == [0.2, 0.4]
