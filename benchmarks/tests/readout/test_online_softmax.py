"""Online softmax gone wrong gives what a loop over keys with the same fault gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from assay.harness.attention.sample_calls import call_of
from assay.harness.readout.effects import _TILES, _online_softmax, _online_softmaxes
from assay.harness.readout.queries import Queries

RESCALED = {str(one.args[1]) for one in _online_softmaxes()}
CALL = call_of([(3, 20), (1, 9)], (2, 1), 16, torch.float64, "cpu", seed=2)
QUERIES = Queries(CALL, np.arange(len(CALL.q)))


def by_loop(row: int, head: int, tile: int, law: str, least: float) -> np.ndarray:
    """One output, tile by tile, with the sums as a kernel keeps them."""
    keys = np.flatnonzero(QUERIES.visible[row])
    tiles: dict[int, list[int]] = {}
    for key in keys.tolist():
        tiles.setdefault((key - keys[0]) // tile, []).append(key)
    top, total, summed = -math.inf, 0.0, np.zeros(CALL.v.shape[2])
    for number in sorted(tiles):
        scores = [float(QUERIES.own_scores[row, head, key]) for key in tiles[number]]
        new = max(top, *scores)
        right = math.exp(top - new) if top > -math.inf else 1.0
        above = below = right
        if law in ("neither", "denominator"):
            above = 1.0
        if law in ("neither", "numerator"):
            below = 1.0
        if law == "rarely" and new - top < least:
            above = below = 1.0
        gained = sum(math.exp(score - new) for score in scores)
        total = (total + gained) * below if law == "late" else total * below + gained
        added = sum(
            (math.exp(s - new) * CALL.v[key, 0].numpy() for s, key in zip(scores, tiles[number], strict=True)), 0.0
        )
        summed = summed * above + added
        top = new
    return summed / total


@pytest.mark.parametrize("tile", [1, 4, 16])
@pytest.mark.parametrize("law", sorted(RESCALED))
def test_sums_are_rescaled_as_the_law_says(law: str, tile: int) -> None:
    effect = _online_softmax(tile, law, 1.0)
    expected = np.array([[by_loop(row, head, tile, law, 1.0) for head in range(2)] for row in range(len(CALL.q))])
    np.testing.assert_allclose(effect.outputs(QUERIES), expected, rtol=1e-9, atol=1e-12)
    assert not np.allclose(expected, QUERIES.right, rtol=1e-3)


def test_one_tile_is_right_whatever_the_law() -> None:
    for law in RESCALED:
        np.testing.assert_allclose(_online_softmax(64, law, 1.0).outputs(QUERIES), QUERIES.right, rtol=1e-9)


def test_every_law_is_tried_with_every_tile() -> None:
    found = {(tile, law) for tile, law, _ in (one.args for one in _online_softmaxes())}
    assert found == {(tile, law) for tile in _TILES for law in RESCALED}
