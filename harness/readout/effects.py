"""Effects: what a kernel computes in place of attention, as functions of a call that can be run.

An effect with the condition under which it shows is a `Clause`; clauses make an `Operator`, which says what a kernel will answer on
a call that it has not seen.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.hypotheses import Compute
from assay.harness.attention.oracle import oracle
from assay.harness.readout.features import Ints, Pairs, own_keys, row_table
from assay.harness.readout.forms import BLANK
from assay.harness.readout.mining import ALWAYS, Condition, Value
from assay.harness.readout.probing import History
from assay.harness.readout.reading import Numbers, right_weights, scores_of, visible

Flags = NDArray[np.bool_]


def _einsum(rule: str, *arrays: Numbers) -> Numbers:
    """numpy.einsum by PyTorch, whose number of threads the caller sets."""
    found: Numbers = torch.einsum(rule, *(torch.from_numpy(array) for array in arrays)).numpy()
    return found


class Queries:
    """Some queries of a call, with what is known of them before the kernel answers.

    Args:
        call: the call.
        rows: packed rows of q.
        number: of the call among those that the kernel computed.
        nth: of the call among those of its layer and phase.
        history: what the kernel got before.
    """

    def __init__(
        self,
        call: AttentionCall,
        rows: Sequence[int] | Ints,
        number: int = 0,
        nth: int = 0,
        history: History | None = None,
    ) -> None:
        self.call, self.rows, self.number, self.nth = call, np.asarray(rows, dtype=np.int64), number, nth
        self.history = history or History()

    @property
    def heads(self) -> int:
        """q heads."""
        return self.call.q.shape[1]

    @cached_property
    def own(self) -> Ints:
        """The kv head of each q head."""
        return np.arange(self.heads) // (self.heads // self.call.k.shape[1])

    @cached_property
    def table(self) -> dict[str, Ints]:
        """Features of each query and head, [rows * heads]."""
        table = row_table(self.call, self.rows.tolist(), self.number, self.nth)
        one = np.ones_like(table["row"])
        (new, total), (last_new, last_total) = self.history.initial, self.history.previous
        return table | {
            "initial_new": new * one, "initial_total": total * one, "initial_prefix": (total - new) * one,
            "last_new": last_new * one, "last_total": last_total * one, "last_prefix": (last_total - last_new) * one,
            "same_layer": int(self.history.layer == self.call.layer) * one,
            "same_phase": int(self.history.phase == self.call.phase) * one,
        }  # fmt: skip

    @cached_property
    def pairs(self) -> Pairs:
        """Features of each query, head and packed key, [rows * heads * total_k]."""
        return Pairs(self.call, self.table)

    @cached_property
    def scores(self) -> Numbers:
        """scale * q k^T, [rows, heads, kv heads, total_k]."""
        return scores_of(self.call, self.rows)

    @cached_property
    def visible(self) -> Flags:
        """Keys that should be seen, [rows, total_k]."""
        return visible(self.call, self.rows)

    @cached_property
    def own_rows(self) -> Flags:
        """Keys of the query's own sequence, [rows, total_k]."""
        found = np.zeros((len(self.rows), self.call.k.shape[0]), bool)
        for q, k in own_keys(self.call):
            found[(self.rows >= q.start) & (self.rows < q.stop), k] = True
        return found

    @cached_property
    def weights(self) -> Numbers:
        """The right weights, [rows, heads, kv heads, total_k]."""
        return right_weights(self.call, self.rows, self.scores)

    @cached_property
    def values(self) -> Numbers:
        """V, [total_k, kv heads, head_dim_v]."""
        found: Numbers = self.call.v.double().cpu().numpy()
        return found

    def of(self, weights: Numbers) -> Numbers:
        """The output of weights, [rows, heads, head_dim_v]."""
        return _einsum("thck,kcd->thd", weights, self.values)

    @cached_property
    def right(self) -> Numbers:
        """The right output, [rows, heads, head_dim_v]."""
        return self.of(self.weights)

    @cached_property
    def mean_size(self) -> float:
        """Mean size of the numbers of the call's right output."""
        return float(oracle(self.call).abs().mean())

    def placed(self, weights: Numbers, kv: Ints | None = None) -> Numbers:
        """Weights of one kv head each, [rows, heads, total_k], in the shape of all, with nothing elsewhere."""
        found = np.zeros_like(self.scores)
        found[:, np.arange(self.heads), self.own if kv is None else kv] = weights
        return found

    @cached_property
    def own_scores(self) -> Numbers:
        """Scores with the keys of the own kv head, [rows, heads, total_k]."""
        return self.scores[:, np.arange(self.heads), self.own]


