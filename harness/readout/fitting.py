"""Explains the answers that were seen by operators: effects of what was read, and the conditions under which they show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from assay.harness.localize.reading import Flags, read
from assay.harness.readout.addresses import addresses
from assay.harness.readout.candidates import effects_of, key_factors
from assay.harness.readout.conditions import Condition, conditions_of
from assay.harness.readout.effects import constant, general_effects, known_effects
from assay.harness.readout.features import ROW_TERMS, chosen, joined
from assay.harness.readout.forms import Row, Tolerance, fits
from assay.harness.readout.operators import Effect, Operator
from assay.harness.readout.probing import Prober
from assay.harness.readout.queries import Queries
from assay.harness.readout.samples import Agreement, Sample

# Share of the wrong outputs that an effect must explain to be looked at.
_LEAST = 0.05
# A condition of this cost may be a coincidence where whole calls are wrong and others are right: they are wrong now and then.
_FAR_FETCHED = 5.0
# Bits that a literal of a condition is worth: there are some 10,000 literals, hence 13 bits, and two to be on the safe side.
_BITS = 15.0
# Calls on which effects are compared before the best ones are tried on all.
_FEW = 10
# What it costs an effect to change a right query, in wrong ones explained: a condition must then keep it from there.
_SPOILT = 0.05
# What one more of cost costs an effect, in shares of the wrong queries explained.
_FAR = 0.02
# Effects that are tried of those that do the same on a few calls.
_RIVALS = 3
# An effect, how well it does on a few calls, and what is the same for effects that do the same there.
_Rated = tuple[float, bytes, Effect]
# Calls, and wrong queries of each, on which an effect must explain something to be compared at all: most explain nothing.
_FIRST, _TINY = 3, 3
# Effects whose conditions are sought, best first; and most of them, where no condition is found for any.
_SURELY_TRIED, _TRIED = 6, 10
# Share of the wrong outputs that an operator must explain, and what it may cost, for no further effects to be tried.
_SETTLED, _PLAIN = 0.8, 4.0


# Most keys of a call that is read: its weights take a call of the kernel for every few of them.
_MOST_READ = 2500


@dataclass
class Fitter:
    """Fits operators to the answers of one kernel.

    Attributes:
        prober: the kernel, of which weights are read.
        tolerance: of readings.
        samples: what operators are sought in.
        operator: what is known so far.
    """

    prober: Prober
    tolerance: Tolerance = field(default_factory=Tolerance)
    samples: list[Sample] = field(default_factory=list)
    operator: Operator = field(default_factory=Operator)
    _few: list[Sample] = field(default_factory=list, init=False)
    _general: dict[tuple[int, ...], list[_Rated]] = field(default_factory=dict, init=False)

    def read(self, samples: Sequence[Sample], most: int) -> None:
        """Read the weights of some wrong samples: small ones first, of each kind some."""
        kinds: Counter[tuple[object, ...]] = Counter()

        def rank(sample: Sample) -> int:
            call = sample.call
            kind = (call.phase, len(call.lens_q) > 1, any(call.prefixes), sample.keys > 70)
            kinds[kind] += 1
            return kinds[kind]

        wrong = [s for s in samples if s.bad.any() and 3 < s.keys <= _MOST_READ and s.reading is None]
        for sample in sorted(sorted(wrong, key=lambda s: s.size), key=rank)[:most]:  # ranks count from the smallest on
            self._read(sample)

    def _read(self, sample: Sample) -> None:
        """Read the weights of a sample's queries, and find the forms that fit the wrong rows."""
        queries = sample.queries
        reading = read(self.prober, queries.call, queries.rows.tolist())
        if reading is None:
            return
        every, places = Queries(queries.call, range(len(queries.call.q))), range(len(sample.bad))
        rows = [Row(reading, every, *divmod(place, queries.heads), self.tolerance) for place in places]
        sample.reading = reading
        sample.fits = tuple(tuple(fits(row)) if bad else () for row, bad in zip(rows, sample.bad, strict=True))

    def _judged(self, effect: Effect, samples: Sequence[Sample]) -> Iterable[tuple[Flags, Flags]]:
        """For each sample, which rows the effect gives the answer of, and on which it changes the right output."""
        for sample in samples:
            out = effect.outputs(sample.queries)
            yield sample.agrees(out), sample.differs(out)

    def _operators(self, effect: Effect) -> tuple[int, list[Operator]]:
        """Count the wrong rows that an effect explains; list operators that keep right rows right, cheapest first."""
        tables, flags, hits, strange = [], [], 0, 0
        calls: list[tuple[int, int]] = []
        for sample, (agrees, changes) in zip(self.samples, self._judged(effect, self.samples), strict=True):
            positive, other = sample.bad & agrees, sample.bad & ~agrees
            negative = (~sample.bad & changes & ~agrees) | other
            hits, strange = hits + int(positive.sum()), strange + int(other.sum())
            use = np.flatnonzero(positive | negative)
            if len(use):
                calls.append((int(positive.sum()), int(negative.sum())))
                tables.append(chosen(sample.queries.table, use))
                flags.append(positive[use])
        if hits < max(1.0, _LEAST * (hits + strange)):
            return 0, []
        conditions = conditions_of(joined(tables), np.concatenate(flags), ROW_TERMS)
        whole = all(not p or not n for p, n in calls)
        wrong = sum(p > 0 for p, _ in calls)
        # One wrong call differs from all others in something, whatever made it wrong.
        if not strange and whole and wrong < len(calls) and conditions and _by_chance(conditions[0], wrong, len(calls)):
            return hits, []
        return hits, [Operator(effect, condition) for condition in conditions]

    def fit(self) -> list[Operator]:
        """List operators that explain most of the samples, the best first; attention if none does."""
        total = sum(int(sample.bad.sum()) for sample in self.samples)
        best: list[tuple[float, Operator]] = []
        for rated in self._stages():
            for number, effect in enumerate(_ranked(rated)[:_TRIED]):
                if number >= _SURELY_TRIED and best:
                    break
                hits, operators = self._operators(effect)
                best += [(hits * (1 - 0.01 * min(operator.cost, 20)), operator) for operator in operators]
            best.sort(key=lambda pair: -pair[0])
            if best and best[0][0] > _SETTLED * total and best[0][1].cost < _PLAIN:
                break
        near = [operator for score, operator in best if score > 0.8 * best[0][0]]
        return list(dict.fromkeys(near))[:8] or [Operator()]

    def _stages(self) -> Iterator[list[_Rated]]:
        """Yield effects with how many wrong rows of a few calls they explain: those that follow from what was read come first."""
        wrong = [sample for sample in self.samples if sample.bad.any()]
        few = [sample for sample in wrong if any(sample is kept for kept in self._few)]
        if len(few) < min(_FEW, len(wrong)):
            few = wrong[:: max(1, len(wrong) // _FEW)][:_FEW]
        self._few = few
        readings = [sample for sample in wrong if sample.fits is not None]
        right = [s.queries for s in self.samples if not s.bad.any()]
        yield self._rated(_undefined(wrong), few)
        yield self._rated(key_factors(readings, right), few)
        yield self._rated(effects_of(readings, right), few)
        yield self._rated(addresses(readings), few)
        # These do not depend on what was read, so that a round in which nothing was explained need not try them again.
        asked = tuple(map(id, few))
        if asked not in self._general:
            tiny = [self._tiny(sample) for sample in few[:_FIRST]]
            known = self._rated(known_effects(), few, tiny)
            answers = [(s.queries, s.actual, s.bad) for s in few]
            self._general[asked] = known + self._rated(general_effects(answers), few, tiny)
        yield self._general[asked]

    def _rated(self, effects: Iterable[Effect], few: Sequence[Sample], first: Sequence[Sample] = ()) -> list[_Rated]:
        """The effects that explain enough of a few calls; if some of it `first`, where that is given."""
        rated: list[_Rated] = []
        total = sum(int(s.bad.sum()) for s in few)
        for effect in effects:
            self.prober.check_time()
            if first and not any((s.agrees(effect.outputs(s.queries)) & s.bad).any() for s in first):
                continue
            judged = zip(few, self._judged(effect, few), strict=True)
            pairs = [(agrees & s.bad, changes & ~s.bad & ~agrees) for s, (agrees, changes) in judged]
            explained, spoilt = (np.concatenate(flags) for flags in zip(*pairs, strict=True))
            if explained.sum() >= max(1.0, _LEAST * total):
                score = explained.sum() - _SPOILT * spoilt.sum() - _FAR * total * min(effect.cost, 10)
                rated.append((float(score), np.packbits([explained, spoilt]).tobytes(), effect))
        return rated

    @staticmethod
    def _tiny(sample: Sample) -> Sample:
        """A few wrong queries of a sample."""
        queries = sample.queries
        wrong = np.flatnonzero(sample.bad.reshape(queries.shape).any(1))
        rows = np.unique(wrong[np.linspace(0, len(wrong) - 1, _TINY).astype(int)])
        bad = sample.bad.reshape(queries.shape)[rows].ravel()
        return Sample(Queries(queries.call, queries.rows[rows]), sample.actual[rows], bad, sample.error)

    def agreed(self, operator: Operator, sample: Sample) -> Flags:
        """Where an operator gives the kernel's answer."""
        return sample.agrees(operator.outputs(sample.queries))

    def tally(self, operator: Operator, samples: Sequence[Sample]) -> Agreement:
        """Compare an operator with samples."""
        flags = [(sample.bad, self.agreed(operator, sample)) for sample in samples]
        return Agreement(
            sum(int(bad.sum()) for bad, _ in flags), sum(int((bad & agrees).sum()) for bad, agrees in flags),
            sum(int((~bad & ~agrees).sum()) for bad, agrees in flags),
        )  # fmt: skip


def _ranked(rated: Sequence[_Rated]) -> list[Effect]:
    """The effects, best first; of those that do the same, some."""
    alike_before: Counter[bytes] = Counter()
    ranked = []
    for _, alike, effect in sorted(rated, key=lambda entry: entry[0], reverse=True):
        alike_before[alike] += 1
        if alike_before[alike] <= _RIVALS:
            ranked.append(effect)
    return ranked


def _by_chance(condition: Condition, wrong: int, calls: int) -> bool:
    """Return True if a condition may tell calls apart by chance: it is far-fetched, and they could be told apart by
    as few bits as it has."""
    if wrong == 1:
        return bool(condition.literals)
    bits = math.log2(math.comb(calls, wrong))
    return condition.cost > _FAR_FETCHED and bits < _BITS * len(condition.literals)


def _undefined(wrong: Sequence[Sample]) -> list[Effect]:
    effects: dict[str, Effect] = {}
    for sample in wrong:
        bad = sample.actual.reshape(len(sample.bad), sample.actual.shape[-1])[sample.bad]
        if np.isnan(bad).any():
            effects["nan"] = constant(float("nan"))
        if (bad == 0).all(-1).any():
            effects["zero"] = constant(0.0)
        if np.isinf(bad).any():
            effects["inf"] = constant(float("inf"))
    return list(effects.values())
