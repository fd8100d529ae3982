"""Weights that are solved for, compared with those that made the outputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.sample_calls import call_of
from assay.harness.bugs.faults import rounded_oracle
from assay.harness.localize.reading import Numbers, right_weights, scores_of
from assay.harness.readout.passive import _solve, _Solved, _tolerance_of

NOISE = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def outputs(call: AttentionCall, weights: Numbers) -> Numbers:
    """What these weights give, in the call's dtype."""
    found = np.einsum("thck,kcd->thd", weights, call.v.double().numpy())
    return torch.from_numpy(found).to(call.q.dtype).double().numpy()


def right(call: AttentionCall) -> Numbers:
    rows = np.arange(call.q.shape[0])
    return right_weights(call, rows, scores_of(call, rows))


def solved(call: AttentionCall, weights: Numbers, noise: float | None = None) -> _Solved:
    rows = np.arange(call.q.shape[0])
    return _solve(call, rows, outputs(call, weights), NOISE[call.q.dtype] if noise is None else noise)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_within_their_errors_of_those_that_made_the_output(dtype: torch.dtype) -> None:
    call = call_of([(7, 20), (30, 0)], (4, 2), 64, dtype, "cpu", seed=1)
    found = solved(call, right(call))
    assert found.known.all()
    off = np.abs(found.reading.weights - right(call)).max((-1, -2))
    assert (off <= 5 * found.errors + 1e-12).all()
    assert off.max() < (1e-5 if dtype == torch.float32 else 2e-2)
    assert found.errors.max() < 50 * max(off.max(), 1e-9), "errors are no larger than they are"


def test_weights_of_another_sequence_and_of_another_kv_head_are_found() -> None:
    call = call_of([(5, 8), (6, 9)], (4, 2), 64, torch.float32, "cpu", seed=2)
    weights = right(call)
    elsewhere = np.roll(weights, 13, axis=-1)  # of the sequence before or after
    found = solved(call, 0.5 * weights + 0.5 * elsewhere)
    assert np.abs(found.reading.weights - 0.5 * weights - 0.5 * elsewhere).max() < 1e-4
    other = weights[:, :, ::-1]
    found = solved(call, other)
    assert np.abs(found.reading.weights - other).max() < 1e-4


def test_weights_of_few_keys_of_a_long_sequence_are_found() -> None:
    call = call_of([(3, 400)], (2, 1), 64, torch.float32, "cpu", seed=3)
    weights = right(call)
    for keys in (slice(0, 30), slice(380, 403)):
        some = np.zeros_like(weights)
        some[..., keys] = weights[..., keys]
        found = solved(call, some)
        assert found.known.all()
        assert np.abs(found.reading.weights - some).max() < 1e-5


def test_weights_of_the_last_keys_of_a_sequence_are_found_for_its_first_new_tokens() -> None:
    call = call_of([(60, 400)], (2, 1), 64, torch.float32, "cpu", seed=3)
    weights = np.zeros((2, 2, 1, 460))
    weights[..., 430:] = 1 / 30
    found = _solve(call, np.arange(2), outputs(call, weights), NOISE[torch.float32])
    assert np.abs(found.reading.weights - weights).max() < 1e-5


def test_what_is_no_sum_of_few_rows_is_not_known() -> None:
    call = call_of([(3, 400)], (2, 1), 64, torch.float32, "cpu", seed=3)
    assert not solved(call, right(call)).known.any(), "403 keys have more weights than there are equations"
    short = call_of([(3, 9)], (2, 1), 64, torch.float32, "cpu", seed=3)
    noise = np.random.default_rng(0).normal(size=(3, 2, 64))
    found = _solve(short, np.arange(3), noise, 1e-6)
    assert not found.known.any()
    nan = _solve(short, np.arange(3), np.full((3, 2, 64), np.nan), 1e-6)
    assert not nan.known.any()
    assert found.shown(0) is None


def test_values_that_cannot_be_told_apart_are_not_solved_for() -> None:
    call = call_of([(4, 10)], (2, 1), 64, torch.float32, "cpu", seed=4)
    alike = replace(call, v=call.v[:1].expand_as(call.v).contiguous())
    assert not solved(alike, right(alike)).known.any()
    nearly = replace(call, v=alike.v + 1e-5 * call.v)
    assert not solved(nearly, right(nearly)).known.any(), "their weights would be off by more than they are"


def test_a_noisier_weight_has_a_wider_tolerance() -> None:
    exact, noisy = _tolerance_of(1e-9, 1e-8), _tolerance_of(3e-4, 3e-3)
    assert exact.weight == 5e-5
    assert noisy.weight > exact.weight
    assert noisy.log > exact.log
    assert 4 * 3e-4 / noisy.log == pytest.approx(noisy.least)


def test_what_is_shown_of_a_right_kernel_is_right() -> None:
    call = call_of([(7, 20)], (4, 2), 64, torch.bfloat16, "cpu", seed=5)
    out = rounded_oracle(call).double().numpy()
    found = _solve(call, np.arange(7), out, NOISE[torch.bfloat16])
    shown = found.shown(1)
    assert shown is not None
    assert np.abs(shown.weights - right(call)).max() < 1e-12
    assert np.abs(found.reading.weights - right(call)).max() > 1e-5, "as it was solved, it is off by noise"
    unseen = call_of([(40, 0)], (4, 2), 64, torch.bfloat16, "cpu", seed=6)
    weights = right(unseen)
    weights[:, :, :, 3] = 0  # and all others are too small, so that nothing is the usual factor times the right weight
    weights[:, :, :, 4:] *= 1.5
    again = solved(unseen, weights).shown(1)
    assert again is not None
    assert (again.weights[10:, 1, 0, 3] == 0).all(), "noise is not shown as a weight"
