"""Finds the condition under which something is wrong: the simplest rules that agree with every run.

A rule is a conjunction of properties of single features. Active queries find the configurations of faults in this form in Vernaza
et al., "Learning product set models of fault triggers in high-dimensional software interfaces" (IROS 2015).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from assay.harness.evidence.kernel_result import Property, Tried
from assay.harness.localize.features import ASKS, Known

Rule = tuple[Property, ...]
_Column = NDArray[np.generic]
_Flags = NDArray[np.bool_]

_MODULI = (2, 3, 4, 8, 16, 32, 64, 128, 256)
# The cost of a property to a reader: the plainest features first, thresholds before residues.
_FEATURE_COST = {
    "new": 0.0, "prefix": 0.0, "phase": 0.0, "dtype": 0.0, "head_dim": 0.0, "query": 0.0, "head": 0.1, "length": 0.1, "ratio": 0.1,
    "kv_heads": 0.1, "sequences": 0.1, "dim": 0.0,
    **{f"asks: {what}": 0.2 for what in ASKS}, "kv_head": 0.1, "position": 0.1, "q_heads": 0.2, "index": 0.2, "after": 0.3,
}  # fmt: skip
_OTHER_FEATURE = 0.4
_KIND_COST = {">=": 1.0, "<=": 1.0, "==": 1.3, "!=": 1.3, "between": 1.5, "in": 0.9, "residue": 1.5, "no residue": 1.5,
              "residue between": 2.0, "power of two": 1.6, "no power of two": 1.6}  # fmt: skip
# Kinds of properties with a limit that lies between two numbers.
_LIMITED = (">=", "<=", "==", "between")
_PER_VALUE, _ODD_RESIDUE = 0.15, 0.4
# Features of conditions that are only necessary, least wrong points for one, and least log-likelihood, in nats, by which it beats
# chance: it is the best of a hundred or so, and sequences of one call are not independent.
_NECESSARY = {"phase", "dtype", "length", *(f"asks: {what}" for what in ASKS)}
_LEAST_WRONG, _SURE = 8, 20.0
_WIDTH = {"bfloat16": 0, "float16": 1, "float32": 2}.__getitem__
# Most numbers in a list, properties in a rule, steps of the search for rules, and branches of a step.
_LISTED, _LARGEST, _STEPS, _BRANCHES = 6, 4, 4000, 40


def cost(rule: Rule) -> float:
    """Compute the cost of a rule to a reader."""
    return sum(map(_cost, rule))


def _cost(prop: Property) -> float:
    listed = _PER_VALUE * len(prop.values) * (prop.kind == "in")
    odd = _ODD_RESIDUE * ("residue" in prop.kind and prop.values[1] != 0)
    return _FEATURE_COST.get(prop.feature, _OTHER_FEATURE) + _KIND_COST[prop.kind] + listed + odd


def holds(rule: Rule, known: Known) -> bool:
    """Return True if the features have every property of a rule."""
    return all(bool(over(prop, np.array([known[prop.feature]]))[0]) for prop in rule)


def meets(tried: Tried, known: Known) -> bool:
    """Return True if the features are in the context of a condition and meet it."""
    return all(known[name] == value for name, value in tried.context.items()) and holds(tried.rule, known)


def over(prop: Property, column: _Column) -> _Flags:
    """Return flags of the values of a feature that have a property. NaN has none."""
    if prop.kind == "in":
        return np.isin(column, list(prop.values))
    numbers, v = np.asarray(column, dtype=float), [float(value) for value in prop.values]
    match prop.kind:
        case ">=":
            held = numbers >= v[0]
        case "<=":
            held = numbers <= v[0]
        case "==":
            held = numbers == v[0]
        case "!=":
            held = numbers != v[0]
        case "between":
            held = (numbers >= v[0]) & (numbers <= v[1])
        case "residue":
            held = numbers % v[0] == v[1]
        case "no residue":
            held = numbers % v[0] != v[1]
        case "residue between":
            held = (numbers % v[0] >= v[1]) & (numbers % v[0] <= v[2])
        case "power of two":
            held = _powers(numbers)
        case _:
            held = ~_powers(numbers)
    return np.asarray(held & ~np.isnan(numbers))


def _powers(column: _Column) -> _Flags:
    numbers = np.nan_to_num(np.asarray(column, dtype=float)).astype(np.int64)
    return np.asarray((numbers > 0) & ((numbers & (numbers - 1)) == 0))


@dataclass
class Points:
    """The features of everything that was run, and whether each was wrong."""

    known: list[Known] = field(default_factory=list)
    wrong: list[bool] = field(default_factory=list)

    def add(self, known: Known, wrong: bool) -> None:
        """Add a point."""
        self.known.append(known)
        self.wrong.append(wrong)

    def within(self, context: Known) -> Points:
        """Return the points with these values of features."""
        kept = [
            (known, wrong)
            for known, wrong in zip(self.known, self.wrong, strict=True)
            if all(known[name] == value for name, value in context.items())
        ]
        return Points([known for known, _ in kept], [wrong for _, wrong in kept])

    def meeting(self, rule: Rule) -> _Flags:
        """Return flags of the points that have every property of a rule."""
        flags = np.ones(len(self.known), dtype=bool)
        for prop in rule:
            flags &= over(prop, self._column(prop.feature))
        return flags

    def confirm(self, rule: Rule, since: int, least: int) -> bool:
        """Return True if the points since then are wrong exactly where a rule holds, and enough lack each property alone."""
        fresh, wrong = Points(self.known[since:], self.wrong[since:]), np.array(self.wrong[since:], dtype=bool)
        met = fresh.meeting(rule)
        alone = [fresh.meeting(tuple(other for other in rule if other != prop)) & ~met for prop in rule]
        return bool((met == wrong).all()) and min(int(flags.sum()) for flags in (met, *alone)) >= least

    def common(self) -> list[Property]:
        """List the properties that all wrong points have."""
        return list(_common(self.columns(), np.array(self.wrong, dtype=bool)))

    def off(self, prop: Property) -> NDArray[np.float64]:
        """Compute the distance of each point to the nearest limit of a property, or 0 for words."""
        column = self._column(prop.feature)
        if any(isinstance(value, str) for value in prop.values):
            return np.zeros(len(column))
        values, limits = np.asarray(column, dtype=float), np.array(prop.values or (0.0,), dtype=float)
        if "residue" in prop.kind:
            values, limits = values % limits[0], limits[1:]
        return np.asarray(np.nan_to_num(np.abs(values[:, None] - limits).min(1), nan=np.inf), dtype=float)

    def gaps(self, rule: Rule) -> Iterator[tuple[Property, float, float]]:
        """Yield, for each limit of a rule, the two values between which it lies: the wrong one and the correct one.

        Skip limits whose two values are neighbouring whole numbers.
        """
        bad = np.array(self.wrong, dtype=bool)
        for prop in rule:
            if prop.kind not in _LIMITED:
                continue
            there = self.meeting(tuple(other for other in rule if other != prop))
            column = np.asarray(self._column(prop.feature), dtype=float)
            wrong, right = column[there & bad], column[there & ~bad & ~np.isnan(column)]
            below, above = right[right < wrong.min()], right[right > wrong.max()]
            if len(below) and prop.kind != "<=" and wrong.min() - below.max() > 1:
                yield prop, float(wrong.min()), float(below.max())
            if len(above) and prop.kind != ">=" and above.min() - wrong.max() > 1:
                yield prop, float(wrong.max()), float(above.min())

    def stated(self, rule: Rule) -> Rule:
        """Add to each limit the nearest value that is right unless they are neighbours: "128 was right, 192 wrong"."""
        right: dict[Property, tuple[float, ...]] = {}
        for prop, _, value in self.gaps(rule):
            right[prop] = *right.get(prop, ()), value
        return tuple(prop.model_copy(update={"right": right.get(prop, ())}) for prop in rule)

    def _column(self, name: str) -> _Column:
        return np.array([known[name] for known in self.known])

    def columns(self) -> dict[str, _Column]:
        """Return the values by feature."""
        names = self.known[0] if self.known else ()
        return {name: self._column(name) for name in names}


def rules(points: Points, most: int = 6) -> list[Rule]:
    """Find the cheapest conjunctions that all wrong points meet and no correct point does, cheapest first.

    Args:
        points: the points.
        most: most rules to return.
    """
    bad = np.array(points.wrong, dtype=bool)
    if not bad.any() or bad.all():
        return [()] if bad.any() else []
    columns = points.columns()
    excluding: dict[tuple[bytes, str], tuple[Property, _Flags]] = {}
    for prop in sorted(_common(columns, bad), key=_cost):
        excludes = ~over(prop, columns[prop.feature][~bad])
        if excludes.any():  # keep the cheapest of equivalent properties of one feature; other features are rivals
            excluding.setdefault((excludes.tobytes(), prop.feature), (prop, excludes))
    every = sorted(excluding.values(), key=lambda pair: _cost(pair[0]))
    if not every:
        return []
    table, costs = np.stack([excludes for _, excludes in every]), np.array([_cost(prop) for prop, _ in every])
    return [tuple(every[i][0] for i in chosen) for chosen in cheapest(table, costs, most)]


def cheapest(
    excludes: _Flags, costs: NDArray[np.float64], most: int, largest: int = _LARGEST, steps: int = _STEPS
) -> list[tuple[int, ...]]:
    """Find the cheapest sets of properties that together exclude everything.

    The search branches on the thing that the fewest properties exclude: one of these must be in the set.

    Args:
        excludes: the things that each property excludes, bool [properties, things].
        costs: the costs of the properties, [properties].
        most: most sets to return.
        largest: most properties of a set.
        steps: most steps of the search.

    Returns:
        Sets of indices of properties, each ascending; the cheapest set first.
    """
    table = np.unique(excludes, axis=1)
    sets: dict[frozenset[int], float] = {}
    limit, left_over = np.inf, steps

    def search(chosen: tuple[int, ...], left: _Flags, spent: float) -> None:
        nonlocal limit, left_over
        left_over -= 1
        if not left.any():
            sets[frozenset(chosen)] = spent
            limit = sorted(sets.values())[most - 1] if len(sets) >= most else limit
        elif len(chosen) < largest and left_over > 0:
            there = table[:, left]
            able = np.flatnonzero(there[:, int(there.sum(0).argmin())])
            gain = there[able].sum(1)
            for index in able[np.argsort(costs[able] - np.log1p(gain), kind="stable")][:_BRANCHES]:
                if spent + costs[index] < limit:
                    search((*chosen, int(index)), left & ~table[index], spent + float(costs[index]))

    search((), np.ones(table.shape[1], dtype=bool), 0.0)
    ordered = sorted(sets, key=lambda chosen: (sets[chosen], sorted(chosen)))[:most]
    return [tuple(sorted(chosen)) for chosen in ordered]


def necessary(points: Points) -> Rule:
    """Find the properties without which nothing was wrong, though that many right points would not be chance.

    Only plain features count. A small error may hide in rounding, so that a property of the widest dtype alone, or an upper limit
    on a length, can be one of the error's size. A lower limit is that of the block in which the wrong points begin.
    """
    bad, widest = (
        np.array(points.wrong, dtype=bool),
        max((str(known["dtype"]) for known in points.known), key=_WIDTH, default=""),
    )
    rule, there = Rule(), np.ones(len(bad), dtype=bool)
    props = [
        _from_its_block(prop) for prop in points.common() if prop.feature in _NECESSARY and prop.kind in (">=", "in")
    ]
    props = [prop for prop in props if not {"False", widest} & set(prop.values)]
    while props and bad.sum() >= _LEAST_WRONG:
        met = [there & points.meeting((prop,)) for prop in props]
        shares = [_share_at_its_limit(points, prop, flags) for prop, flags in zip(props, met, strict=True)]
        gains = [(there & ~flags).sum() * -math.log1p(-share) for flags, share in zip(met, shares, strict=True)]
        best = int(np.argmax(gains))
        if gains[best] < _SURE:
            break
        rule, there = (*rule, props[best]), met[best]
    return rule


def _share_at_its_limit(points: Points, prop: Property, there: _Flags) -> float:
    """Return the share of wrong points, at most 0.9, or 0 if an error that grows with a length begins with a smaller share."""
    bad = np.array(points.wrong, dtype=bool)
    share = min(float(bad[there].mean()), 0.9)
    if prop.kind == "in":
        return share
    first = there & (points.off(prop) < float(prop.values[0]))
    return share if first.any() and bad[first].mean() >= share / 2 else 0.0


def _from_its_block(prop: Property) -> Property:
    if prop.kind == "in" or (low := int(float(prop.values[0]))) < 2:
        return prop
    return prop.model_copy(update={"values": (1.0 + 2 ** ((low - 1).bit_length() - 1),)})


def _common(columns: Mapping[str, _Column], bad: _Flags) -> Iterator[Property]:
    """Yield the properties that all wrong points have."""
    for name, column in columns.items():
        wrong, right = column[bad], column[~bad]
        if column.dtype.kind in "UO":
            yield Property(feature=name, kind="in", values=tuple(sorted(set(map(str, wrong)))))
        elif not np.isnan(wrong).any():
            numbers = np.unique(np.asarray(right[~np.isnan(right)], dtype=float))
            # What every number has says only that there is one.
            yield from (prop for prop in _of_numbers(name, np.unique(wrong), numbers) if not over(prop, numbers).all())


def _of_numbers(name: str, wrong: NDArray[np.float64], right: NDArray[np.float64]) -> Iterator[Property]:
    """Yield the properties that all of these distinct numbers have."""
    low, high = float(wrong[0]), float(wrong[-1])

    def having(kind: str, *values: float) -> Property:
        return Property(feature=name, kind=kind, values=tuple(map(float, values)))

    yield having(">=", low)
    yield having("<=", high)
    if low == high:
        yield having("==", low)
    else:
        yield having("between", low, high)
        if len(wrong) <= _LISTED:
            yield having("in", *wrong)
    gaps = np.setdiff1d(right[(right > low) & (right < high)], wrong)
    if len(gaps) <= _LISTED:
        yield from (having("!=", gap) for gap in gaps)
    for m in _MODULI:
        rests = np.unique(wrong % m)
        lost = np.setdiff1d(np.arange(m), rests)
        if len(rests) == 1:
            yield having("residue", m, rests[0])
        else:
            if len(lost) and (lost[0] == 0 or len(lost) == 1):
                yield having("no residue", m, lost[0])
            if m >= 8 and len(wrong) >= 8 and rests[-1] - rests[0] < 0.8 * m:
                yield having("residue between", m, rests[0], rests[-1])
    if len(wrong) > 2 and _powers(wrong).all():
        yield having("power of two")
    if not _powers(wrong).any():
        yield having("no power of two")
