"""Dimensions that are lost or in the wrong place: of the output, of Q or of K."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from assay.harness.localize.reading import Numbers
from assay.harness.readout.features import Ints
from assay.harness.readout.mining import Condition, Literal, Term, mine
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Flags, Queries, einsum
from assay.harness.readout.sources import shift

Answer = tuple[Queries, Numbers, Flags]
"""Queries, what the kernel answered, [rows, heads, head_dim_v], and which of them are wrong, bool [rows * heads]."""


@dataclass(frozen=True)
class Dims(Effect):
    """Dimensions of the output, of Q or of K are zero, or those of other dimensions.

    Attributes:
        words: what becomes of them, such as "the last 8 dims of {} are zero"; the braces stand for the output, Q or K.
        source: (head_dim) -> for each dimension the one that it holds, int64 [head_dim]; negative for zero.
        of: "the output", "Q" or "K".
    """

    words: str
    source: Callable[[int], Ints] = field(compare=False)
    cost: float = 1.0
    of: str = "the output"

    def outputs(self, queries: Queries) -> Numbers:
        if self.of == "the output":
            return self._moved(queries.right)
        q, k = queries.q, queries.k
        if self.of == "Q":
            q = self._moved(q)
        else:
            k = self._moved(k)
        return queries.attended(queries.call.scale * einsum("thd,khd->thk", q, k[:, queries.own]))

    def _moved(self, x: Numbers) -> Numbers:
        to = self.source(x.shape[-1])
        return np.where(to >= 0, x[..., np.maximum(to, 0)], 0.0)


def _below(n: int, dims: int) -> Ints:
    """Dimensions below n."""
    return np.where(np.arange(dims) < n, np.arange(dims), -1)


def _but_last(n: int, dims: int) -> Ints:
    return _below(dims - n, dims)


def _from(n: int, dims: int) -> Ints:
    return np.where(np.arange(dims) >= n, np.arange(dims), -1)


def _rolled(by: int, dims: int) -> Ints:
    return (np.arange(dims) + by) % dims


def _halves_swapped(dims: int) -> Ints:
    return _rolled(dims // 2, dims)


def _reversed(dims: int) -> Ints:
    return np.arange(dims)[::-1].copy()


def _flipped(bit: int, dims: int) -> Ints:
    to = np.arange(dims) ^ bit
    return np.where(to < dims, to, -1)


def _deinterleaved(dims: int) -> Ints:
    return np.arange(dims).reshape(-1, 2).T.ravel().copy()


def _interleaved(dims: int) -> Ints:
    return np.arange(dims).reshape(2, -1).T.ravel().copy()


def _only(parity: int, dims: int) -> Ints:
    return np.where(np.arange(dims) % 2 == parity, np.arange(dims), -1)


def _plural(n: int) -> str:
    return f"{n} dims of {{}} are" if n > 1 else "dim of {} is"


_OF_OUTPUT: tuple[Dims, ...] = (
    *(Dims(f"dims of {{}} from {n} on are zero", partial(_below, n))
      for n in (8, 16, 32, 48, 56, 60, 62, 63, 64, 80, 96, 112, 120, 127)),
    *(Dims(f"the last {_plural(n)} zero", partial(_but_last, n), 1.2) for n in (1, 2, 4, 8, 16, 32)),
    *(Dims(f"the first {_plural(n)} zero", partial(_from, n), 1.2) for n in (1, 2, 4, 8, 16, 32, 64)),
    *(Dims(f"dim d of {{}} holds dim ({shift('d', by)}) mod head_dim", partial(_rolled, by), 1.3)
      for n in (1, 2, 3, 4, 8, 16, 32) for by in (n, -n)),
    Dims("the halves of the dims of {} are swapped", _halves_swapped),
    Dims("the dims of {} are in reverse order", _reversed),
    *(Dims(f"dims d and d XOR {n} of {{}} are swapped", partial(_flipped, n)) for n in (1, 2, 4, 8, 16)),
    Dims("the dims of {} are de-interleaved: even ones first, then odd ones", _deinterleaved),
    Dims("the dims of {} are interleaved: those of the two halves alternate", _interleaved),
    Dims("even dims of {} are zero", partial(_only, 1)),
    Dims("odd dims of {} are zero", partial(_only, 0)),
)  # fmt: skip
_FARTHER = 0.3
"""What a fault of Q or K costs more: it is only seen through the scores."""
DIMS: tuple[Dims, ...] = (
    *_OF_OUTPUT,
    *(replace(one, of=of, cost=one.cost + _FARTHER) for of in ("K", "Q") for one in _OF_OUTPUT),
)
"""What may happen to dimensions: a mask on head_dim that ends at a vector, a warp's width or one early; lanes that are swapped,
rolled or in another order, as by a wrong swizzle, or a rotary layout of halves that is read as pairs."""


DIM_TERMS = (
    Term("d", cost=0.1), Term("left", cost=0.3),
    *(Term("d", modulo=m, cost=0.7) for m in (2, 3, 4, 8, 16, 32)),
    *(Term("d", block=b, cost=0.6, words=True) for b in (8, 16, 32)),
)  # fmt: skip
"""What a rule on dims may speak of: d, how many come after it, its rest in vectors and tiles, and the tile."""


def dim_table(count: int) -> dict[str, Ints]:
    """What rules on dims may speak of: each dim and how many come after it, int64 [count]."""
    return {"d": np.arange(count), "left": np.arange(count)[::-1]}


def lost_dims(answers: Sequence[Answer]) -> Iterator[Dims]:
    """Dims of the output that are zero while the others are right, by the rules that say which."""
    lost: dict[int, Flags] = {}
    for queries, actual, bad in answers:
        given, expected = (x.reshape(len(bad), -1)[bad] for x in (actual, queries.right))
        size = np.abs(expected).mean(-1, keepdims=True)
        zero, kept = np.abs(given) < 1e-9 * size, np.abs(given - expected) < 1e-3 * size
        partly = (zero | kept).all(-1) & zero.any(-1) & ~zero.all(-1)
        if partly.any():
            lost.setdefault(given.shape[1], zero[partly][0])
    if not lost:
        return
    tables = [dim_table(count) for count in lost]
    table = {name: np.concatenate([one[name] for one in tables]) for name in tables[0]}
    for rule in mine(table, np.concatenate(list(lost.values())), DIM_TERMS, 3):
        if not rule.always:
            yield Dims(f"dims of {{}} {_which(rule)} are zero", partial(_without, rule), 0.5 + rule.cost)


def _without(rule: Condition, dims: int) -> Ints:
    return np.where(rule.holds(dim_table(dims)), -1, np.arange(dims))


def _which(rule: Condition) -> str:
    return ("but those " if rule.negated else "") + " and ".join(dims_where(literal) for literal in rule.literals)


def dims_where(literal: Literal) -> str:
    """Dims that a literal holds for, in words: "from 64 on"."""
    term, op, value = literal.term, literal.op, literal.value
    if term.name == "left" and not term.modulo and op in ("<", ">="):
        return f"among the last {value}" if op == "<" else f"but the last {value}"
    if term.block > 1:
        return f"{'in' if op == '==' else 'outside of'} block {value} of {term.block}"
    if term.modulo:
        return f"with d mod {term.modulo} {'=' if op == '==' else op} {value}"
    return {">=": f"from {value} on", "<": f"below {value}", "==": f"d = {value}", "!=": f"but d = {value}"}[op]
