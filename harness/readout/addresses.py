"""Explains rows of K and V that are read from the wrong place: the packed row that a kernel reads for a key, as start and index.

A wrong page table, stride or ring buffer reads key j from another row: from the start of another sequence, or at another index.
The weights show which rows were read: one by one if only V or only K comes from elsewhere, and otherwise how often each row
counts. The search finds expressions that give the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from assay.harness.attention.call import AttentionCall
from assay.harness.localize.reading import Flags, Numbers
from assay.harness.readout.conditions import Table
from assay.harness.readout.edges import Amount, Sum, amounts_of, plain_sums
from assay.harness.readout.features import Ints
from assay.harness.readout.forms import Fit
from assay.harness.readout.operators import Told
from assay.harness.readout.queries import Queries
from assay.harness.readout.samples import Sample, every

# Most rows to compare expressions with, and the fewest keys of an informative row.
_MOST_ROWS, _LEAST_KEYS = 40, 4
# Most expressions to try among those that give the rows that were read.
_RIVALS = 4
# Cost of an address in addition to its expression's: an equivalent map that is always tried comes first.
_COST = 2.0
# Tolerance for the number of times that a row counts to be a whole number.
_WHOLE = 2e-3
# Rows with more keys are skipped, since expressions are computed for each key.
_MOST_READ = 512
# (call) -> the packed row that each packed key is read from, int64 [total_k]; total_k for a row of zeros.
_Rows = Callable[[AttentionCall], Ints]


def moved(what: str, words: str, row: _Rows, cost: float = 1.0) -> Told:
    """Return the effect of reading rows of V, or of K and V, from other rows; `words` names them for key j, like "key j + 1"."""
    some = {"v": "V of key j is", "kv": "K and V of key j are"}[what]
    return Told(f"{some} read from {words}", _moved, (what, row), cost)


def _moved(queries: Queries, what: str, row: _Rows) -> Numbers:
    to, scores, v = row(queries.call), queries.own_scores, queries.values
    if "k" in what:
        scores = _padded(scores, -1)[..., to]
    return queries.attended(scores, _padded(v, 0)[to])


def _padded(x: Numbers, axis: int) -> Numbers:
    """Append a row of zeros."""
    return np.concatenate([x, np.zeros_like(x.take([0], axis))], axis)


def _key_table(call: AttentionCall) -> dict[str, Ints]:
    """Return the features of each packed key for addresses, int64 [total_k] each."""
    new, total = np.array(call.lens_q), np.array(call.lens_k)
    prefix, seqs = total - new, len(new)
    k_start, q_start = (np.array(x.tolist()[:-1]) for x in (call.cu_seqlens_k, call.cu_seqlens_q))
    before, two, after = (np.clip(np.arange(seqs) + by, 0, seqs - 1) for by in (-1, -2, 1))
    of = np.repeat(np.arange(seqs), total)
    by_sequence = {
        "seq": np.arange(seqs), "k_start": k_start, "q_start": q_start, "prefix": prefix, "new": new, "total": total,
        "first_total": np.full(seqs, total[0]), "first_prefix": np.full(seqs, prefix[0]), "first_new": np.full(seqs, new[0]),
        "most_total": np.full(seqs, total.max()), "most_new": np.full(seqs, new.max()),
        "previous_start": k_start[before], "next_start": k_start[after], "second_previous_start": k_start[two],
        "previous_total": np.where(np.arange(seqs) > 0, total[before], 0),
    }  # fmt: skip
    j = np.arange(len(of)) - k_start[of]
    return {name: column[of] for name, column in by_sequence.items()} | {"j": j, "left": total[of] - 1 - j}


_STRIDES = ("first_total", "first_prefix", "first_new", "most_total", "most_new", "total", "prefix", "new")
# Where a kernel may assume that a sequence begins: at its start in Q, at another sequence's start, at a stride times its index,
# or at a page.
_STARTS: tuple[Amount, ...] = (
    *(Amount(name, cost=cost) for name, cost in (("k_start", 0.2), ("q_start", 0.4), ("previous_start", 0.5), ("next_start", 0.6),
      ("second_previous_start", 0.8), ("prefix", 0.5), ("new", 0.5), ("total", 0.5), ("previous_total", 0.9))),
    *(Amount(name, cost=0.8, times="seq") for name in _STRIDES),
    *(Amount("k_start", how, size, 0.8) for how in ("up", "down") for size in (8, 16, 32, 64, 128)),
)  # fmt: skip
_SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Terms of an index: pages and rings, forwards and from the end.
_INDICES: tuple[Amount, ...] = (
    *amounts_of((("j", 0.2), ("left", 0.6)), _SIZES),
    *(Amount(name, cost=0.6) for name in ("prefix", "new", "total")),
    *(Amount("total", how, size, 1.0) for how in ("down", "mod") for size in (8, 16, 32, 64, 128)),
)


def _looked_for(part: _Part, at: Sum, call: AttentionCall) -> Ints:
    """Return the packed row read for each packed key if a part of its address is this sum, or `total_k` for zeros."""
    table, rows = _key_table(call), call.k.shape[0]
    row: Ints = at.of(table) + table[_OTHER_PART[part]]
    return np.where((row >= 0) & (row < rows), row, rows)


def _address_words(part: _Part, at: Sum) -> str:
    if part == "index":
        return f"key {at.words}"
    return f"packed row {at.words} + j" if at.amounts else "packed row j"


_Part = Literal["start", "index"]
# The correct part of an address, which is added to the wrong part.
_OTHER_PART: dict[_Part, str] = {"start": "j", "index": "k_start"}


@dataclass(frozen=True)
class _Row:
    """A row of a reading: the packed keys that it should see, their features, the number of keys of the call, and the rows read.

    `read` is the packed row that each key was read from: either sorted, with `rows` for zeros, or in order, with -1 for unknown.
    """

    keys: Ints
    table: Table
    rows: int
    read: Ints
    sorted: bool

    def _given(self, indices: Ints) -> Flags:
        """Return flags of the candidates that give the rows that were read: int64 [candidates, keys] -> bool [candidates]."""
        if self.sorted:
            return np.asarray((np.sort(indices, 1) == self.read).all(1))
        known = self.read >= 0
        return np.asarray((indices[:, known] == self.read[known]).all(1))


def addresses(readings: Sequence[Sample]) -> Iterable[Told]:
    """Yield effects that read V, or K and V, at a wrong address."""
    for what, forms in (("kv", ("keys", "keys-and-mass")), ("v", ("values",))):
        fits = every(readings, *forms)
        rows = [row for row in (_row(*fit) for fit in fits[:: len(fits) // _MOST_ROWS + 1]) if row is not None]
        rows.sort(key=lambda row: len(row.read))
        if len(rows) < 3:
            continue
        sums: dict[_Part, list[Sum]] = {"start": [Sum(()), *plain_sums(_STARTS)], "index": _index_sums()}
        options = [(part, at) for part, some in sums.items() for at in _matching(rows, some, part)]
        for part, at in sorted(options, key=lambda option: option[1].cost)[:_RIVALS]:
            yield moved(what, _address_words(part, at), partial(_looked_for, part, at), cost=_COST + at.cost)


def _index_sums() -> list[Sum]:
    single = [Sum(((1, a),), plus) for a in _INDICES for plus in (-1, 0, 1)]
    added = [Sum(((1, a), (1, b))) for n, a in enumerate(_INDICES) for b in _INDICES[n:]]
    return single + added + [Sum(((1, a), (-1, b))) for a in _INDICES for b in _INDICES if a is not b]


def _matching(rows: Sequence[_Row], sums: Sequence[Sum], part: _Part) -> list[Sum]:
    """Return the sums that give the rows that were read everywhere."""
    left = list(sums)
    for row in rows:
        if not left:
            break
        amounts = {amount: amount.of(row.table) for option in left for _, amount in option.amounts}
        zero = np.zeros_like(row.keys)
        values = np.array(
            [sum((sign * amounts[amount] for sign, amount in option.amounts), zero) + option.plus for option in left]
        )
        indices = values + row.table[_OTHER_PART[part]]
        indices = np.where((indices >= 0) & (indices < row.rows), indices, row.rows)
        left = [option for option, ok in zip(left, row._given(indices), strict=True) if ok]
    return left


def _row(reading: Sample, place: int, fit: Fit) -> _Row | None:
    queries, (t, h) = reading.queries, divmod(place, reading.queries.heads)
    should = np.flatnonzero(queries.visible[t])
    if fit.keys is None or not _LEAST_KEYS <= len(should) <= _MOST_READ:
        return None
    table, rows = {name: column[should] for name, column in _key_table(queries.call).items()}, len(fit.keys)
    if fit.form == "values":
        to = fit.keys[should].astype(np.int64)
        kv, row = np.divmod(to, rows)
        if (kv[to >= 0] != queries.own[h]).any():
            return None
        return _Row(should, table, rows, np.where(to >= 0, row, -1), False)
    blank = round(fit.phantom) if fit.form == "keys-and-mass" else 0
    if fit.form == "keys-and-mass" and (blank < 0 or abs(fit.phantom - blank) > _WHOLE * max(1, blank)):
        return None
    if (times := _times(fit.keys, len(should) - blank)) is None:
        return None
    return _Row(should, table, rows, np.repeat(np.arange(rows + 1), [*times, blank]), True)


def _times(factors: Numbers, keys: int) -> Ints | None:
    """Return how often each packed row counts if the total is `keys`: factors are known up to a common one. Else None."""
    if not np.isfinite(factors).all() or (factors < 0).any() or factors.sum() <= 0 or keys < 1:
        return None
    times = factors * (keys / factors.sum())
    whole = np.round(times)
    return whole.astype(np.int64) if np.abs(times - whole).max() < _WHOLE * max(1.0, times.max()) else None
