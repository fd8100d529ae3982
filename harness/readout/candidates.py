"""From forms to effects: which effects could have made the weights that were read."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.fault_effects import denominator_rounded, keys_rounded, scores_rounded, weights_rounded
from assay.harness.attention.hypotheses import FAMILY, changed_output
from assay.harness.readout.effects import (
    ATOMS,
    DIMS,
    SCALES,
    SOURCES,
    TIMES,
    Biased,
    Constant,
    Effect,
    Flags,
    FromElsewhere,
    Kept,
    KeyFactors,
    Known,
    Limited,
    Merged,
    Moved,
    OtherKvHead,
    Part,
    Plus,
    Queries,
    Scale,
    Times,
    WithAtom,
    constant_formula,
    unmoved,
)
from assay.harness.readout.features import PAIR_TERMS, ROW_TERMS, Ints, chosen, joined
from assay.harness.readout.forms import Fit
from assay.harness.readout.mining import ALWAYS, Condition, Literal, Term, Value, mine, mine_values
from assay.harness.readout.reading import Numbers


@dataclass(frozen=True)
class Explained:
    """The forms that fit the rows of one reading.

    Attributes:
        queries: the rows.
        fits: of each row and head, [rows * heads].
        right: which of them are right, bool [rows * heads].
    """

    queries: Queries
    fits: tuple[tuple[Fit, ...], ...]
    right: Flags

    def having(self, *forms: str) -> list[tuple[int, Fit]]:
        """Places of rows and heads with one of these forms, and the fit."""
        return [(place, fit) for place, fits in enumerate(self.fits) for fit in fits if fit.form in forms]


def effects_of(readings: Sequence[Explained]) -> Iterable[Effect]:
    """Effects that could have made these weights, without conditions."""
    yield from _constants(readings)
    yield from _scales(readings)
    yield from _bent(readings)
    yield from _masses(readings)
    yield from _kv_heads(readings)
    yield from _sources(readings)
    yield from _moves(readings)
    yield from _merges(readings)


def _every(readings: Sequence[Explained], *forms: str) -> list[tuple[Explained, int, Fit]]:
    return [(one, place, fit) for one in readings for place, fit in one.having(*forms)]


def _constants(readings: Sequence[Explained]) -> Iterable[Effect]:
    if _every(readings, "zero"):
        yield Constant(0.0)
    numbers = Counter(round(fit.number, 5) for _, _, fit in _every(readings, "constant"))
    for value, _ in numbers.most_common(3):
        yield Constant(value, cost=1.0)


def _close(a: float, b: float, by: float = 2e-3) -> bool:
    return math.isclose(a, b, rel_tol=by, abs_tol=1e-9)


def _scales(readings: Sequence[Explained]) -> Iterable[Effect]:
    found = _every(readings, "scale")
    if not found:
        return
    for formula in SCALES:
        hits = [_close(float(formula.of(one.queries)[place]), fit.number) for one, place, fit in found]
        if sum(hits) >= max(2, 0.5 * len(hits)):
            yield Scale(formula, cost=0.8)
    for value in _common([fit.number for _, _, fit in found]):
        yield Scale(constant_formula(value), cost=1.2)


def _bent(readings: Sequence[Explained]) -> Iterable[Effect]:
    """Soft caps, and biases by distance."""
    if caps := [fit.number for _, _, fit in _every(readings, "capped")]:
        for value in _common([float(f"{cap:.2g}") for cap in caps], 2):
            yield Limited("scores", value, "capped")
    if slopes := [fit.number for _, _, fit in _every(readings, "biased")]:
        for value in _common([float(f"{slope:.3g}") for slope in slopes], 2):
            yield Biased(value)


def _common(numbers: Sequence[float], most: int = 3) -> list[float]:
    """Numbers that occur often, up to 0.05 %: medians of groups, the largest group first."""
    ordered = np.sort(np.asarray(numbers))
    groups = np.split(ordered, np.flatnonzero(np.diff(ordered) > 5e-4 * np.abs(ordered[1:]) + 1e-9) + 1)
    groups.sort(key=len, reverse=True)
    return [_rounded(float(np.median(group))) for group in groups[:most]]


def _rounded(value: float) -> float:
    """A number with few digits, if it is one."""
    if abs(value - 1) < 2e-2:  # its distance from 1 is what matters
        return 1 + float(f"{value - 1:.2g}")
    for digits in (2, 3, 4):
        if value and _close(float(f"{value:.{digits}g}"), value, 3e-4):
            return float(f"{value:.{digits}g}")
    return value


def _masses(readings: Sequence[Explained]) -> Iterable[Effect]:
    found = [
        (one, place, fit)
        for one, place, fit in _every(readings, "keys-and-mass")
        if fit.keys is not None and (np.isclose(fit.keys, 1) | (fit.keys == 0)).all()
    ]
    if not found:
        return
    for formula in TIMES:
        yield Times(formula, cost=1.0)
    for value in _common([fit.mass for _, _, fit in found]):
        yield Times(constant_formula(value), cost=1.2)
    table = joined([chosen(one.queries.table, np.array([place])) for one, place, _ in found])
    counts = np.array([fit.phantom for _, _, fit in found])
    whole = np.abs(counts - np.round(counts)) < 0.02 * np.maximum(1, np.abs(counts))
    if whole.mean() < 0.6 or (np.round(counts[whole]) <= 0).mean() > 0.2:
        return
    exact = chosen(table, whole)
    wanted = np.round(counts[whole]).astype(np.int64)
    for value, _ in Counter(wanted.tolist()).most_common(2):
        yield KeyFactors((), phantom=Value(None, int(value)), cost=1.4)
    for value in mine_values(exact, wanted, PHANTOMS, 2):
        yield KeyFactors((), phantom=value, cost=1.6)


PHANTOMS = tuple(term for term in ROW_TERMS if not term.words and not term.minus)
"""What the number of keys that are counted in vain may follow."""


def general_effects(outputs: Sequence[tuple[Queries, Numbers, Flags]]) -> Iterable[Effect]:
    """Effects that are tried whatever was read.

    Args:
        outputs: queries, what the kernel answered, and which of them are wrong.
    """
    yield from DIMS
    for formula in TIMES:
        yield Times(formula, cost=1.5)
    yield from _blends(outputs)
    off: list[tuple[float, float]] = []
    shares: list[tuple[float, float]] = []
    for queries, actual, bad in outputs:
        before = queries.history.output
        if before is not None and before.shape == (*queries.call.q.shape[:2], queries.right.shape[2]):
            columns = (
                np.stack([queries.right, before.numpy()[queries.rows]], -1).reshape(len(bad), -1, 2)[bad].reshape(-1, 2)
            )
            wanted = actual.reshape(len(bad), -1)[bad].ravel()
            if np.isfinite(wanted).all() and np.isfinite(columns).all():
                a, b = np.linalg.lstsq(columns, wanted, rcond=None)[0]
                shares.append((round(float(a), 3) + 0.0, round(float(b), 3) + 0.0))
        with np.errstate(invalid="ignore"):
            gap = (actual - queries.right).reshape(len(bad), -1)[bad]
        flat = np.ptp(gap, axis=-1) < 1e-3 * np.abs(gap).max(-1)
        off += [(float(value), queries.mean_size) for value in gap[flat].mean(-1)[:4]]
    for share, _ in Counter(shares).most_common(2):
        yield Kept(share)
    for value in _common([value for value, _ in off], 1) if off else []:
        yield Plus(value)
    for value in _common([value / size for value, size in off], 1) if off else []:
        yield Plus(value, relative=True)
    for (words, row), what in itertools.product(MAPS, ("kv", "v", "k")):
        for condition in (ALWAYS, _CACHED, _NEW):
            yield Moved(what, condition, words, row, cost=2.0 + condition.cost + 0.2 * (what != "kv"))


def _shares(
    outputs: Sequence[tuple[Queries, Numbers, Flags]], other: Callable[[Queries], Numbers]
) -> list[tuple[float, float]]:
    """By which shares of the right output and another one the wrong outputs are made, as far as they are."""
    found: Counter[tuple[float, float]] = Counter()
    for queries, actual, bad in outputs[:4]:
        columns = np.stack([queries.right, other(queries)], -1).reshape(len(bad), -1, 2)
        wanted = actual.reshape(len(bad), -1)
        for place in np.flatnonzero(bad)[:6]:
            if np.isfinite(wanted[place]).all():
                (a, b), rest, rank, _ = np.linalg.lstsq(columns[place], wanted[place], rcond=None)
                if rank == 2 and rest.size and rest[0] < 1e-7 * (wanted[place] ** 2).sum() and abs(b) > 1e-3:
                    found[round(float(a), 3) + 0.0, round(float(b), 3) + 0.0] += 1
    return [share for share, _ in found.most_common(2)]


def _blends(outputs: Sequence[tuple[Queries, Numbers, Flags]]) -> Iterable[Effect]:
    """Mixtures whose shares follow from the outputs."""
    for atom in ATOMS:
        for share in _shares(outputs, lambda q, atom=atom: q.of(q.placed(atom.weights(q)))):
            yield WithAtom(atom, share)
    for words, row in MAPS:
        whole = Moved("v", ALWAYS, words, row)
        for share in _shares(outputs, whole.outputs):
            yield replace(whole, share=share, cost=2.2)
        yield Moved("k", ALWAYS, words, row, share=(0.5, 0.5), cost=2.4)
        yield Moved("kv", ALWAYS, words, row, share=(0.5, 0.5), cost=2.4)
    for source in SOURCES:
        if source.cost <= 1.0:
            yield FromElsewhere(source, "query", (0.5, 0.5), cost=2.0 + source.cost)
            weights = FromElsewhere(source, "weights", cost=2.0 + source.cost)
            for share in _shares(outputs, weights.outputs):
                yield replace(weights, share=share)
    for what, condition in itertools.product(("k", "v", "kv"), (ALWAYS, *_FIRST)):
        yield Moved(
            what, condition, "the packed row of the call before", unmoved, stale=True, cost=2.0 + condition.cost
        )


_FIRST = tuple(Condition((Literal(Term("j", cost=0.2), "<", n),)) for n in (1, 2, 4, 8, 16))
_CACHED = Condition((Literal(Term("j", "prefix", cost=0.2), "<", 0),))
_NEW = Condition((Literal(Term("j", "prefix", cost=0.2), ">=", 0),))


def _kv_heads(readings: Sequence[Explained]) -> Iterable[Effect]:
    found = _every(readings, "kv")
    if not found:
        return
    table = joined([chosen(one.queries.table, np.array([place])) for one, place, _ in found])
    wanted, count = np.array([fit.kv for _, _, fit in found]), table["kv_heads"]
    options = [Value(Term("kv"), by) for by in (1, -1, 2)] + [Value(Term("head")), Value(Term("member"))]
    options += [Value(None, int(kv)) for kv in np.unique(wanted)[:4]]
    for value in options:
        if (value.of(table) % count == wanted).mean() > 0.4:
            yield OtherKvHead(value, cost=0.8 + value.cost)


def _sources(readings: Sequence[Explained]) -> Iterable[Effect]:
    for form in ("output", "query", "mixture"):
        sets: dict[tuple[int, int], set[tuple[int, int]]] = {}
        shares: Counter[tuple[float, float]] = Counter()
        for number, one in enumerate(readings):
            for place, fit in one.having(form):
                sets.setdefault((number, place), set()).add(fit.source)
                shares[round(fit.share[0], 3), round(fit.share[1], 3)] += 1
        if not sets:
            continue
        hits: list[tuple[float, int]] = []
        for index, source in enumerate(SOURCES):
            count = 0
            for number, one in enumerate(readings):
                rows, heads = source.row(one.queries), source.head(one.queries)
                count += sum((int(rows[p]), int(heads[p])) in wanted for (n, p), wanted in sets.items() if n == number)
            if count >= max(1, 0.3 * len(sets)):
                hits.append((count - 0.01 * source.cost, index))
        for _, index in sorted(hits, reverse=True)[:8]:
            source = SOURCES[index]
            if form != "mixture":
                yield FromElsewhere(source, form, cost=1.0 + source.cost + 0.3 * (form == "query"))
            else:
                for share, _ in shares.most_common(2):
                    yield FromElsewhere(source, share=share, cost=2.0 + source.cost)


def _packed(call: AttentionCall) -> tuple[Ints, Ints, Ints]:
    starts = np.array(call.cu_seqlens_k.tolist())
    of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return starts, of, np.arange(starts[-1]) - starts[of]


def _to_index(to: Callable[[Ints], Ints], call: AttentionCall) -> Ints:
    starts, of, j = _packed(call)
    target = to(j)
    length = np.diff(starts)[of]
    return np.where((target >= 0) & (target < length), starts[of] + target, -1)


def _clamped(by: int, call: AttentionCall) -> Ints:
    starts, of, j = _packed(call)
    return starts[of] + np.clip(j + by, 0, np.diff(starts)[of] - 1)


def _wrapped(by: int, call: AttentionCall) -> Ints:
    starts, of, j = _packed(call)
    return starts[of] + (j + by) % np.diff(starts)[of]


def _packed_shift(by: int, call: AttentionCall) -> Ints:
    starts, _, _ = _packed(call)
    to = np.arange(starts[-1]) + by
    return np.where((to >= 0) & (to < starts[-1]), to, -1)


def _of_sequence(by: int, call: AttentionCall) -> Ints:
    starts, of, j = _packed(call)
    to = of + by
    inside = (to >= 0) & (to < len(starts) - 1)
    safe = np.clip(to, 0, len(starts) - 2)
    return np.where(inside & (j < np.diff(starts)[safe]), starts[safe] + j, -1)


def _of_first(call: AttentionCall) -> Ints:
    starts, _, j = _packed(call)
    return np.where(j < starts[1], j, -1)


def _from_end(call: AttentionCall) -> Ints:
    starts, of, _ = _packed(call)
    return starts[of + 1] - 1


def _newest(by: int, call: AttentionCall) -> Ints:
    """Keys from the first one on are the newest `by` ones."""
    starts, of, j = _packed(call)
    length = np.diff(starts)[of]
    return np.where(length >= by, starts[of] + (length - by + j) % np.maximum(length, 1), -1)


Map = tuple[str, Callable[[AttentionCall], Ints]]
MAPS: tuple[Map, ...] = (
    *((f"key j {'+' if by > 0 else '-'} {abs(by)}", partial(_to_index, lambda j, by=by: j + by))
      for by in (1, -1, 2, -2, 3, -3, 4, -4, 8, -8, 16, -16, 32, -32, 64, -64, 128, -128)),
    *((f"key j {'+' if by > 0 else '-'} {abs(by)}, or of the {'last' if by > 0 else 'first'} one where there is none",
       partial(_clamped, by)) for by in (1, -1, 2, -2, 3, -3, 4, -4, 8, -8, 16, -16)),
    *((f"key j {'+' if by > 0 else '-'} {abs(by)}, around the end", partial(_wrapped, by)) for by in (1, -1, 2, -2)),
    *((f"key j mod {n}", partial(_to_index, lambda j, n=n: j % n)) for n in (8, 16, 32, 64, 128)),
    *((f"the first key of its block of {n}", partial(_to_index, lambda j, n=n: j // n * n)) for n in (4, 8, 16, 32, 64)),
    *((f"its neighbour in pairs of {n}", partial(_to_index, lambda j, n=n: j ^ n)) for n in (1, 2, 4, 8, 16, 32, 64)),
    ("the first key of the sequence", partial(_to_index, lambda j: 0 * j)), ("the newest key", _from_end),
    *((f"the newest {n} keys", partial(_newest, n)) for n in (16, 32, 64)),
    *((f"the packed row {abs(by)} {'further' if by > 0 else 'before'}", partial(_packed_shift, by)) for by in (1, -1)),
    ("the same key of the sequence before", partial(_of_sequence, -1)),
    ("the same key of the sequence after", partial(_of_sequence, 1)), ("the same key of the first sequence", _of_first),
)  # fmt: skip
"""Places that rows of K and V may be read from."""


def _moves(readings: Sequence[Explained]) -> Iterable[Effect]:
    for form, what in (("values", "v"), ("scored", "k")):
        found = [(one, place, fit) for one, place, fit in _every(readings, form) if fit.keys is not None]
        if not found:
            continue
        options: list[tuple[float, Moved]] = []
        for (words, row), kv in itertools.product((("the same key", unmoved), *MAPS, *_seen_maps(found)), (0, 1, -1)):
            if row is unmoved and not kv:
                continue
            hits = total = 0
            tables, positive = [], []
            for one, place, fit in found[:60]:
                assert fit.keys is not None
                queries = one.queries
                keys, count = queries.call.k.shape[0], queries.call.k.shape[1]
                own = int(queries.own[place % queries.heads])
                to = row(queries.call)
                target = ((own + kv) % count) * keys + to
                home = own * keys + np.arange(keys)
                known = (fit.keys >= 0) & (to >= 0) & (target != home)
                moved = known & (fit.keys == target)
                astray = (fit.keys >= 0) & (fit.keys != home)
                hits, total = hits + int((moved & astray).sum()), total + int(astray.sum())
                inside = np.flatnonzero(known) + place * keys
                tables.append(chosen(queries.pairs, inside))
                positive.append((moved & astray)[known])
            if not total or hits < 0.6 * total:
                continue
            table, flags = joined(tables), np.concatenate(positive)
            if not flags.any():
                continue
            for condition in [ALWAYS, *mine(table, flags, PAIR_TERMS, 2)]:
                cost = 1.5 + condition.cost + 0.5 * bool(kv)
                where = words + (f" of the {'next' if kv > 0 else 'previous'} kv head" if kv else "")
                options.append((hits - cost, Moved(what, condition, where, row, kv, cost=cost)))
        for _, effect in sorted(options, key=lambda one: -one[0])[:8]:
            yield effect
            yield replace(effect, what="kv")


def _seen_maps(found: Sequence[tuple[Explained, int, Fit]]) -> list[Map]:
    """Shifts that rows were seen to have, besides those that are always tried."""
    shifts: Counter[int] = Counter()
    for one, place, fit in found[:60]:
        assert fit.keys is not None
        home = int(one.queries.own[place % one.queries.heads]) * len(fit.keys) + np.arange(len(fit.keys))
        moved = (fit.keys >= 0) & (fit.keys != home)
        shifts.update((fit.keys - home)[moved].astype(int).tolist())
    known = {by for by, _ in shifts.most_common(3) if abs(by) not in (1, 2, 3, 4, 8, 16, 32, 64, 128)}
    return [(f"key j {'+' if by > 0 else '-'} {abs(by)}", partial(_to_index, lambda j, by=by: j + by)) for by in known]


def _merges(readings: Sequence[Explained]) -> Iterable[Effect]:
    if _every(readings, "pieces"):
        for block, law in itertools.product(
            (0, 16, 32, 64, 128, 256), ("equal", "max", "base2", "base-e", "next head", "mean")
        ):
            yield Merged(block, law)
        for law in ("cached base2", "cached base-e"):
            yield Merged(0, law)


def key_factors(readings: Sequence[Explained], negatives: Sequence[Queries] = (), most: int = 3) -> list[KeyFactors]:
    """Rules on which keys are seen and how much, mined from what was read; cheapest first.

    Args:
        readings: readings of wrong rows.
        negatives: queries on which the kernel is right.
        most: most rules to return.
    """
    found = [(one, place, fit) for one, place, fit in _every(readings, "keys", "keys-of-all") if fit.keys is not None]
    slopes = _slopes(readings)
    if not found:
        return slopes
    denominator = "all" if all(fit.form == "keys-of-all" for _, _, fit in found) else "counted"
    wrong = [(one.queries, place, fit.keys) for one, place, fit in found]
    right = [(one.queries, int(place), None) for one in readings for place in np.flatnonzero(one.right)[:12]]
    draw = np.random.default_rng(0)
    right += [(q, int(place), None) for q in negatives for place in draw.permutation(len(q.table["row"]))[:4]]
    counted = [(queries, place, _counted(keys)) for queries, place, keys in wrong]
    rules: list[KeyFactors] = []
    # With the right rows, a rule says also where the effect shows; without them, that is left to the condition on queries.
    for rows in ([*wrong, *right], wrong, [*counted, *right], counted):
        options = _rules(rows, most)
        rules += [
            KeyFactors(one, denominator, cost=sum(0.4 + part.condition.cost + 0.3 * (part.factor != 0) for part in one))
            for one in options
        ]  # fmt: skip
        if rows is wrong and any(rule.cost < _PLAIN for rule in rules):
            break
    return sorted(dict.fromkeys([*rules, *slopes]), key=lambda one: one.cost)


_PLAIN = 3.5
"""Cost of a rule on keys that is plain enough not to look for another."""


def _slopes(readings: Sequence[Explained]) -> list[KeyFactors]:
    """Factors of the scores of some keys."""
    found = [(one, place, fit) for one, place, fit in _every(readings, "slopes") if fit.keys is not None]
    if not found:
        return []
    value = _common([fit.number for _, _, fit in found], 1)[0]
    tables, flags = [], []
    for one, place, fit in found[:80]:
        assert fit.keys is not None
        queries = one.queries
        known = np.flatnonzero(queries.visible[place // queries.heads] & ~np.isnan(fit.keys))
        tables.append(chosen(queries.pairs, known + place * len(fit.keys)))
        flags.append(fit.keys[known] != 1)
    value = min(
        (value, *(formula for formula in (0.5, 2.0, math.log(2), 1 / math.log(2)))),
        key=lambda one: (abs(one / value - 1) > 5e-3, abs(one - value)),
    )
    rules = mine(joined(tables), np.concatenate(flags), PAIR_TERMS, 2)
    return [KeyFactors((Part("seen", rule, value, "score"),), cost=1.4 + rule.cost) for rule in rules]


KeyRow = tuple[Queries, int, "Numbers | None"]
"""Queries, the place of one of them, and the factor of each key; None for the right ones."""


def _counted(factors: Numbers | None) -> Numbers:
    """Factors as multiples of the smallest: which of two weights is the right one cannot be told from one row."""
    assert factors is not None
    least = factors[factors > 0].min() if (factors > 0).any() else 1.0
    return np.where(factors > 0, factors / least, factors)


def _rules(rows: Sequence[KeyRow], most: int) -> list[tuple[Part, ...]]:
    universes: dict[str, list[tuple[dict[str, Ints], Numbers]]] = {"seen": [], "hidden": [], "foreign": []}
    draw = np.random.default_rng(0)
    for queries, place, factors in rows:
        keys = queries.call.k.shape[0]
        t, h = divmod(place, queries.heads)
        seen, own = queries.visible[t], queries.own_rows[t]
        expected = queries.weights[t, h, queries.own[h]]
        actual = seen.astype(float) if factors is None else factors
        faint = seen & (expected < 1e-5)
        for name, inside in (("seen", seen & ~faint), ("hidden", own & ~seen), ("foreign", ~own)):
            where = np.flatnonzero(inside)
            if len(where) > 160:
                odd = where[actual[where] != float(name == "seen")]
                edges = np.concatenate([where[:10], where[-40:], where[np.linspace(0, len(where) - 1, 60).astype(int)]])
                near = np.intersect1d(np.concatenate([odd[:1] - 1, odd[-1:] + 1]), where)
                where = np.unique(np.concatenate([draw.permutation(odd)[:60], odd[:2], odd[-2:], near, edges]))
            if len(where):
                universes[name].append((chosen(queries.pairs, where + place * keys), actual[where]))
    parts: list[list[Part]] = []
    for name, pieces in universes.items():
        if not pieces:
            continue
        table, values = joined([table for table, _ in pieces]), np.concatenate([value for _, value in pieces])
        usual = float(name == "seen")
        odd_values = _common([v for v in values.tolist() if not _close(v, usual)], 4) if (values != usual).any() else []
        if len(odd_values) > 3:
            return []
        for odd_value in odd_values:
            flags = np.isclose(values, odd_value, rtol=3e-3, atol=1e-6)
            if not flags.any():
                continue
            rules = mine(table, flags, PAIR_TERMS, most)
            if not rules:
                return []
            parts.append([Part(name, rule, odd_value) for rule in rules])
    if not parts:
        return []
    leaders = tuple(options[0] for options in parts)
    return [leaders] + [
        (*leaders[:n], rival, *leaders[n + 1 :]) for n, options in enumerate(parts) for rival in options[1:]
    ]  # fmt: skip


def known_effects() -> list[Known]:
    """The effects of all hypotheses, and of roundings that nobody declared."""
    found = [Known(one.id, one.about, one.compute) for one in FAMILY]
    for dtype, name in ((torch.float8_e4m3fn, "FP8 E4M3"), (torch.float8_e5m2, "FP8 E5M2"), (torch.bfloat16, "bfloat16"), (torch.float16, "float16")):  # fmt: skip
        for what, words in (("q", "Q is"), ("k", "K is"), ("v", "V is"), ("kv", "K and V are"), ("qk", "Q and K are"), ("qkv", "Q, K and V are")):  # fmt: skip
            found.append(
                _rounding(f"rounded-{what}-{name}", f"{words} rounded to {name}", partial(keys_rounded, dtype, what))
            )
        found.append(
            _rounding(f"rounded-p-{name}", f"attention weights are rounded to {name}", partial(weights_rounded, dtype))
        )
        found.append(
            _rounding(
                f"rounded-s-{name}", f"scores are rounded to {name} before the softmax", partial(scores_rounded, dtype)
            )
        )
    found.append(_rounding("rounded-sum-bfloat16", "the sum of the weights is kept in bfloat16", denominator_rounded))
    return found


def _rounding(id: str, about: str, change: object) -> Known:
    return Known(id, about, partial(changed_output, change), cost=3.5)  # type: ignore[arg-type]
