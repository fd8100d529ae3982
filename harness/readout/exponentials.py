"""Exponentials that are another function: what a weight is in proportion to, in place of exp(score)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from assay.harness.localize.reading import Numbers
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
