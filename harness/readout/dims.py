"""Dimensions that are lost: of the output, or of K."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from assay.harness.localize.reading import Flags, Numbers
from assay.harness.readout.features import Ints, joined
from assay.harness.readout.mining import Condition, Literal, Term, mine
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Queries, einsum

Answer = tuple[Queries, Numbers, Flags]
"""Queries, what the kernel answered, [rows, heads, head_dim_v], and which of them are wrong, bool [rows * heads]."""


@dataclass(frozen=True)
class Dims(Effect):
    """Dimensions of the output or of K are zero.

    Attributes:
        words: what becomes of them, such as "dims of {} from 8 on are zero"; the braces stand for the output or K.
        kept: (head_dim) -> which dimensions are not zero, bool [head_dim].
        of: "the output" or "K".
    """

    words: str
    kept: Callable[[int], Flags] = field(compare=False)
    cost: float = 1.0
    of: str = "the output"

    def outputs(self, queries: Queries) -> Numbers:
        if self.of == "the output":
            return queries.right * self.kept(queries.right.shape[-1])
        k = queries.k * self.kept(queries.k.shape[-1])
        return queries.attended(queries.call.scale * einsum("thd,khd->thk", queries.q, k[:, queries.own]))


def _below(n: int, dims: int) -> Flags:
    return np.arange(dims) < n


TAILS: tuple[Dims, ...] = tuple(
    Dims(f"dims of {{}} from {n} on are zero", partial(_below, n), 1.3, "K")
    for n in (8, 16, 32, 48, 64, 80, 96, 112, 120, 127)
)
"""Dims of K that are not multiplied with those of Q: a loop over head_dim that ends at a vector or a tile, or one early."""
_TERMS = (
    Term("d", cost=0.1), Term("left", cost=0.3),
    *(Term("d", modulo=m, cost=0.7) for m in (2, 3, 4, 8, 16, 32)),
    *(Term("d", block=b, cost=0.6, words=True) for b in (8, 16, 32)),
)  # fmt: skip
"""What a rule on dims may speak of: d, how many come after it, its rest in vectors and tiles, and the tile."""


def _table(count: int) -> dict[str, Ints]:
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
    table = joined([_table(count) for count in lost])
    for rule in mine(table, np.concatenate(list(lost.values())), _TERMS, 3):
        if not rule.always:
            yield Dims(f"dims of {{}} {_which(rule)} are zero", partial(_without, rule), 0.5 + rule.cost)


def _without(rule: Condition, dims: int) -> Flags:
    return ~rule.holds(_table(dims))


def _which(rule: Condition) -> str:
    return ("but those " if rule.negated else "") + " and ".join(_where(literal) for literal in rule.literals)


def _where(literal: Literal) -> str:
    term, op, value = literal.term, literal.op, literal.value
    if term.name == "left" and not term.modulo and op in ("<", ">="):
        return f"among the last {value}" if op == "<" else f"but the last {value}"
    if term.block > 1:
        return f"{'in' if op == '==' else 'outside of'} block {value} of {term.block}"
    if term.modulo:
        return f"with d mod {term.modulo} {'=' if op == '==' else op} {value}"
    return {">=": f"from {value} on", "<": f"below {value}", "==": f"d = {value}", "!=": f"but d = {value}"}[op]
