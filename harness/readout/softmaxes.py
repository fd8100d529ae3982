"""Exponentials that are another function, and online softmax gone wrong: what stands in place of exp(score) over its sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np

from assay.harness.attention.oracle import sequences
from assay.harness.localize.reading import Numbers
from assay.harness.readout.operators import Told
from assay.harness.readout.queries import Queries


def _split(degree: int, x: Numbers) -> Numbers:
    """The log of a power of two times a polynomial of the fraction: 1 + f, as a float's bits have it, or that of Taylor for 2^f."""
    coefficients = [1.0, 1.0] if degree == 1 else [math.log(2) ** n / math.factorial(n) for n in range(degree, -1, -1)]
    y = np.maximum(x, -1e6) / math.log(2)
    whole = np.floor(y)
    return np.asarray(whole * math.log(2) + np.log(np.polyval(coefficients, y - whole)))


_FRACTIONS = ("(1 + f)", *(f"times the Taylor polynomial of degree {degree} of 2^f" for degree in (2, 3)))
LAWS: dict[str, Callable[[Numbers], Numbers]] = {
    f"2^n {fraction}, where n + f = x log2(e) and 0 <= f < 1": partial(_split, degree)
    for degree, fraction in enumerate(_FRACTIONS, 1)
}
"""What kernels compute in place of exp(x), x the score minus the maximum of the query's scores: in words, and (x) -> its log.

The exponent and the fraction of a float apart (Schraudolph, A Fast, Compact Approximation of the Exponential Function, 1999).
Beyond degree 3, a polynomial is as exact as bfloat16.
"""


def laws_of(x: Numbers, logs: Numbers, top: float, close: float) -> Iterator[str]:
    """Yield the laws that give the weights of keys with scores x, and a maximum `top`, up to a factor and `close` in their logs."""
    yield from (law for law, log in LAWS.items() if np.ptp(logs - log(x - top)) < close)


def exponential(law: str) -> Told:
    """Weights are in proportion to another function than exp(score), one of `LAWS`."""
    return Told(f"exp(x), x = score - maximum, is {law}", _exponential, (law,), 1.5)


def _exponential(queries: Queries, law: str) -> Numbers:
    logs = LAWS[law](queries.own_scores - queries.maximum[..., None])
    return queries.attended(np.where(queries.visible[:, None], logs, 0.0))


_POWERS = {
    "neither": (0, 0), "numerator": (1, 0), "denominator": (0, 1), "inverse": (-1, -1), "numerator twice": (2, 1),
    "denominator twice": (1, 2), "late": (1, 1), "rarely": (1, 1),
}  # fmt: skip
"""Powers of the right factor, exp(old maximum - new), by which the numerator and the denominator are multiplied."""
TILES = (1, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 256)
"""Keys of a tile; 1 in kernels that take a key at a time."""
_LAWS = {
    "neither": "the sums over earlier tiles are not rescaled when the maximum rises",
    "numerator": "the denominator is not rescaled when the maximum rises",
    "denominator": "the numerator is not rescaled when the maximum rises",
    "numerator twice": "the numerator is rescaled twice when the maximum rises",
    "denominator twice": "the denominator is rescaled twice when the maximum rises",
    "late": "the denominator is rescaled after the new tile was added to it",
    "inverse": "the sums over earlier tiles are multiplied by exp(new maximum - old), not by its inverse",
    "rarely": "the sums over earlier tiles are not rescaled when the maximum rises by less than {least:g}",
}
"""What goes wrong, in words."""


def _online_softmax(tile: int, law: str, least: float = 0.0, backward: bool = False) -> Told:
    """An online softmax in which earlier tiles of keys are rescaled wrongly where a later tile raises the running maximum.

    The laws: "neither" sum is rescaled; only the "numerator", or only the "denominator" is, or is "twice"; "late": the denominator
    is rescaled after the tile was added to it; "inverse": both by exp(new - old); "rarely": only where it rises by `least`.
    """
    order = ", from the last tile to the first" if backward else ""
    tiles = f"online softmax over {f'tiles of {tile} keys' if tile > 1 else 'one key at a time'}{order}"
    cost = 2.2 + 0.2 * backward
    cost = cost + 0.3 if law == "rarely" else cost
    return Told(f"{tiles}: {_LAWS[law].format(least=least)}", _online, (tile, law, least, backward), cost)


def _online(queries: Queries, tile: int, law: str, least: float, backward: bool) -> Numbers:
    scores = np.where(queries.visible[:, None], queries.own_scores, -np.inf)
    weights = np.zeros_like(scores)
    total = np.ones((*queries.shape, 1))
    for _, keys in sequences(queries.call):
        here = queries.visible[:, keys].any(1)
        if here.any():
            weights[here, :, keys], total[here] = _sums(scores[here, :, keys], tile, law, least, backward)
    with np.errstate(divide="ignore", invalid="ignore"):
        normalised = np.where(total > 0, weights / total, 0.0)
    return queries.of_own(np.nan_to_num(normalised))


def _sums(scores: Numbers, tile: int, law: str, least: float, backward: bool) -> tuple[Numbers, Numbers]:
    """The numerators of weights of a sequence, [rows, heads, keys], and the denominators, [rows, heads, 1]."""
    keys = scores.shape[-1]
    padded = np.pad(scores, ((0, 0), (0, 0), (0, -keys % tile)), constant_values=-np.inf)
    tiles = padded.reshape(*scores.shape[:2], -1, tile)
    order = slice(None, None, -1 if backward else 1)
    tiles = tiles[:, :, order]
    top = np.maximum.accumulate(tiles.max(-1), -1)
    safe = np.where(np.isfinite(top), top, 0.0)
    above, below = _rescaled(top[..., :-1], safe[..., 1:], law, least)
    added = np.exp(tiles - safe[..., None])
    gained = added.sum(-1)
    if law == "late":  # the factor of the first tile is 1, since nothing was summed before it
        gained[..., 1:] *= below
    total = (gained * _later(below)).sum(-1, keepdims=True)
    weights = (added * _later(above)[..., None])[:, :, order]
    return weights.reshape(*scores.shape[:2], -1)[..., :keys], total


def _rescaled(top: Numbers, new: Numbers, law: str, least: float) -> tuple[Numbers, Numbers]:
    """By what the numerator and the denominator are multiplied at each tile but the first; 1 where nothing was summed yet."""
    seen = np.isfinite(top)
    rise = np.where(seen, new - np.where(seen, top, 0.0), 0.0)
    if law == "rarely":
        rise = np.where(rise < least, 0.0, rise)
    with np.errstate(over="ignore"):
        above, below = (np.exp(-power * rise) for power in _POWERS[law])
    return above, below


def _later(factors: Numbers) -> Numbers:
    """The product of the factors of all later tiles, for each tile: one more than there are factors."""
    products = np.cumprod(factors[..., ::-1], -1)[..., ::-1]
    return np.concatenate([products, np.ones((*factors.shape[:-1], 1))], -1)


_LEAST = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Rises of the maximum below which a kernel may skip rescaling."""


def online_softmaxes() -> Iterator[Told]:
    """Every law, with tiles of usual sizes in either order."""
    for tile, backward, law in product(TILES, (False, True), _LAWS):
        for least in _LEAST if law == "rarely" else (0.0,):
            yield _online_softmax(tile, law, least, backward)
