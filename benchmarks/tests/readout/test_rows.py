"""What a row knows of itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from assay.harness.attention.oracle import oracle
from assay.harness.localize.reading import read
from assay.harness.readout.forms import Row, Tolerance
from assay.harness.readout.probing import CallPlan
from assay.harness.readout.queries import Queries

CALL = CallPlan(((3, 4), (5, 0)), (4, 2), 32).make()
READ = [1, 5]


def row(place: int, head: int) -> Row:
    reading = read(lambda call: oracle(call) + 0.5, CALL, READ)
    assert reading is not None
    return Row(reading, Queries(reading.call, range(len(reading.call.q))), place, head, Tolerance())


@pytest.mark.parametrize(("place", "head", "own", "keys"), [(0, 0, 0, slice(0, 7)), (1, 3, 1, slice(7, 12))])
def test_a_row_knows_its_place(place: int, head: int, own: int, keys: slice) -> None:
    found = row(place, head)
    assert (found.row, found.head, found.own, found.keys) == (READ[place], head, own, keys)
    assert found.visible.sum() == (6 if place == 0 else 3)
    assert found.weights.shape == found.expected.shape == found.scores.shape == (2, 12)
    np.testing.assert_allclose(found.weights, found.expected, atol=1e-6)
    np.testing.assert_allclose(found.constant, 0.5)
    assert found.off < 1e-6


def test_a_row_knows_all_queries_of_the_call() -> None:
    found = row(0, 0).every
    assert found.scores.shape == (8, 4, 2, 12)
    right = found.weights
    torch.testing.assert_close(torch.einsum("thck,kcd->thd", torch.from_numpy(right), CALL.v.double()), oracle(CALL))


def test_near_is_within_the_tolerance_of_all_weights_together() -> None:
    found = row(0, 0)
    assert found._near(found.expected)
    for by, near in ((1e-6, True), (1e-5, False)):  # on twelve keys of two kv heads
        assert found._near(found.weights + by) is near


def test_another_kv_head_is_read_too() -> None:
    found = row(0, 0)
    assert not found._reads_others
    found.weights = found.weights[::-1]
    assert found._reads_others


def test_logs_of_the_own_weights() -> None:
    found = row(0, 2)
    logs = found._own_logs(6)
    assert logs is not None
    np.testing.assert_array_equal(logs[0], found.visible)
    np.testing.assert_allclose(np.exp(logs[1]), found.expected[1, :6], rtol=1e-5)
    assert found._own_logs(7) is None  # fewer keys than that
    found.weights[1, 8] = 0.1
    assert found._own_logs(6) is None  # a key that should not be seen
    found.weights[1, 8], found.weights[0, 0] = 0.0, 0.1
    assert found._own_logs(6) is None  # another kv head
