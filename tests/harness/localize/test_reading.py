"""Reading weights that are known exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from assay.harness.attention.bugs.faults import rounded_oracle
from assay.harness.attention.bugs.precision import FP16_MAX
from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.oracle import oracle
from assay.harness.attention.shapes import Shape
from assay.harness.localize.reading import Numbers, WeightReading, read, right_weights, row_errors, scores_of, softmax, visible
from assay.harness.readout.queries import weighted_softmax

LENS = ((3, 4), (2, 5), (1, 0))
DIM = 32
CALL = Shape("extend", LENS, (4, 2), DIM).make(0)
ROWS = [0, 2, 4, 5]
Kernel = Callable[[AttentionCall], Tensor]


def reading(kernel: Kernel, call: AttentionCall = CALL) -> WeightReading:
    found = read(lambda one: kernel(one).double(), call, ROWS)
    assert found is not None
    return found


def weighing(weights: Tensor, plus: float = 0.0) -> Kernel:
    """A kernel with these weights, [total_q, num_q_heads, num_kv_heads, total_k]."""
    return lambda call: torch.einsum("thck,kcd->thd", weights, call.v.double()) + plus


def loop_weights(call: AttentionCall) -> Numbers:
    """The right weights, key by key."""
    group = call.q.shape[1] // call.k.shape[1]
    found = np.zeros((call.q.shape[0], call.q.shape[1], call.k.shape[1], call.k.shape[0]))
    q0 = k0 = 0
    for len_q, len_k in zip(call.lens_q, call.lens_k, strict=True):
        for i in range(len_q):
            for head in range(call.q.shape[1]):
                seen = range(i + len_k - len_q + 1) if call.causal else range(len_k)
                exps = [
                    math.exp(call.scale * float(call.q[q0 + i, head].double() @ call.k[k0 + j, head // group].double()))
                    for j in seen
                ]
                found[q0 + i, head, head // group, k0 : k0 + len(exps)] = np.array(exps) / sum(exps)
        q0, k0 = q0 + len_q, k0 + len_k
    return found


@pytest.mark.parametrize("causal", [True, False])
def test_the_right_weights_are_those_of_a_loop(causal: bool) -> None:
    call = CALL.with_spec(mask=Mask(causal=causal))
    rows = np.arange(6)
    expected = loop_weights(call)
    np.testing.assert_allclose(right_weights(call, rows, scores_of(call, rows)), expected, atol=1e-14)
    np.testing.assert_array_equal(visible(call, rows), expected[:, 0, 0] > 0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_right_kernel_has_the_right_weights(dtype: torch.dtype, causal: bool) -> None:
    call = Shape("extend", LENS, (4, 2), DIM, dtype).make(0).with_spec(mask=Mask(causal))
    found = reading(rounded_oracle, call)
    rounding = torch.finfo(dtype).eps
    np.testing.assert_allclose(found.weights, loop_weights(call)[ROWS], atol=rounding)
    np.testing.assert_allclose(found.expected, loop_weights(call)[ROWS], atol=1e-14)
    assert not found.constant.any()
    assert found.off.max() < 4 * rounding
    assert found.rows.tolist() == ROWS
    assert found.scores.shape == found.weights.shape == (4, 4, 2, 15)


@pytest.mark.parametrize("value_dim", [DIM, 8, 3, 2])
def test_any_weights_are_read_exactly(value_dim: int) -> None:
    """Of other sequences, other kv heads, negative ones: whatever multiplies V. Three dims do not divide by two kv heads."""
    weights = torch.randn(6, 4, 2, 15, dtype=torch.float64)
    asked: list[AttentionCall] = []

    def kernel(call: AttentionCall) -> Tensor:
        asked.append(call)
        return weighing(weights)(call)

    found = reading(kernel, Shape("extend", LENS, (4, 2), DIM, head_dim_v=value_dim).make(0))
    np.testing.assert_allclose(found.weights, weights[ROWS].numpy(), atol=1e-14)
    assert found.off.max() < 1e-6
    assert len(asked) == math.ceil(15 / (value_dim // 2)) + 2


@pytest.mark.parametrize(
    "asked", [("window 4",), ("softcap 1.5",), ("temperature 2",), ("sinks near 4",)], ids=lambda asked: asked[0]
)
def test_the_right_weights_are_those_of_what_a_call_asks_for(asked: tuple[str, ...]) -> None:
    call = Shape("extend", LENS, (4, 2), DIM, asked=asked).make(0)
    found = reading(oracle, call)
    np.testing.assert_allclose(found.weights, found.expected, atol=1e-12)
    assert np.abs(found.expected - reading(oracle, Shape("extend", LENS, (4, 2), DIM).make(0)).expected).max() > 1e-3


def test_what_does_not_come_from_v_is_the_constant() -> None:
    found = reading(weighing(torch.ones(6, 4, 2, 15, dtype=torch.float64) / 15, plus=0.5))
    np.testing.assert_allclose(found.constant, 0.5)
    np.testing.assert_allclose(found.weights, 1 / 15, atol=1e-14)
    assert found.off.max() < 1e-6


@pytest.mark.parametrize(
    "kernel",
    [
        lambda call: oracle(replace(call, v=call.v**2)),
        lambda call: oracle(call).roll(1, -1),
        lambda call: oracle(replace(call, k=call.k + call.v)),
    ],
    ids=["squares", "dims mixed", "weights depend on V"],
)
def test_weights_that_do_not_give_the_output_are_off(kernel: Kernel) -> None:
    assert reading(kernel).off[:3].min() > 0.05  # the last query has one key
    assert reading(oracle).off.max() < 1e-6


def test_nan_only_for_values_that_are_all_zero_is_no_constant() -> None:
    found = reading(lambda call: oracle(call) if call.v.any() else torch.full((6, 4, DIM), float("nan")))
    assert not found.constant.any()
    assert found.off.max() < 1e-6


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_kernel_that_does_not_answer_a_probe_is_not_read(number: int) -> None:
    asked: list[AttentionCall] = []

    def ask(call: AttentionCall) -> Tensor | None:
        asked.append(call)
        return None if len(asked) == number + 1 else oracle(call)

    assert read(ask, CALL, ROWS) is None
    assert len(asked) == number + 1


def test_errors_are_relative_to_the_right_output_of_each_head() -> None:
    out = oracle(CALL)
    out[2, 1] *= 1.25
    out[3, 0, 5] = float("nan")
    out[4, 3] = float("inf")
    errors = row_errors(CALL, out)
    expected = np.zeros((6, 4))
    expected[2, 1], expected[3, 0], expected[4, 3] = 0.25, np.inf, np.inf
    np.testing.assert_allclose(errors, expected, atol=1e-12)


def test_an_error_where_nothing_is_right_is_not_divided_by_zero() -> None:
    call = replace(CALL, v=torch.zeros_like(CALL.v))
    assert not row_errors(call, torch.zeros(6, 4, DIM, dtype=torch.float64)).any()
    assert (row_errors(call, torch.full((6, 4, DIM), FP16_MAX, dtype=torch.float64)) > 1e6).all()


def test_queries_of_a_call_without_keys_have_no_weights() -> None:
    scores, seen = np.zeros((2, 3, 0)), np.zeros((2, 1, 0), bool)
    assert softmax(scores, seen).shape == weighted_softmax(scores, scores).shape == (2, 3, 0)
