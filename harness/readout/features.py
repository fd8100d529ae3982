"""Features: the integers that rules refer to, for a query of a head, and for a pair of such a query and a key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.shapes import shape_of
from assay.harness.evidence.kernel_result import Tried
from assay.harness.localize.features import features
from assay.harness.localize.rules import meets
from assay.harness.readout.conditions import Table, Term

Ints = NDArray[np.int64]
_BLOCKS = (16, 32, 64, 128)
_RESIDUES = (2, 3, 4, 5, 7, 8, 16, 32, 64, 128)


def row_table(call: AttentionCall, rows: Sequence[int]) -> dict[str, Ints]:
    """Return the features of some queries for each q head, int64 [rows * num_q_heads] each, heads innermost."""
    heads, kv_heads = call.q.shape[1], call.k.shape[1]
    new, total = np.array(call.lens_q), np.array(call.lens_k)
    prefix, seqs = total - new, len(new)
    starts = np.array(call.cu_seqlens_q.tolist())
    row = np.repeat(np.asarray(rows, dtype=np.int64), heads)
    head = np.tile(np.arange(heads), len(rows))
    seq = np.searchsorted(starts, row, "right") - 1
    i = row - starts[seq]
    before, after = np.maximum(seq - 1, 0), np.minimum(seq + 1, seqs - 1)
    ones = np.ones_like(row)
    return {
        "tried": _meeting(call)[seq],
        "head": head, "kv": call.heads.kv_head(head), "member": head % call.heads.group, "heads": heads * ones,
        "kv_heads": kv_heads * ones, "group": call.heads.group * ones, "head_dim": call.q.shape[2] * ones,
        "layer": call.layer * ones, "decode": (call.phase == "decode") * ones, "causal": bool(call.causal) * ones,
        "window": max(call.spec.mask.window, 0) * ones, "seq": seq, "from_last": seqs - 1 - seq, "seqs": seqs * ones, "row": row,
        "i": i, "pos": i + prefix[seq], "after": new[seq] - 1 - i, "prefix": prefix[seq], "new": new[seq], "total": total[seq],
        "previous_total": np.where(seq > 0, total[before], 0), "previous_prefix": np.where(seq > 0, prefix[before], 0),
        "next_total": np.where(seq < seqs - 1, total[after], 0),
        "next_prefix": np.where(seq < seqs - 1, prefix[after], 0), "first_total": total[0] * ones,
        "first_prefix": prefix[0] * ones, "most_total": total.max() * ones, "most_new": new.max() * ones,
        "first_new": new[0] * ones, "least_prefix": prefix.min() * ones,
        "peers_after": call.heads.group - 1 - head % call.heads.group, "most_prefix": prefix.max() * ones,
        **_tiles(i, new[seq], prefix[seq], call.heads.group, max(call.spec.mask.window, 0)),
        "ranked_total": total[np.argsort(np.argsort(-total, kind="stable"), kind="stable")][seq],
    }  # fmt: skip


tried_condition: ContextVar[Tried | None] = ContextVar("tried_condition", default=None)
"""The condition under which the kernel is wrong, from experiments."""


def _meeting(call: AttentionCall) -> Ints:
    """Return flags of the sequences that meet the condition from experiments, int64 [batch] of 0 and 1; all 0 without one."""
    tried, shape = tried_condition.get(), shape_of(call)
    if tried is None:
        return np.zeros(len(call.lens_q), dtype=np.int64)
    known = [features(shape, b) for b in range(len(shape.lens))]
    return np.array([meets(tried, of) for of in known], dtype=np.int64)


# Sizes of tiles of queries, in new tokens.
_TILES = (16, 32, 64, 128)
# Rows of a packed tile, in which each new token has one row for each q head of a kv head.
_ROWS = (64, 128)
# Names of the sizes of tiles.
_TILE_NAMES = (*map(str, _TILES), *(f"packed_{rows}" for rows in _ROWS))


def _tiles(i: Ints, new: Ints, prefix: Ints, group: int, window: int) -> dict[str, Ints]:
    """Return the positions of the first and the last query of a query's tile of new tokens, and the first key in the window of
    the last (0 without a window), for each tile size.
    """
    columns: dict[str, Ints] = {}
    sizes = (*_TILES, *(max(1, rows // group) for rows in _ROWS))
    for name, size in zip(_TILE_NAMES, sizes, strict=True):
        columns[f"first_{name}"] = i // size * size + prefix
        columns[f"last_{name}"] = np.minimum(i // size * size + size, new) - 1 + prefix
        columns[f"low_{name}"] = np.where(window > 0, np.maximum(columns[f"last_{name}"] - window + 1, 0), 0)
    return columns


class Pairs(Mapping[str, Ints]):
    """The features of pairs of a query and a packed key, for each q head: int64 [rows * num_q_heads * total_k] each.

    They are computed on first use. In addition to the query's features, a pair has: ``j``, the key's index in its sequence;
    ``fresh``, its index among the new tokens of the query's sequence, negative for a cached key; ``ahead``, j minus the query's
    i; ``back``, the number of keys from it to the query's own; ``key_seq``, the index of its sequence in the batch; ``other``,
    that minus the query's; ``key_row``, its packed row; and ``left``, the number of later keys in its sequence.
    """

    OF_KEY = ("j", "left", "other", "key_seq", "key_row", "fresh", "ahead", "back")

    def __init__(self, call: AttentionCall, queries: Table) -> None:
        total = np.array(call.lens_k)
        self._of = np.repeat(np.arange(len(total)), total)
        starts = np.array(call.cu_seqlens_k.tolist())
        self._j = np.arange(int(total.sum())) - starts[self._of]
        self._left = total[self._of] - 1 - self._j
        self._queries, self._made = queries, dict[str, Ints]()

    def __getitem__(self, name: str) -> Ints:
        if name not in self._made:
            self._made[name] = self._column(name)
        return self._made[name]

    def _column(self, name: str) -> Ints:
        count, keys = len(self._queries["row"]), len(self._j)
        if name == "j":
            return np.tile(self._j, count)
        if name == "left":
            return np.tile(self._left, count)
        if name == "fresh":
            return self["j"] - self["prefix"]
        if name == "ahead":
            return self["j"] - self["i"]
        if name == "back":
            return self["pos"] - self["j"]
        if name == "key_row":
            return np.tile(np.arange(keys), count)
        if name == "key_seq":
            return np.tile(self._of, count)
        if name == "other":
            return np.tile(self._of, count) - np.repeat(self._queries["seq"], keys)
        return np.repeat(self._queries[name], keys)

    def __iter__(self) -> Iterator[str]:
        return iter((*self._queries, *self.OF_KEY))

    def __len__(self) -> int:
        return len(self._queries) + len(self.OF_KEY)


def _named(*terms: tuple[str, float]) -> list[Term]:
    return [Term(name, cost=cost, words=True) for name, cost in terms]


def _amounts(*terms: tuple[str, float]) -> list[Term]:
    return [Term(name, cost=cost) for name, cost in terms]


def _residues(name: str, cost: float, of: Iterable[int] = _RESIDUES) -> list[Term]:
    return [Term(name, modulo=m, cost=cost + 0.2 * (m not in _BLOCKS and m > 3)) for m in of]


def _in_blocks(name: str, cost: float) -> list[Term]:
    """Return terms for the blocks of an index: the block, and every second, third and fourth block."""
    blocks = [Term(name, block=b, cost=cost, words=True) for b in _BLOCKS]
    return blocks + [Term(name, block=b, modulo=m, cost=cost + 0.4) for b in _BLOCKS for m in (2, 3, 4)]


ROW_TERMS: tuple[Term, ...] = (
    *_named(("tried", 0.0), ("decode", 0.2), ("head", 0.3), ("kv", 0.35), ("causal", 0.4), ("layer", 0.5), ("member", 0.6)),
    *_amounts(("pos", 0.5), ("i", 0.5), ("after", 0.5), ("head", 0.7), ("kv", 0.8)),
    Term("i", "prefix", cost=1.2), Term("pos", "window", cost=0.6), Term("heads", "head", cost=0.7),
    *(term for name, cost in (("i", 0.9), ("pos", 0.9), ("after", 1.3)) for term in _residues(name, cost)),
    *(term for name in ("i", "pos") for term in _in_blocks(name, 0.9)),
    *_residues("head", 1.0, (2, 3, 4)),
)  # fmt: skip
"""Terms of rules on queries: the place in the sequence, and whether the sequence meets the condition from experiments."""
# Edges that a tile or a page moves: a rounded length or position, or an index that restarts in each tile.
_ROUNDED: tuple[tuple[str, str, tuple[Literal["up", "down", "mod"], ...]], ...] = (
    ("j", "total", ("up", "down")), ("j", "prefix", ("up", "down")), ("j", "pos", ("up", "down")),
    ("j", "least_prefix", ("down",)), ("fresh", "i", ("up", "down", "mod")),
    ("fresh", "new", ("up", "down")), ("ahead", "prefix", ("up", "down", "mod")), ("i", "fresh", ("mod",)), ("pos", "j", ("mod",)),
)  # fmt: skip
PAIR_TERMS: tuple[Term, ...] = (
    Term("pos", "j", cost=0.1), Term("j", "prefix", cost=0.2), Term("j", "i", cost=0.3), Term("j", cost=0.2),
    Term("left", cost=0.3), Term("other", cost=0.2), Term("key_seq", cost=0.5),
    Term("key_row", cost=1.0), Term("j", "new", cost=0.9), Term("j", "total", cost=0.9),
    Term("j", "least_prefix", cost=1.2), Term("j", "previous_prefix", cost=1.2), Term("j", "next_prefix", cost=1.3),
    Term("j", "first_prefix", cost=1.2), Term("j", "first_total", cost=1.2),
    Term("j", "previous_total", cost=1.3),
    Term("left", "new", cost=1.2), Term("left", "i", cost=1.2), Term("back", "window", cost=0.3),
    *(Term("ahead", name, cost=0.9) for name in ("previous_prefix", "next_prefix", "first_prefix")),
    *(Term(name, minus, rounding=rounding, size=b, cost=0.8 + 0.2 * (rounding == "mod"))
      for name, minus, roundings in _ROUNDED for rounding in roundings for b in _BLOCKS),
    *(Term("fresh", "i", block=b, cost=0.7) for b in _BLOCKS),
    *(Term("j", f"{end}_{size}", block=b, cost=0.9 + 0.2 * (b == 1))
      for end in ("first", "last", "low") for size in _TILES for b in (1, size)),
    *(Term("pos", "j", block=b, cost=0.7) for b in _BLOCKS), *(Term("j", "total", block=b, cost=0.7) for b in _BLOCKS),
    *(Term("j", "prefix", block=b, cost=0.9) for b in _BLOCKS), *(Term("i", "j", block=b, cost=0.9) for b in _BLOCKS),
    *_residues("j", 0.7), *_in_blocks("j", 0.6), *(Term("pos", "j", modulo=m, cost=0.9) for m in _RESIDUES),
    *(Term("j", "prefix", modulo=m, cost=1.2) for m in _RESIDUES), *_residues("left", 1.2),
    *(replace(term, single=True, cost=term.cost + 0.3) for term in ROW_TERMS),
)  # fmt: skip
"""Terms of rules on pairs of a query and a key."""


def joined(tables: Sequence[Table]) -> dict[str, Ints]:
    """Concatenate tables."""
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def chosen(table: Table, which: Ints | NDArray[np.bool_]) -> dict[str, Ints]:
    """Select examples of a table."""
    return {name: column[which] for name, column in table.items()}