class Effect(ABC):
    """What becomes of the output of a query. Whether it shows on a query is the clause's business."""

    cost: float = 1.0
    """How far-fetched it is."""

    @abstractmethod
    def outputs(self, queries: Queries) -> Numbers:
        """The output of each query, [rows, heads, head_dim_v]; NaN where it is undefined."""


def _normalised(
    factors: Numbers, scores: Numbers, counted: Numbers | None = None, phantom: Numbers | float = 0.0
) -> Numbers:
    """Weights in proportion to factor * exp(score); `counted` are the factors in the denominator, if they differ."""
    below = factors if counted is None else counted
    top = np.where((factors > 0) | (below > 0), scores, -np.inf).max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        e = np.exp(np.minimum(scores - top, 700.0))
        total = (below * e).sum(-1, keepdims=True)
        if np.any(phantom):
            total = total + phantom * np.exp(np.minimum(-top, 700.0))
        return np.where(total > 0, factors * e / np.where(total > 0, total, 1.0), 0.0)


@dataclass(frozen=True)
class Part:
    """Pairs of a query and a key that get a factor.

    Attributes:
        universe: "seen", keys that should be seen; "hidden", other keys of the sequence; "foreign", keys of other sequences.
        condition: on the pairs.
        factor: of the weight; 0 for a key that is not seen, `BLANK` for one that is zero to the kernel.
        of: "weight", or "score": the factor multiplies the scaled score.
    """

    universe: str
    condition: Condition
    factor: float
    of: str = "weight"


@dataclass(frozen=True)
class KeyFactors(Effect):
    """Weights of some keys are multiplied, or keys are seen that should not be.

    Attributes:
        parts: which.
        denominator: "counted", of the keys with their factors; "all", of the keys that should be seen.
        phantom: keys with score zero and value zero that are counted too.
    """

    parts: tuple[Part, ...]
    denominator: str = "counted"
    phantom: Value | None = None
    cost: float = 1.0

    def factors(self, queries: Queries) -> tuple[Numbers, Numbers]:
        """The factors of each key's weight and of its score, [rows, heads, total_k]."""
        rows, heads, keys = queries.own_scores.shape
        seen = np.repeat(queries.visible[:, None], heads, 1)
        own = np.repeat(queries.own_rows[:, None], heads, 1)
        universes = {"seen": seen, "hidden": own & ~seen, "foreign": ~own}
        found, times = seen.astype(float), np.ones(seen.shape)
        for part in self.parts:
            holds = part.condition.holds(queries.pairs).reshape(rows, heads, keys) & universes[part.universe]
            (found if part.of == "weight" else times)[holds] = part.factor
        return found, times

    def outputs(self, queries: Queries) -> Numbers:
        factors, times = self.factors(queries)
        blank = factors == BLANK
        factors[blank] = 0.0
        seen = np.repeat(queries.visible[:, None], queries.heads, 1).astype(float)
        phantom: Numbers | float = 0.0
        if self.phantom is not None:
            phantom = np.maximum(self.phantom.of(queries.table), 0).reshape(len(queries.rows), queries.heads, 1)
        if blank.any():
            phantom = phantom + blank.sum(-1, keepdims=True)
        counted = seen if self.denominator == "all" else None
        return queries.of(queries.placed(_normalised(factors, queries.own_scores * times, counted, phantom)))


@dataclass(frozen=True)
class Formula:
    """A number that follows from the constants of a call.

    Attributes:
        words: the number in words.
        of: (queries) -> the number for each query and head, [rows * heads].
    """

    words: str
    of: Callable[[Queries], Numbers] = field(compare=False)


def constant_formula(value: float) -> Formula:
    """A plain number."""
    return Formula(f"{value:.5g}", lambda q: np.full(len(q.table["row"]), value))


