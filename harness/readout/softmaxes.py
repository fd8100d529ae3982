"""Exponentials that are another function, and online softmax gone wrong: what stands in place of exp(score) over its sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import numpy as np

from assay.harness.localize.reading import Numbers, own_keys
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Queries

_DEGREES = (1, 2, 3)
"""Degrees of the polynomials of the fraction in a product with a power of two: beyond 3, they are as exact as bfloat16."""


@dataclass(frozen=True)
class Law:
    """A function that stands in place of exp(x).

    Attributes:
        words: the function in words, with ``{t:.4g}`` for a parameter.
        log: (x, parameter) -> its log, -inf where it is not positive.
        relative: whether x is the score minus the maximum of the query's scores, not the score.
        fitted: whether it has a parameter: a value of x that follows from what was read.
    """

    words: str
    log: Callable[[Numbers, float], Numbers] = field(compare=False)
    relative: bool = True
    fitted: bool = False


def _split(degree: int, x: Numbers, _: float) -> Numbers:
    """The log of a power of two times a polynomial of the fraction: 1 + f, as a float's bits have it, or that of Taylor for 2^f."""
    coefficients = [1.0, 1.0] if degree == 1 else [math.log(2) ** n / math.factorial(n) for n in range(degree, -1, -1)]
    y = np.maximum(x, -1e6) / math.log(2)
    whole = np.floor(y)
    found: Numbers = whole * math.log(2) + np.log(np.polyval(coefficients, y - whole))
    return found


def _floor(x: Numbers, t: float) -> Numbers:
    return np.maximum(x, t)


def _ceiling(x: Numbers, t: float) -> Numbers:
    return np.minimum(x, t)


FLOOR = Law("exp(max(x, {t:.4g}))", _floor, True, True)
LEAST = Law("scaled scores are clamped to at least {t:.4g}", _floor, False, True)
MOST = Law("scaled scores are clamped to at most {t:.4g}", _ceiling, False, True)
LAWS: tuple[Law, ...] = (
    FLOOR, LEAST, MOST,
    *(Law(f"2^n {polynomial}, where n + f = x log2(e) and 0 <= f < 1", partial(_split, degree))
      for degree, polynomial in zip(_DEGREES, ("(1 + f)", "times the Taylor polynomial of degree 2 of 2^f",
                                               "times the Taylor polynomial of degree 3 of 2^f"), strict=True)),
)  # fmt: skip
"""What kernels compute in place of exp(x): an exponent that is clamped, and the exponent and the fraction of a float apart
(Schraudolph, A Fast, Compact Approximation of the Exponential Function, 1999)."""


def laws_of(x: Numbers, logs: Numbers, top: float, close: float) -> Iterator[tuple[Law, float]]:
    """The laws that give the weights of a query up to a common factor, with their parameters.

    Args:
        x: scores of the keys with weight.
        logs: logs of these weights.
        top: the largest score that the query sees.
        close: by how much the logs may be off.
    """
    for law in LAWS:
        at = x - top if law.relative else x
        parameter = _fitted(law, at, logs) if law.fitted else 0.0
        gaps = logs - law.log(at, parameter)
        if np.isfinite(gaps).all() and np.ptp(gaps) < close:
            yield law, parameter


def _fitted(law: Law, x: Numbers, logs: Numbers) -> float:
    """The value of x from which on a law holds the weights constant: by how much their logs are off where they are equal.

    The keys beyond it have one weight. It is the least or the largest one, whose score would be x.
    """
    below = law.log is _floor
    order = np.argsort(x)
    inner = order[-1] if below else order[0]
    outer = order[0] if below else order[-1]
    return float(x[inner] + logs[outer] - logs[inner])


