from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from assay.harness.evidence.error_table import DISTANCE, elements, relative_l1
from assay.harness.evidence.trace import Trace
from assay.harness.judge.traces import _trace_sums, free_running_errors

LAYERS, HEADS, DIM = (0, 3), 2, 4
NONFINITE = DISTANCE.index("nonfinite")


def trace(tokens: Sequence[int], positions: Sequence[int] | None = None, seed: int = 0) -> Trace:
    """A trace whose outputs depend on the position only, so that rows can be distinguished."""
    at = list(range(len(tokens))) if positions is None else list(positions)
    everything = np.random.default_rng(seed).normal(size=(100, HEADS, DIM)).astype(np.float32)
    outputs = {layer: everything[at] * (layer + 1) for layer in LAYERS}
    return Trace("t", np.array(tokens), np.array(at), ("extend",) * len(tokens), outputs)


def changed(of: Trace, layer: int, out: NDArray[np.float32]) -> Trace:
    return Trace(of.label, of.tokens, of.positions, of.phases, of.outputs | {layer: out})


def compared(reference: Trace, candidate: Trace) -> tuple[list[float], int]:
    """The relative L1 of each layer, and how many rows were compared: as many in each layer and head."""
    sums = np.stack([*_trace_sums(reference, candidate).values()])
    (count,) = set(elements(sums).ravel().tolist())
    return relative_l1(sums.sum(1)).tolist(), int(count) // DIM


def test_a_layer_and_a_head_that_are_off_are_found_with_known_figures() -> None:
    reference = trace([7, 8, 9])
    out = reference.outputs[3].copy()
    out[:, 1] *= 1.5
    candidate = changed(reference, 3, out)
    sums = _trace_sums(reference, candidate)
    assert tuple(sums) == LAYERS
    assert relative_l1(np.stack([*sums.values()])) == pytest.approx(np.array([[0, 0], [0, 0.5]]))
    truth = reference.outputs[3].astype(float)
    share = np.abs(truth[:, 1]).sum() / np.abs(truth).sum()
    assert compared(reference, candidate) == (pytest.approx([0, 0.5 * share]), 3)


def test_nothing_matches_from_where_the_tokens_first_differ() -> None:
    reference, candidate = trace([1, 2, 3, 4, 5, 6]), trace([1, 2, 3, 7, 5, 6], seed=0)
    candidate.outputs[0][4:] = np.nan  # the fourth and fifth tokens are alike again, in another text
    assert compared(reference, candidate)[1] == 3
    assert all(sums[:, NONFINITE].max() == 0 for sums in _trace_sums(reference, candidate).values())


def test_a_row_counts_once_as_first_computed_and_joining_adds_sums_and_not_ratios() -> None:
    again = trace([1, 2, 2], positions=[0, 1, 1])
    again.outputs[0][2] = np.nan
    assert compared(again, trace([1, 2])) == ([0, 0], 2)
    short, long = trace([1]), trace(range(20, 40), seed=1)
    pairs = [(short, changed(short, 0, short.outputs[0] * 3)), (long, changed(long, 0, long.outputs[0] * 2))]
    sizes = [np.abs(one.outputs[0].astype(float)).sum() for one in (short, long)]
    total, inherited = free_running_errors(pairs, np.zeros(4))[0]
    assert total == inherited == pytest.approx((2 * sizes[0] + 1 * sizes[1]) / sum(sizes))


def test_traces_of_different_models_are_refused() -> None:
    reference = trace([1, 2])
    other = Trace("o", reference.tokens, reference.positions, reference.phases, {0: reference.outputs[0]})
    with pytest.raises(ValueError, match="different models"):
        _trace_sums(reference, other)


def test_elements_that_are_not_finite_are_reported_and_not_averaged() -> None:
    reference = trace([1, 2])
    part, lost = reference.outputs[0].copy(), np.full_like(reference.outputs[3], np.inf)
    part[0, 0, 0] = np.nan
    candidate = changed(changed(reference, 0, part), 3, lost)
    sums = np.stack([each.sum(0) for each in _trace_sums(reference, candidate).values()])
    assert relative_l1(sums).tolist() == [math.inf, math.inf]
    assert sums[:, NONFINITE].tolist() == [1, 16]
    undefined = changed(reference, 0, part)
    assert relative_l1(_trace_sums(undefined, reference)[0].sum(0)) == 0


@pytest.mark.parametrize(("own", "inherited"), [(0.1, 0.4), (0.5, 0.0), (0.7, 0.0), (math.nan, math.nan), (math.inf, 0.0)])
def test_what_is_not_its_own_is_inherited(own: float, inherited: float) -> None:
    reference = trace([1, 2, 3])
    found = free_running_errors([(reference, changed(reference, 0, reference.outputs[0] * 1.5))], np.array([own]))
    assert found[0] == pytest.approx((0.5, inherited), nan_ok=True)
    assert math.isnan(found[3][1]), "its own error was not observed"