def _plain(words: str, of: Callable[[float], float]) -> Formula:
    """A number that follows from the softmax scale."""
    return Formula(words, lambda q: np.full(len(q.table["row"]), of(q.call.scale)))


SCALES: tuple[Formula, ...] = (
    _plain("1 / scale: scores are not scaled", lambda scale: 1 / scale),
    _plain("the scale: scores are scaled twice", lambda scale: scale),
    _plain("1 / scale^2: scores are multiplied where they should be divided", lambda scale: scale**-2),
    _plain("ln 2: 2 is raised to the scores in place of e", lambda scale: math.log(2)),
    _plain("log2(e): e is raised to scores that were scaled for 2", lambda scale: 1 / math.log(2)),
    Formula("1 / sqrt(q heads): the scale is that of the dims of all q heads", lambda q: q.table["heads"] ** -0.5),
    Formula("1 / sqrt(kv heads): the scale is that of the dims of all kv heads", lambda q: q.table["kv_heads"] ** -0.5),
    Formula("sqrt(q heads per kv head)", lambda q: q.table["group"] ** 0.5),
    Formula("sqrt(head_dim / head_dim of V): the scale is that of the values' head_dim",
            lambda q: np.full(len(q.table["row"]), (q.call.q.shape[2] / q.call.v.shape[2]) ** 0.5)),
    _plain("1 / sqrt(2)", lambda scale: 2**-0.5),
    _plain("sqrt(2)", lambda scale: 2**0.5),
)  # fmt: skip
"""Numbers by which bugs multiply scores."""


def _largest_values(queries: Queries, by: int) -> Numbers:
    largest = np.abs(queries.values).max((0, 2))
    ratio = np.roll(largest, -by) / np.maximum(largest, 1e-30)
    found: Numbers = ratio[queries.table["kv"]]
    return found


TIMES: tuple[Formula, ...] = (
    Formula("largest |V| of the next kv head / largest |V| of its own: values have the next head's scale",
            lambda q: _largest_values(q, 1)),
    Formula("largest |V| of the kv head before / largest |V| of its own: values have the previous head's scale",
            lambda q: _largest_values(q, -1)),
    Formula("q heads per kv head", lambda q: q.table["group"] * 1.0),
    Formula("1 / q heads per kv head", lambda q: 1.0 / q.table["group"]),
)  # fmt: skip
"""Numbers by which bugs multiply outputs."""


@dataclass(frozen=True)
class Scale(Effect):
    """Scores are multiplied."""

    factor: Formula
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        times = self.factor.of(queries).reshape(len(queries.rows), queries.heads, 1)
        seen = np.repeat(queries.visible[:, None], queries.heads, 1).astype(float)
        return queries.of(queries.placed(_normalised(seen, queries.own_scores * times)))


@dataclass(frozen=True)
class Times(Effect):
    """The output is multiplied."""

    factor: Formula
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        return queries.right * self.factor.of(queries).reshape(len(queries.rows), queries.heads, 1)


@dataclass(frozen=True)
class Kept(Effect):
    """A mixture with the output of the call before, where that has the same shape.

    Attributes:
        share: shares of the right output and of the one before.
    """

    share: tuple[float, float]
    cost: float = 1.6

    def outputs(self, queries: Queries) -> Numbers:
        before = queries.history.output
        if before is None or before.shape[:2] != queries.call.q.shape[:2] or before.shape[2] != queries.right.shape[2]:
            return queries.right
        found: Numbers = self.share[0] * queries.right + self.share[1] * before.numpy()[queries.rows]
        return found


