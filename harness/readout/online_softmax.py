"""Online softmax gone wrong: keys come in tiles, and what was summed before is not rescaled as the running maximum asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from assay.harness.readout.features import own_keys
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Queries
from assay.harness.readout.reading import Numbers

LAWS = ("neither", "numerator", "denominator", "late", "inverse", "rarely")
"""See `OnlineSoftmax.law`."""
TILES = (1, 16, 32, 64, 128)
"""Keys of a tile in common kernels; 1 in those that take a key at a time."""


@dataclass(frozen=True)
class OnlineSoftmax(Effect):
    """What was summed over earlier tiles of keys is rescaled wrongly where a later tile raises the running maximum.

    Attributes:
        tile: keys of a tile.
        law: "neither" sum is rescaled; only the "numerator", or only the "denominator" is; "late": the denominator is rescaled
            after the tile was added to it; "inverse": both by exp(new - old); "rarely": only where the maximum rises by `least`
            or more.
        least: see "rarely".
        backward: whether the last tile comes first.
    """

    tile: int
    law: str
    least: float = 0.0
    backward: bool = False
    cost: float = 2.2

    def outputs(self, queries: Queries) -> Numbers:
        scores = np.where(queries.visible[:, None], queries.own_scores, -np.inf)
        weights = np.zeros_like(scores)
        total = np.ones((*queries.shape, 1))
        for _, keys in own_keys(queries.call):
            here = queries.visible[:, keys].any(1)
            if here.any():
                weights[here, :, keys], total[here] = self._of_sequence(scores[here, :, keys])
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.where(total > 0, weights / total, 0.0)
        return queries.of_own(np.nan_to_num(found))

    def _of_sequence(self, scores: Numbers) -> tuple[Numbers, Numbers]:
        """The numerators of weights, [rows, heads, keys], and the denominators."""
        tiles = [slice(at, at + self.tile) for at in range(0, scores.shape[-1], self.tile)]
        if self.backward:
            tiles.reverse()
        top, total = np.full((*scores.shape[:2], 1), -np.inf), np.zeros((*scores.shape[:2], 1))
        added, factors = list[Numbers](), list[Numbers]()
        for tile in tiles:
            new = np.maximum(top, scores[..., tile].max(-1, keepdims=True))
            safe = np.where(np.isfinite(new), new, 0.0)
            above, below = self._rescaled(top, safe)
            added.append(np.exp(scores[..., tile] - safe))
            factors.append(above)
            gained = added[-1].sum(-1, keepdims=True)
            total = (total + gained) * below if self.law == "late" else total * below + gained
            top = new
        weights, later = np.empty_like(scores), np.ones_like(total)
        for tile, numerators, factor in zip(reversed(tiles), reversed(added), reversed(factors), strict=True):
            weights[..., tile] = numerators * later
            later = later * factor
        return weights, total

    def _rescaled(self, top: Numbers, new: Numbers) -> tuple[Numbers, Numbers]:
        """By what the numerator and the denominator are multiplied; 1 before the first tile, where both are zero."""
        first = ~np.isfinite(top)
        rise = np.where(first, 0.0, new - np.where(first, 0.0, top))
        right, one = np.exp(-rise), np.ones_like(rise)
        if self.law == "rarely":
            kept = np.where(rise < self.least, one, right)
            return kept, kept
        if self.law == "inverse":
            return np.exp(rise), np.exp(rise)
        return (
            one if self.law in ("neither", "denominator") else right,
            one if self.law in ("neither", "numerator") else right,
        )


_LEAST = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Rises of the maximum below which a kernel may skip rescaling."""


def online_softmaxes() -> Iterator[OnlineSoftmax]:
    """Every law, with tiles of usual sizes in either order."""
    for tile, backward in product(TILES, (False, True)):
        for law in LAWS:
            cost = 2.2 + 0.2 * backward
            if law != "rarely":
                yield OnlineSoftmax(tile, law, backward=backward, cost=cost)
                continue
            for least in _LEAST:
                yield OnlineSoftmax(tile, law, least, backward, cost + 0.3)