@dataclass(frozen=True)
class Exponential(Effect):
    """Weights are in proportion to another function than exp(score).

    Attributes:
        law: the function.
        parameter: of the function; see `Law.fitted`.
    """

    law: Law
    parameter: float = 0.0
    cost: float = 1.5

    def outputs(self, queries: Queries) -> Numbers:
        seen = queries.visible[:, None]
        top = queries.maximum[..., None] if self.law.relative else 0.0
        logs = self.law.log(queries.own_scores - top, self.parameter)
        return queries.attended(np.where(seen, logs, 0.0))


_POWERS = {
    "neither": (0, 0), "numerator": (1, 0), "denominator": (0, 1), "inverse": (-1, -1), "numerator twice": (2, 1),
    "denominator twice": (1, 2), "late": (1, 1), "rarely": (1, 1),
}  # fmt: skip
"""Powers of the right factor, exp(old maximum - new), by which the numerator and the denominator are multiplied."""
RESCALED = tuple(_POWERS)
"""See `OnlineSoftmax.law`."""
TILES = (1, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 256)
"""Keys of a tile; 1 in kernels that take a key at a time."""


@dataclass(frozen=True)
class OnlineSoftmax(Effect):
    """What was summed over earlier tiles of keys is rescaled wrongly where a later tile raises the running maximum.

    Attributes:
        tile: keys of a tile.
        law: "neither" sum is rescaled; only the "numerator", or only the "denominator" is, or is "twice"; "late": the denominator
            is rescaled after the tile was added to it; "inverse": both by exp(new - old); "rarely": only where the maximum rises
            by `least` or more.
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
        """The numerators of weights, [rows, heads, keys], and the denominators, [rows, heads, 1]."""
        keys = scores.shape[-1]
        padded = np.pad(scores, ((0, 0), (0, 0), (0, -keys % self.tile)), constant_values=-np.inf)
        tiles = padded.reshape(*scores.shape[:2], -1, self.tile)
        order = slice(None, None, -1 if self.backward else 1)
        tiles = tiles[:, :, order]
        top = np.maximum.accumulate(tiles.max(-1), -1)
        safe = np.where(np.isfinite(top), top, 0.0)
        above, below = self._rescaled(top[..., :-1], safe[..., 1:])
        added = np.exp(tiles - safe[..., None])
        gained, late = added.sum(-1), self.law == "late"
        if late:  # the factor of the first tile is 1, since nothing was summed before it
            gained[..., 1:] *= below
        total = (gained * _later(below)).sum(-1, keepdims=True)
        weights = (added * _later(above)[..., None])[:, :, order]
        return weights.reshape(*scores.shape[:2], -1)[..., :keys], total

    def _rescaled(self, top: Numbers, new: Numbers) -> tuple[Numbers, Numbers]:
        """By what the numerator and the denominator are multiplied at each tile but the first; 1 where nothing was summed yet."""
        seen = np.isfinite(top)
        rise = np.where(seen, new - np.where(seen, top, 0.0), 0.0)
        if self.law == "rarely":
            rise = np.where(rise < self.least, 0.0, rise)
        with np.errstate(over="ignore"):
            above, below = (np.exp(-power * rise) for power in _POWERS[self.law])
        return above, below


def _later(factors: Numbers) -> Numbers:
    """The product of the factors of all later tiles, for each tile: one more than there are factors."""
    products = np.cumprod(factors[..., ::-1], -1)[..., ::-1]
    return np.concatenate([products, np.ones((*factors.shape[:-1], 1))], -1)


_LEAST = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Rises of the maximum below which a kernel may skip rescaling."""


def online_softmaxes() -> Iterator[OnlineSoftmax]:
    """Every law, with tiles of usual sizes in either order."""
    for tile, backward in product(TILES, (False, True)):
        for law in RESCALED:
            cost = 2.2 + 0.2 * backward
            if law != "rarely":
                yield OnlineSoftmax(tile, law, backward=backward, cost=cost)
                continue
            for least in _LEAST:
                yield OnlineSoftmax(tile, law, least, backward, cost + 0.3)