@dataclass(frozen=True)
class Limited(Effect):
    """Values or scores beyond a limit are not what they should be.

    Attributes:
        what: "values", or "scores" before the softmax scale.
        limit: the limit.
        how: "clamped", "capped" (a soft cap: limit * tanh(x / limit), after the scale), or "infinite" and "NaN" outputs.
    """

    what: str
    limit: float
    how: str
    cost: float = 1.5

    def outputs(self, queries: Queries) -> Numbers:
        scale, seen = queries.call.scale, np.repeat(queries.visible[:, None], queries.heads, 1)
        if self.what == "values":
            if self.how == "clamped":
                return _einsum("thck,kcd->thd", queries.weights, np.clip(queries.values, -self.limit, self.limit))
            beyond = (np.abs(queries.values) > self.limit).astype(float)[:, queries.own]  # [keys, heads, dim]
            reached = _einsum("thk,khd->thd", seen.astype(float), beyond) > 0
            return np.where(reached, np.nan if self.how == "NaN" else np.inf, queries.right)
        products = queries.own_scores / scale
        if self.how == "clamped":
            changed = np.clip(products, -self.limit, self.limit) * scale
        elif self.how == "capped":
            changed = self.limit * np.tanh(queries.own_scores / self.limit)
        else:
            reached = (seen & (products > self.limit)).any(-1)[..., None]
            return np.where(reached, np.nan if self.how == "NaN" else np.inf, queries.right)
        return queries.of(queries.placed(_normalised(seen.astype(float), changed)))


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
class Source:
    """Where a query takes something from: (packed row, q head) as functions of the query.

    Attributes:
        words: in words, such as "the query before it".
        row: (queries) -> packed row of q for each row and head; negative where there is none.
        head: (queries) -> q head, likewise.
        cost: how far-fetched it is.
    """

    words: str
    row: Callable[[Queries], Ints] = field(compare=False)
    head: Callable[[Queries], Ints] = field(compare=False)
    cost: float = 1.0


def _starts(queries: Queries) -> tuple[Ints, Ints]:
    edges = np.array(queries.call.cu_seqlens_q.tolist())
    return edges[:-1], edges[1:]


def _in_sequence(queries: Queries, seq: Ints, i: Ints) -> Ints:
    """Packed row of query i of a sequence; -1 where there is none."""
    starts, stops = _starts(queries)
    inside = (seq >= 0) & (seq < len(starts))
    safe = np.clip(seq, 0, len(starts) - 1)
    row = starts[safe] + i
    return np.where(inside & (i >= 0) & (row < stops[safe]), row, -1)


