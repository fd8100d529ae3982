"""Online softmax gone wrong: sums over earlier tiles of keys that are not rescaled as the running maximum rises."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from assay.harness.attention.oracle import sequences
from assay.harness.localize.reading import Numbers
from assay.harness.readout.operators import Told
from assay.harness.readout.queries import Queries

TILES = (1, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 256)
"""Keys of a tile; 1 in kernels that take a key at a time."""
_LAWS = {
    "neither": ((0, 0), "the sums over earlier tiles are not rescaled when the maximum rises"),
    "denominator": ((0, 1), "the numerator is not rescaled when the maximum rises"),
    "late": ((1, 1), "the denominator is rescaled after the new tile was added to it"),
    "rarely": ((1, 1), "the sums over earlier tiles are not rescaled when the maximum rises by less than {least:g}"),
}
"""Powers of the right factor, exp(old maximum - new), by which the numerator and the denominator are multiplied, and words."""


def _online_softmax(tile: int, law: str, least: float = 0.0) -> Told:
    """An online softmax in which earlier tiles of keys are rescaled wrongly where a later tile raises the running maximum.

    The laws: "neither" sum is rescaled; only the "denominator" is; "late": it is after the tile was added to it; "rarely": both
    are, but only where the maximum rises by `least` or more.
    """
    tiles = f"online softmax over {f'tiles of {tile} keys' if tile > 1 else 'one key at a time'}"
    words = f"{tiles}: {_LAWS[law][1].format(least=least)}"
    return Told(words, _online, (tile, law, least), 2.5 if law == "rarely" else 2.2)


def _online(queries: Queries, tile: int, law: str, least: float) -> Numbers:
    scores = np.where(queries.visible[:, None], queries.own_scores, -np.inf)
    weights = np.zeros_like(scores)
    total = np.ones((*queries.shape, 1))
    for _, keys in sequences(queries.call):
        here = queries.visible[:, keys].any(1)
        if here.any():
            weights[here, :, keys], total[here] = _sums(scores[here, :, keys], tile, law, least)
    with np.errstate(divide="ignore", invalid="ignore"):
        normalised = np.where(total > 0, weights / total, 0.0)
    return queries.of_own(np.nan_to_num(normalised))


def _sums(scores: Numbers, tile: int, law: str, least: float) -> tuple[Numbers, Numbers]:
    """The numerators of weights of a sequence, [rows, heads, keys], and the denominators, [rows, heads, 1]."""
    keys = scores.shape[-1]
    padded = np.pad(scores, ((0, 0), (0, 0), (0, -keys % tile)), constant_values=-np.inf)
    tiles = padded.reshape(*scores.shape[:2], -1, tile)
    top = np.maximum.accumulate(tiles.max(-1), -1)
    safe = np.where(np.isfinite(top), top, 0.0)
    above, below = _rescaled(top[..., :-1], safe[..., 1:], law, least)
    added = np.exp(tiles - safe[..., None])
    gained = added.sum(-1)
    if law == "late":  # the factor of the first tile is 1, since nothing was summed before it
        gained[..., 1:] *= below
    total = (gained * _later(below)).sum(-1, keepdims=True)
    weights = added * _later(above)[..., None]
    return weights.reshape(*scores.shape[:2], -1)[..., :keys], total


def _rescaled(top: Numbers, new: Numbers, law: str, least: float) -> tuple[Numbers, Numbers]:
    """By what the numerator and the denominator are multiplied at each tile but the first; 1 where nothing was summed yet."""
    seen = np.isfinite(top)
    rise = np.where(seen, new - np.where(seen, top, 0.0), 0.0)
    if law == "rarely":
        rise = np.where(rise < least, 0.0, rise)
    with np.errstate(over="ignore"):
        above, below = (np.exp(-power * rise) for power in _LAWS[law][0])
    return above, below


def _later(factors: Numbers) -> Numbers:
    """The product of the factors of all later tiles, for each tile: one more than there are factors."""
    products = np.cumprod(factors[..., ::-1], -1)[..., ::-1]
    return np.concatenate([products, np.ones((*factors.shape[:-1], 1))], -1)


_LEAST = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Rises of the maximum below which a kernel may skip rescaling."""


def online_softmaxes() -> Iterator[Told]:
    """Every law, with tiles of usual sizes."""
    for tile, law in product(TILES, _LAWS):
        for least in _LEAST if law == "rarely" else (0.0,):
            yield _online_softmax(tile, law, least)
