"""Dimensions that are lost: of the output, or of K."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from assay.harness.localize.reading import Flags, Numbers
from assay.harness.readout.features import Ints, joined
from assay.harness.readout.mining import ALWAYS, Condition, Literal, Term, mine
from assay.harness.readout.operators import Told
from assay.harness.readout.queries import Queries, einsum

Answer = tuple[Queries, Numbers, Flags]
"""Queries, what the kernel answered, [rows, heads, head_dim_v], and which of them are wrong, bool [rows * heads]."""


def _tail(queries: Queries, first: int) -> Numbers:
    k = queries.k * (np.arange(queries.k.shape[-1]) < first)
    return queries.attended(queries.call.scale * einsum("thd,khd->thk", queries.q, k[:, queries.own]))


TAILS: tuple[Told, ...] = tuple(
    Told(f"dims of K from {n} on are zero", _tail, (n,), 1.3) for n in (8, 16, 32, 48, 64, 80, 96, 112, 120, 127)
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


def lost_dims(answers: Sequence[Answer]) -> Iterator[Told]:
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
        if rule != ALWAYS:
            yield Told(f"dims of the output {_which(rule)} are zero", _without, (rule,), 0.5 + rule.cost)


def _without(queries: Queries, rule: Condition) -> Numbers:
    return queries.right * ~rule.holds(_table(queries.right.shape[-1]))


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
