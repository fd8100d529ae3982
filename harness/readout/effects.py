"""Effects on scores and outputs: what is multiplied, added, limited, mixed in or kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from assay.harness.localize.reading import Numbers, own_keys
from assay.harness.readout.formulas import Formula
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Flags, Queries, einsum


@dataclass(frozen=True)
class Scale(Effect):
    """Scores are multiplied."""

    factor: Formula
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        return queries.attended(queries.own_scores * self.factor.of(queries).reshape(*queries.shape, 1))


@dataclass(frozen=True)
class Times(Effect):
    """The output is multiplied."""

    factor: Formula
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        return queries.right * self.factor.of(queries).reshape(*queries.shape, 1)


@dataclass(frozen=True)
class ScaleAndTimes(Effect):
    """Scores are multiplied, and the output too."""

    scores: Formula
    output: Formula
    cost: float = 2.0

    def outputs(self, queries: Queries) -> Numbers:
        return Scale(self.scores).outputs(queries) * self.output.of(queries).reshape(*queries.shape, 1)


@dataclass(frozen=True)
class Plus(Effect):
    """Something is added to every number of the output.

    Attributes:
        value: what.
        relative: whether it is in units of the mean size of the call's right output.
    """

    value: float
    relative: bool = False
    cost: float = 1.2

    def outputs(self, queries: Queries) -> Numbers:
        return queries.right + self.value * (queries.mean_size if self.relative else 1.0)


@dataclass(frozen=True)
class Constant(Effect):
    """The output is this number, which may be NaN or infinite."""

    value: float
    cost: float = 0.5

    def outputs(self, queries: Queries) -> Numbers:
        return np.full_like(queries.right, self.value)


@dataclass(frozen=True)
class Kept(Effect):
    """A mixture with the output of the call before, where that has the same shape.

    Attributes:
        share: shares of the right output and of the one before.
    """

    share: tuple[float, float]
    cost: float = 1.6

    def outputs(self, queries: Queries) -> Numbers:
        before = kept_output(queries)
        if before is None:
            return queries.right
        found: Numbers = self.share[0] * queries.right + self.share[1] * before
        return found


def kept_output(queries: Queries) -> Numbers | None:
    """The output of the call before in the places of the queries; None if it has another shape."""
    before = queries.history.output
    if before is None or before.shape != (*queries.call.q.shape[:2], queries.call.v.shape[2]):
        return None
    found: Numbers = before.numpy()[queries.rows]
    return found


@dataclass(frozen=True)
class RunningAverage(Effect):
    """A mixture with the output of the query before, which is itself such a mixture; the first query of a sequence is right.

    Attributes:
        share: shares of the right output and of the query before.
    """

    share: tuple[float, float]
    cost: float = 1.8

    def outputs(self, queries: Queries) -> Numbers:
        right, before = self.share
        found = np.empty_like(queries.right)
        for q, _ in own_keys(queries.call):
            here = np.flatnonzero((queries.rows >= q.start) & (queries.rows < q.stop))
            if not len(here):
                continue
            rows = np.arange(q.start, int(queries.rows[here].max()) + 1)
            mixed = Queries(queries.call, rows).right.copy()
            for n in range(1, len(rows)):
                mixed[n] = right * mixed[n] + before * mixed[n - 1]
            found[here] = mixed[queries.rows[here] - q.start]
        return found


@dataclass(frozen=True)
class Limited(Effect):
    """Values or scores beyond a limit are not what they should be.

    Attributes:
        what: "values", or "scores".
        limit: the limit.
        how: "clamped", "capped" (a soft cap: limit * tanh(x / limit), after the scale), or "infinite" and "NaN" outputs.
        scaled: whether the limit is that of scaled scores, not of products of q and k.
    """

    what: str
    limit: float
    how: str
    scaled: bool = False
    cost: float = 1.5

    def outputs(self, queries: Queries) -> Numbers:
        if self.how == "capped":
            return queries.attended(self.limit * np.tanh(queries.own_scores / self.limit))
        if self.how == "clamped" and self.what == "values":
            return einsum("thck,kcd->thd", queries.weights, np.clip(queries.values, -self.limit, self.limit))
        scale = 1.0 if self.scaled else queries.call.scale
        if self.how == "clamped":
            return queries.attended(np.clip(queries.own_scores / scale, -self.limit, self.limit) * scale)
        if self.what == "values":
            beyond = (np.abs(queries.values) > self.limit).astype(float)
            seen = np.repeat(queries.visible[:, None], queries.heads, 1).astype(float)
            reached = queries.of_own(seen, beyond)
        else:
            reached = (queries.visible[:, None] & (queries.own_scores / scale > self.limit)).sum(-1, keepdims=True)
        return np.where(reached > 0, np.nan if self.how == "NaN" else np.inf, queries.right)


@dataclass(frozen=True)
class Biased(Effect):
    """Scores change with the distance of a key.

    Attributes:
        slope: what a scaled score gains per token of distance.
        cost: how far-fetched it is.
    """

    slope: float
    cost: float = 1.5

    def outputs(self, queries: Queries) -> Numbers:
        distance = np.abs(queries.pairs["pos"] - queries.pairs["j"]).reshape(queries.own_scores.shape)
        return queries.attended(queries.own_scores + self.slope * distance)


@dataclass(frozen=True)
class Atom:
    """Something that may be mixed into an output: a mean of some values.

    Attributes:
        words: in words.
        of: (queries) -> the keys whose values are averaged, bool [rows, total_k].
    """

    words: str
    of: Callable[[Queries], Flags] = field(compare=False)

    def outputs(self, queries: Queries) -> Numbers:
        """The mean of these values for each query, float64 [rows, heads, head_dim_v]; zero where there are none."""
        chosen = np.repeat(self.of(queries)[:, None], queries.heads, 1).astype(float)
        return queries.of_own(chosen / np.maximum(chosen.sum(-1, keepdims=True), 1.0))


def _seen(queries: Queries) -> Flags:
    return queries.visible


def _of_sequence(queries: Queries) -> Flags:
    return queries.own_rows


def _first_key(queries: Queries) -> Flags:
    found: Flags = queries.own_rows & (np.cumsum(queries.own_rows, 1) == 1)
    return found


def _own_key(queries: Queries) -> Flags:
    """The key at the position of the query."""
    found = np.zeros_like(queries.visible)
    for q, k in own_keys(queries.call):
        here = np.flatnonzero((queries.rows >= q.start) & (queries.rows < q.stop))
        found[here, k.stop - q.stop + queries.rows[here]] = True
    return found


ATOMS: tuple[Atom, ...] = (
    Atom("the mean of the values that the query sees", _seen),
    Atom("the value of the query's own token", _own_key),
    Atom("the first value of its sequence", _first_key),
    Atom("the mean of all values of its sequence", _of_sequence),
)
"""What may be mixed into an output: uniform attention, a residual connection, a sink, and uniform attention without a mask."""


@dataclass(frozen=True)
class WithAtom(Effect):
    """A mixture of the right output and something simple.

    Attributes:
        atom: what.
        share: shares of both.
    """

    atom: Atom
    share: tuple[float, float]
    cost: float = 1.8

    def outputs(self, queries: Queries) -> Numbers:
        return self.share[0] * queries.right + self.share[1] * self.atom.outputs(queries)