def _row_sources() -> list[tuple[str, Callable[[Queries], Ints], float]]:
    def shifted(by: int) -> Callable[[Queries], Ints]:
        return lambda q: _in_sequence(q, q.table["seq"], q.table["i"] + by)

    def packed(by: int) -> Callable[[Queries], Ints]:
        return lambda q: (q.table["row"] + by) % q.call.q.shape[0]

    def sequence(by: int) -> Callable[[Queries], Ints]:
        return lambda q: _in_sequence(q, q.table["seq"] + by, q.table["i"])

    def after(by: int) -> str:
        return f"{abs(by)} queries {'before' if by < 0 else 'after'} it" if abs(by) > 1 else (
            "the query before it" if by < 0 else "the query after it")  # fmt: skip

    found: list[tuple[str, Callable[[Queries], Ints], float]] = [("", lambda q: q.table["row"], 0.0)]
    found += [(after(by), shifted(by), 0.2 + 0.1 * abs(by)) for by in (-1, 1, -2, 2, -3, 3, -4, 4, -8, 8, -16, 16)]
    found += [(after(by) + " in the packed batch", packed(by), 0.7 + 0.1 * abs(by)) for by in (-1, 1, -2, 2)]
    found += [
        ("the first query of its sequence", lambda q: _in_sequence(q, q.table["seq"], 0 * q.table["i"]), 0.4),
        ("the last query of its sequence", lambda q: _in_sequence(q, q.table["seq"], q.table["new"] - 1), 0.4),
        ("the same query of the first sequence", lambda q: _in_sequence(q, 0 * q.table["seq"], q.table["i"]), 0.6),
        ("the same query of the sequence before", sequence(-1), 0.5),
        ("the same query of the sequence after", sequence(1), 0.5),
        ("the same query of the last sequence", lambda q: _in_sequence(q, q.table["seqs"] - 1, q.table["i"]), 0.7),
        ("the first query of the batch", lambda q: 0 * q.table["row"], 0.6),
        ("the last query of the batch", lambda q: 0 * q.table["row"] + q.call.q.shape[0] - 1, 0.6),
        ("the last query of the sequence before",
         lambda q: np.where(q.table["seq"] > 0, q.table["row"] - q.table["i"] - 1, -1), 0.7),
        *((f"the first query of its block of {n}",
           lambda q, n=n: _in_sequence(q, q.table["seq"], q.table["i"] // n * n), 0.7) for n in (16, 32, 64, 128)),
        *((f"query i mod {n} of its sequence",
           lambda q, n=n: _in_sequence(q, q.table["seq"], q.table["i"] % n), 0.8) for n in (16, 32, 64, 128)),
    ]  # fmt: skip
    return found


def _head_sources() -> list[tuple[str, Callable[[Queries], Ints], float]]:
    def shifted(by: int) -> Callable[[Queries], Ints]:
        return lambda q: (q.table["head"] + by) % q.heads

    return [
        ("", lambda q: q.table["head"], 0.0),
        ("the next q head", shifted(1), 0.3), ("the q head before it", shifted(-1), 0.3),
        ("two q heads further", shifted(2), 0.5), ("two q heads before", shifted(-2), 0.5),
        ("q head 0", lambda q: 0 * q.table["head"], 0.4),
        ("the last q head", lambda q: 0 * q.table["head"] + q.heads - 1, 0.5),
        ("the other q head of its pair", lambda q: q.table["head"] ^ 1, 0.5),
        ("the first q head of its group", lambda q: q.table["head"] - q.table["member"], 0.5),
        ("q head num_q_heads - 1 - h", lambda q: q.heads - 1 - q.table["head"], 0.6),
        *((f"q head {n}", lambda q, n=n: 0 * q.table["head"] + n, 0.7) for n in (1, 2, 3)),
        ("the q head one group further", lambda q: (q.table["head"] + q.table["group"]) % q.heads, 0.6),
    ]  # fmt: skip


def _sources() -> tuple[Source, ...]:
    found = []
    for row_words, row, row_cost in _row_sources():
        for head_words, head, head_cost in _head_sources():
            if not row_words and not head_words:
                continue
            words = " of ".join(filter(None, (row_words, head_words)))
            found.append(Source(words, row, head, row_cost + head_cost + 0.5 * bool(row_words and head_words)))
    return tuple(found)


SOURCES = _sources()
"""Places that a query may be confused with."""


@dataclass(frozen=True)
class FromElsewhere(Effect):
    """Another query's output, or its q, in place of this one's; or a mixture of the right output and another's.

    Attributes:
        source: of the other query.
        what: "output"; "query": q alone, behind this query's own mask; "weights": q and the keys of its kv head, for its own values.
        share: shares of the right one and of the other: of the output, of q, or of the weights.
    """

    source: Source
    what: str = "output"
    share: tuple[float, float] = (0.0, 1.0)
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        rows, heads = self.source.row(queries), self.source.head(queries)
        there = rows >= 0
        needed, place = np.unique(np.where(there, rows, 0), return_inverse=True)
        others = Queries(queries.call, needed)
        shape = (len(queries.rows), queries.heads)
        at, head = place.reshape(shape), np.clip(heads, 0, queries.heads - 1).reshape(shape)
        if self.what == "output":
            found = others.right[at, head]
        else:
            own = np.broadcast_to(queries.own, shape)
            seen = np.repeat(queries.visible[:, None], queries.heads, 1).astype(float)
            if self.what == "query":
                scores = self.share[0] * queries.own_scores + self.share[1] * others.scores[at, head, own]
                blended = queries.of(queries.placed(_normalised(seen, scores)))
                return np.where(there.reshape(*shape, 1), blended, queries.right)
            found = queries.of(queries.placed(_normalised(seen, others.scores[at, head, queries.own[head]])))
        mixed: Numbers = self.share[0] * queries.right + self.share[1] * found
        return np.where(there.reshape(*shape, 1), mixed, queries.right)


@dataclass(frozen=True)
class OtherKvHead(Effect):
    """Another kv head is read.

    Attributes:
        kv: the kv head, modulo their number.
    """

    kv: Value
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        kv = (self.kv.of(queries.table) % queries.call.k.shape[1]).reshape(len(queries.rows), queries.heads)
        take = np.take_along_axis(queries.scores, kv[:, :, None, None], 2)[:, :, 0]
        seen = np.repeat(queries.visible[:, None], queries.heads, 1).astype(float)
        weights = np.zeros_like(queries.scores)
        np.put_along_axis(weights, kv[:, :, None, None], _normalised(seen, take)[:, :, None], 2)
        return queries.of(weights)


@dataclass(frozen=True)
class Moved(Effect):
    """Rows of K, V or both are read from elsewhere, or are blended with rows from elsewhere.

    Attributes:
        what: "k", "v" or "kv".
        condition: on the pairs of a query and a key that should be seen.
        words: from where, in words.
        row: (call) -> packed row of each packed key; negative where it does not move.
        kv: by how many kv heads further.
        share: shares of the right row and of the other.
        stale: whether the other rows are those of the call before.
    """

    what: str
    condition: Condition
    words: str
    row: Callable[[AttentionCall], Ints] = field(compare=False)
    kv: int = 0
    share: tuple[float, float] = (0.0, 1.0)
    stale: bool = False
    cost: float = 1.0

    def outputs(self, queries: Queries) -> Numbers:
        rows, heads, keys = queries.own_scores.shape
        to = self.row(queries.call)
        k, v = queries.call.k, queries.call.v
        if self.stale:
            k, v = queries.history.k, queries.history.v  # type: ignore[assignment]
            if (
                k is None
                or v is None
                or k.shape[1:] != queries.call.k.shape[1:]
                or v.shape[1:] != queries.call.v.shape[1:]
            ):
                return queries.right
            to = np.where(to < len(k), to, -1)
        moves = self.condition.holds(queries.pairs).reshape(rows, heads, keys) & (to >= 0)
        index = np.where(to >= 0, to, 0)
        kv = (queries.own + self.kv) % queries.call.k.shape[1]
        scores, (a, b) = queries.own_scores, self.share
        if "k" in self.what:
            q = queries.call.q.double().cpu().numpy()[queries.rows]
            there = _einsum("thd,khd->thk", q, k.double().cpu().numpy()[index][:, kv]) * queries.call.scale
            scores = np.where(moves, a * scores + b * there, scores)
        seen = np.repeat(queries.visible[:, None], heads, 1).astype(float)
        weights = _normalised(seen, scores)
        if "v" not in self.what:
            return queries.of(queries.placed(weights))
        kept = queries.of(queries.placed(weights * np.where(moves, a, 1.0)))
        moved = _einsum("thk,khd->thd", weights * np.where(moves, b, 0.0), v.double().cpu().numpy()[index][:, kv])
        return kept + moved


def unmoved(call: AttentionCall) -> Ints:
    """Each packed key's own row."""
    return np.arange(call.k.shape[0])


@dataclass(frozen=True)
class Atom:
    """Something that may be mixed into an output: a fixed kind of weights.

    Attributes:
        words: in words.
        weights: (queries) -> weights of its own values, [rows, heads, total_k].
    """

    words: str
    weights: Callable[[Queries], Numbers] = field(compare=False)


def _only(queries: Queries, chosen: Flags) -> Numbers:
    found = np.repeat(chosen[:, None], queries.heads, 1).astype(float)
    return found / np.maximum(found.sum(-1, keepdims=True), 1.0)


def _own_key(queries: Queries) -> Flags:
    last = queries.visible.shape[1] - 1 - np.argmax(queries.visible[:, ::-1], 1)
    if not queries.call.causal:
        ends = [(q, k) for q, k in own_keys(queries.call)]
        last = np.array(
            [next(k.stop - q.stop + row for q, k in ends if q.start <= row < q.stop) for row in queries.rows]
        )
    return np.arange(queries.visible.shape[1]) == last[:, None]


ATOMS: tuple[Atom, ...] = (
    Atom("the mean of the values that the query sees", lambda q: _only(q, q.visible)),
    Atom("the value of the query's own token", lambda q: _only(q, _own_key(q))),
    Atom("the first value of its sequence", lambda q: _only(q, q.own_rows & (np.cumsum(q.own_rows, 1) == 1))),
    Atom("the mean of all values of its sequence", lambda q: _only(q, q.own_rows)),
)
"""What may be mixed into an output."""


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
        return self.share[0] * queries.right + self.share[1] * queries.of(queries.placed(self.atom.weights(queries)))


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
        rows, heads, keys = queries.own_scores.shape
        distance = np.abs((queries.pairs["pos"] - queries.pairs["j"]).reshape(rows, heads, keys))
        seen = np.repeat(queries.visible[:, None], heads, 1).astype(float)
        return queries.of(queries.placed(_normalised(seen, queries.own_scores + self.slope * distance)))


@dataclass(frozen=True)
class Dims(Effect):
    """Dimensions of the output, of Q or of K are zero, or those of other dimensions.

    Attributes:
        words: which, in words.
        source: (head_dim_v) -> for each dimension the one that it holds, int64; negative for zero.
    """

    words: str
    source: Callable[[int], Ints] = field(compare=False)
    cost: float = 1.0
    of: str = "the output"

    def outputs(self, queries: Queries) -> Numbers:
        if self.of != "the output":
            to = self.source(queries.call.q.shape[2])
            q = queries.call.q.double().cpu().numpy()[queries.rows]
            k = queries.call.k.double().cpu().numpy()[:, queries.own]
            if self.of == "Q":
                q = np.where(to >= 0, q[..., np.where(to >= 0, to, 0)], 0.0)
            else:
                k = np.where(to >= 0, k[..., np.where(to >= 0, to, 0)], 0.0)
            seen = np.repeat(queries.visible[:, None], queries.heads, 1).astype(float)
            return queries.of(queries.placed(_normalised(seen, queries.call.scale * _einsum("thd,khd->thk", q, k))))
        to = self.source(queries.right.shape[2])
        return np.where(to >= 0, queries.right[..., np.where(to >= 0, to, 0)], 0.0)


def _dims() -> tuple[Dims, ...]:
    found = [
        Dims(f"dimensions from {n} on are zero", lambda d, n=n: np.where(np.arange(d) < n, np.arange(d), -1))
        for n in (8, 16, 32, 48, 56, 60, 62, 63, 64, 80, 96, 112, 120, 127)
    ]
    found += [
        Dims(f"the last {n} dimensions are zero", lambda d, n=n: np.where(np.arange(d) < d - n, np.arange(d), -1), 1.2)
        for n in (1, 2, 4, 8, 16, 32)
    ]
    found += [
        Dims(f"the first {n} dimensions are zero", lambda d, n=n: np.where(np.arange(d) >= n, np.arange(d), -1), 1.2)
        for n in (1, 2, 4, 8, 16, 32, 64)
    ]
    found += [
        Dims(f"dimension d holds dimension (d {'+' if n > 0 else '-'} {abs(n)}) mod head_dim",
             lambda d, n=n: (np.arange(d) + n) % d, 1.3)
        for n in (1, -1, 2, -2, 3, -3, 4, -4, 8, -8, 16, -16, 32, -32)
    ]  # fmt: skip
    found += [
        Dims("the halves of the dimensions are swapped", lambda d: (np.arange(d) + d // 2) % d),
        Dims("dimensions are in reverse order", lambda d: np.arange(d)[::-1].copy()),
        *(Dims(f"dimensions are swapped in pairs that are {n} apart", lambda d, n=n: np.arange(d) ^ n) for n in (1, 2, 4, 8, 16)),
        Dims("even and odd dimensions are read as halves", lambda d: np.arange(d).reshape(-1, 2).T.ravel().copy()),
        Dims("halves of the dimensions are read as even and odd ones", lambda d: np.arange(d).reshape(2, -1).T.ravel().copy()),
        Dims("even dimensions are zero", lambda d: np.where(np.arange(d) % 2 == 1, np.arange(d), -1)),
        Dims("odd dimensions are zero", lambda d: np.where(np.arange(d) % 2 == 0, np.arange(d), -1)),
    ]  # fmt: skip
    return tuple(found)


DIMS = tuple(
    replace(one, of=of, cost=one.cost + 0.3 * (of != "the output"))
    for of in ("the output", "K", "Q")
    for one in _dims()
)
"""What may happen to the dimensions of V."""


@dataclass(frozen=True)
class Merged(Effect):
    """Parts of the keys are merged with wrong weights.

    Attributes:
        block: keys of a part; 0 for cached and new keys.
        law: "equal", all parts count alike; "base2" or "base-e", their log-sum-exp is taken for that of the other base ("cached base2"
            and so on, that of cached keys alone); "max", their largest score in place of their log-sum-exp; "next head",
            that of the next q head; "mean", each part's scores lose their mean over its keys' K.
    """

    block: int
    law: str
    cost: float = 1.5

    def outputs(self, queries: Queries) -> Numbers:
        seen = np.repeat(queries.visible[:, None], queries.heads, 1).astype(float)
        return queries.of(queries.placed(_normalised(seen, queries.own_scores + self.offsets(queries))))

    def offsets(self, queries: Queries) -> Numbers:
        """What is added to each score, [rows, heads, total_k]."""
        rows, heads, keys = queries.own_scores.shape
        starts = np.array(queries.call.cu_seqlens_k.tolist())
        of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        j = np.arange(keys) - starts[of]
        part = j // self.block if self.block else (j >= np.array(queries.call.prefixes)[of]).astype(np.int64)
        label = of * (part.max() + 1) + part
        found = np.zeros_like(queries.own_scores)
        logits = np.where(queries.visible[:, None], queries.own_scores, -np.inf)
        for one in np.unique(label):
            here = label == one
            if self.law == "mean":
                k = queries.call.k.double().cpu().numpy()[here].mean(0)[queries.own]  # [heads, dim]
                q = queries.call.q.double().cpu().numpy()[queries.rows]
                found[:, :, here] = -queries.call.scale * _einsum("thd,hd->th", q, k)[..., None]
                continue
            top = logits[:, :, here].max(-1)
            safe = np.where(np.isfinite(top), top, 0.0)
            with np.errstate(divide="ignore"):
                lse = np.log(np.exp(logits[:, :, here] - safe[..., None]).sum(-1)) + safe
            law, cached = self.law.removeprefix("cached "), self.law.startswith("cached ")
            if cached and part[here].any():
                continue
            off = {"equal": -lse, "max": np.where(np.isfinite(top), top, 0.0) - lse, "base2": lse * (1 / math.log(2) - 1), "base-e": lse * (math.log(2) - 1),
                   "next head": np.roll(lse, -1, 1) - lse}[law]  # fmt: skip
            found[:, :, here] = np.where(np.isfinite(off), off, 0.0)[..., None]
        return found


@dataclass(frozen=True)
class Known(Effect):
    """The effect of a known bug.

    Attributes:
        id: of the hypothesis, or of a rounding.
        about: what goes wrong, as a sentence without its full stop.
        compute: (call, rows) -> output.
    """

    id: str
    about: str
    compute: Compute = field(compare=False)
    cost: float = 3.0

    def outputs(self, queries: Queries) -> Numbers:
        out = self.compute(queries.call, torch.from_numpy(queries.rows).to(queries.call.q.device))
        if out is None:
            return queries.right
        found: Numbers = out.double().cpu().numpy()
        return found


@dataclass(frozen=True)
class Clause:
    """An effect, and the queries on which it shows.

    Attributes:
        effect: the effect.
        condition: on the queries.
        sometimes: share of the calls that meet the condition in which it shows; below 1, nothing that was looked at says in which.
    """

    effect: Effect
    condition: Condition = ALWAYS
    sometimes: float = 1.0

    @property
    def cost(self) -> float:
        """How far-fetched it is."""
        return self.effect.cost + self.condition.cost + 2.0 * (self.sometimes < 1)


@dataclass(frozen=True)
class Operator:
    """What a kernel computes: attention, changed by each clause where it shows; the first one that shows counts."""

    clauses: tuple[Clause, ...] = ()

    def uncertain(self, queries: Queries) -> Flags:
        """Queries on which a clause shows only sometimes, so that the right output is as good, bool [rows * heads]."""
        found = np.zeros(len(queries.rows) * queries.heads, bool)
        for clause in self.clauses:
            if clause.sometimes < 1:
                found |= clause.condition.holds(queries.table)
        return found

    def outputs(self, queries: Queries) -> Numbers:
        """The output of each query, [rows, heads, head_dim_v]."""
        found = queries.right.copy()
        open_ = np.ones(len(queries.rows) * queries.heads, bool)
        for clause in self.clauses:
            shows = clause.condition.holds(queries.table) & open_
            if shows.any():
                flat = shows.reshape(len(queries.rows), queries.heads)
                found[flat] = clause.effect.outputs(queries)[flat]
                open_ &= ~shows
        return found
