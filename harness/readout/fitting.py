"""Explains a kernel's answers by operators: effects that fit the readings, and the conditions under which they show."""

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

# Share of the wrong outputs that an effect must explain to be considered.
_LEAST = 0.05
# If whole calls are wrong and others correct, a condition of this cost may be a coincidence: the kernel may be wrong at random.
_FAR_FETCHED = 5.0
# Bits of information in a literal of a condition: 13 for some 10,000 literals, and two for safety.
_BITS = 15.0
# Calls for comparing effects before the best are tried on all.
_FEW = 10
# Penalty of an effect for each changed correct query, in explained wrong ones: a condition must then exclude it.
_SPOILT = 0.05
# Penalty of an effect per unit of cost, as a share of the explained wrong queries.
_FAR = 0.02
# Most effects to try among those that behave alike on a few calls.
_RIVALS = 3
# The score of an effect on a few calls, a key shared by effects that behave alike there, and the effect.
_Rated = tuple[float, bytes, Effect]
# An effect is compared only if it explains something on this many calls, with this many wrong queries each: most do not.
_FIRST, _TINY = 3, 3
# Number of effects, best first, to find conditions for; and the most if none of them has one.
_SURELY_TRIED, _TRIED = 6, 10
# No further effects are tried once an operator explains this share of the wrong outputs, at no more than this cost.
_SETTLED, _PLAIN = 0.8, 4.0


# Most keys of a call to read: reading its weights takes one run of the kernel for every few keys.
_MOST_READ = 2500


@dataclass
class Fitter:
    """Fits operators to the answers of one kernel.

    Attributes:
        prober: the kernel whose weights are read.
        tolerance: the tolerance of readings.
        samples: the samples that operators are fitted to.
        operator: the best operator so far.
    """

    prober: Prober
    tolerance: Tolerance = field(default_factory=Tolerance)
    samples: list[Sample] = field(default_factory=list)
    operator: Operator = field(default_factory=Operator)
    _few: list[Sample] = field(default_factory=list, init=False)
    _general: dict[tuple[int, ...], list[_Rated]] = field(default_factory=dict, init=False)

    def read(self, samples: Sequence[Sample], most: int) -> None:
        """Read the weights of some wrong samples of each kind, small ones first."""
        kinds: Counter[tuple[object, ...]] = Counter()

        def rank(sample: Sample) -> int:
            call = sample.call
            kind = (call.phase, len(call.lens_q) > 1, any(call.prefixes), sample.keys > 70)
            kinds[kind] += 1
            return kinds[kind]

        wrong = [s for s in samples if s.bad.any() and 3 < s.keys <= _MOST_READ and s.reading is None]
        for sample in sorted(sorted(wrong, key=lambda s: s.size), key=rank)[:most]:  # ranks begin at the smallest
            self._read(sample)

    def _read(self, sample: Sample) -> None:
        """Read the weights of a sample's queries, and find the forms that fit the wrong rows."""
        queries = sample.queries
        reading = read(self.prober, queries.call, queries.rows.tolist())
        if reading is None:
            return
        rows = [Row(reading, *divmod(place, queries.heads), self.tolerance) for place in range(len(sample.bad))]
        sample.reading = reading
        sample.fits = tuple(tuple(fits(row)) if bad else () for row, bad in zip(rows, sample.bad, strict=True))

    def _judged(self, effect: Effect, samples: Sequence[Sample]) -> Iterable[tuple[Flags, Flags]]:
        """Yield, for each sample, flags of the rows whose answer the effect gives, and of those where it changes attention."""
        for sample in samples:
            out = effect.outputs(sample.queries)
            yield sample.agrees(out), sample.differs(out)

    def _operators(self, effect: Effect) -> tuple[int, list[Operator]]:
        """Count the wrong rows that an effect explains; list operators that keep correct rows correct, cheapest first."""
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
        # A single wrong call always differs from all others in something.
        if not strange and whole and wrong < len(calls) and conditions and _by_chance(conditions[0], wrong, len(calls)):
            return hits, []
        return hits, [Operator(effect, condition) for condition in conditions]

    def fit(self) -> list[Operator]:
        """List operators that explain most of the samples, best first, or only attention if none does."""
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
        """Yield effects rated by the wrong rows of a few calls that they explain; those that follow from readings come first."""
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
        # These do not depend on readings, so later rounds on the same calls need not try them again.
        asked = tuple(map(id, few))
        if asked not in self._general:
            tiny = [self._tiny(sample) for sample in few[:_FIRST]]
            known = self._rated(known_effects(), few, tiny)
            answers = [(s.queries, s.actual, s.bad) for s in few]
            self._general[asked] = known + self._rated(general_effects(answers), few, tiny)
        yield self._general[asked]

    def _rated(self, effects: Iterable[Effect], few: Sequence[Sample], first: Sequence[Sample] = ()) -> list[_Rated]:
        """Return the effects that explain enough of a few calls, and something of `first` if given."""
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
        """Return a few wrong queries of a sample."""
        queries = sample.queries
        wrong = np.flatnonzero(sample.bad.reshape(queries.shape).any(1))
        rows = np.unique(wrong[np.linspace(0, len(wrong) - 1, _TINY).astype(int)])
        bad = sample.bad.reshape(queries.shape)[rows].ravel()
        return Sample(Queries(queries.call, queries.rows[rows]), sample.actual[rows], bad, sample.error)

    def agreed(self, operator: Operator, sample: Sample) -> Flags:
        """Return flags of the rows where an operator gives the kernel's answer."""
        return sample.agrees(operator.outputs(sample.queries))

    def tally(self, operator: Operator, samples: Sequence[Sample]) -> Agreement:
        """Compare an operator with samples."""
        flags = [(sample.bad, self.agreed(operator, sample)) for sample in samples]
        return Agreement(
            sum(int(bad.sum()) for bad, _ in flags), sum(int((bad & agrees).sum()) for bad, agrees in flags),
            sum(int((~bad & ~agrees).sum()) for bad, agrees in flags),
        )  # fmt: skip


def _ranked(rated: Sequence[_Rated]) -> list[Effect]:
    """Return the effects, best first, with only a few of those that behave alike."""
    alike_before: Counter[bytes] = Counter()
    ranked = []
    for _, alike, effect in sorted(rated, key=lambda entry: entry[0], reverse=True):
        alike_before[alike] += 1
        if alike_before[alike] <= _RIVALS:
            ranked.append(effect)
    return ranked


def _by_chance(condition: Condition, wrong: int, calls: int) -> bool:
    """Return True if a condition may separate calls by chance: it is far-fetched, and has no more bits than chance needs."""
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
