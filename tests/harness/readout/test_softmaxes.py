"""Functions in place of the exponential: found again from the weights that they make, and computed on any call."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from assay.harness.attention.sample_calls import call_of
from assay.harness.localize.reading import Numbers, softmax
from assay.harness.readout.queries import Queries
from assay.harness.readout.softmaxes import FLOOR, LAWS, LEAST, MOST, Exponential, Law, laws_of

SCORES = np.random.default_rng(0).normal(0.0, 1.5, 60)
TOP = float(SCORES.max())
CALL = call_of([(9, 20), (3, 0)], (4, 2), 16, torch.float32, "cpu")
PARAMETERS = {FLOOR: -2.5, LEAST: -1.0, MOST: 1.25}


def of(law: Law) -> Numbers:
    """The weights that a law gives to the scores, of which the log is finite."""
    x = SCORES - TOP if law.relative else SCORES
    return np.exp(law.log(x, PARAMETERS.get(law, 0.0)))


@pytest.mark.parametrize(
    "law", LAWS, ids=lambda law: f"{law.words} of {'score - maximum' if law.relative else 'score'}"
)
def test_a_law_is_found_again_from_its_weights(law: Law) -> None:
    weights = of(law)
    seen = weights > 1e-7 * weights.sum()
    found = dict(laws_of(SCORES[seen], np.log(weights[seen] / weights.sum()), TOP, 1e-5))
    assert law in found
    same = [other for other in found if np.allclose(of(other) / of(other).sum(), weights / weights.sum(), atol=1e-5)]
    for other in found:  # a floor below the maximum is one of the scores, too, as long as there is one query only
        assert other in same or other.fitted
    if law.fitted:
        assert found[law] == pytest.approx(PARAMETERS[law])


def test_weights_at_random_have_no_law() -> None:
    assert not list(laws_of(SCORES, np.random.default_rng(1).normal(size=60), TOP, 1e-3))


FUNCTIONS: list[tuple[str, bool, Callable[[float], float]]] = [
    ("exp(max(x, {t:.4g}))", True, lambda x: math.exp(max(x, -2.5))),
    ("scaled scores are clamped to at most {t:.4g}", False, lambda x: math.exp(min(x, 1.25))),
    ("2^n (1 + f), where n + f = x log2(e) and 0 <= f < 1", True,
     lambda x: 2 ** math.floor(x / math.log(2)) * (1 + (x / math.log(2)) % 1)),
]  # fmt: skip


@pytest.mark.parametrize(("words", "relative", "function"), FUNCTIONS, ids=[words for words, *_ in FUNCTIONS])
def test_the_output_is_that_of_the_function(words: str, relative: bool, function: Callable[[float], float]) -> None:
    law = next(one for one in LAWS if (one.words, one.relative) == (words, relative))
    queries = Queries(CALL, range(12))
    x = queries.own_scores - (queries.maximum[..., None] if relative else 0.0)
    weights = np.vectorize(function)(x) * queries.visible[:, None]
    expected = queries.of_own(weights / weights.sum(-1, keepdims=True))
    np.testing.assert_allclose(Exponential(law, PARAMETERS.get(law, 0.0)).outputs(queries), expected, atol=1e-12)


def test_exp_itself_is_no_law_of_right_weights() -> None:
    right = softmax(SCORES, np.ones(60, bool))
    found = dict(laws_of(SCORES, np.log(right), TOP, 1e-6))
    assert set(found) <= {FLOOR, LEAST, MOST}  # with a limit that no score is beyond
    assert found.get(LEAST, -9.0) <= SCORES.min() + 1e-6
    assert found.get(MOST, 9.0) >= TOP - 1e-6
