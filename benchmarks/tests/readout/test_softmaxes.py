"""Functions in place of the exponential: found again from the weights that they make, and computed on any call."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from assay.harness.attention.sample_calls import call_of
from assay.harness.localize.reading import softmax
from assay.harness.readout.queries import Queries
from assay.harness.readout.softmaxes import LAWS, exponential, laws_of

SCORES = np.random.default_rng(0).normal(0.0, 1.5, 60)
TOP = float(SCORES.max())
CALL = call_of([(9, 20), (3, 0)], (4, 2), 16, torch.float32, "cpu")


@pytest.mark.parametrize("law", LAWS)
def test_a_law_is_found_again_from_its_weights(law: str) -> None:
    weights = np.exp(LAWS[law](SCORES - TOP))
    assert list(laws_of(SCORES, np.log(weights / weights.sum()), TOP, 1e-5)) == [law]


@pytest.mark.parametrize(
    "weights",
    [softmax(SCORES, np.ones(60, bool)), np.exp(np.random.default_rng(1).normal(size=60))],
    ids=["exp", "random"],
)
def test_other_weights_have_no_law(weights: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    assert not list(laws_of(SCORES, np.log(weights), TOP, 1e-5))


def test_the_output_is_that_of_the_function() -> None:
    queries = Queries(CALL, range(12))
    y = (queries.own_scores - queries.maximum[..., None]) / math.log(2)
    weights = 2 ** np.floor(y) * (1 + y % 1) * queries.visible[:, None]
    expected = queries.of_own(weights / weights.sum(-1, keepdims=True))
    np.testing.assert_allclose(exponential(next(iter(LAWS))).outputs(queries), expected, atol=1e-12)
