"""Explains the answers that were seen by operators: effects of what was read, and the conditions under which they show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from assay.harness.localize.reading import Flags, read
from assay.harness.readout.addresses import addresses
from assay.harness.readout.candidates import effects_of, key_factors
from assay.harness.readout.conditions import Condition, conditions_of
from assay.harness.readout.effects import constant, general_effects, known_effects
from assay.harness.readout.features import ROW_TERMS, chosen, joined
from assay.harness.readout.forms import Row, Tolerance, fits
from assay.harness.readout.operators import Clause, Effect, Operator
from assay.harness.readout.probing import BudgetSpentError, Prober
from assay.harness.readout.queries import Queries
from assay.harness.readout.samples import Agreement, Sample

# Share of the wrong outputs that are left that an effect must explain. With three clauses, the first must explain a sixth for the
# half from which on anything is said.
_LEAST = 0.05
# Most clauses of an operator.
_CLAUSES = 3
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
# Share of what is left that a clause must explain for no further effects to be tried.
_SETTLED = 0.8


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
    _general: dict[bytes, list[_Rated]] = field(default_factory=dict, init=False)

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

    def _clauses(self, effect: Effect, open_: Sequence[Flags]) -> tuple[int, list[Clause]]:
        """Count the wrong rows that an effect explains, and list its clauses, cheapest first: those that keep right rows right."""
        tables, flags, hits, strange = [], [], 0, 0
        calls: list[tuple[int, int]] = []
        for sample, (agrees, changes), left in zip(
            self.samples, self._judged(effect, self.samples), open_, strict=True
        ):
            positive, other = sample.bad & agrees & left, sample.bad & ~agrees & left
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
        return hits, [Clause(effect, condition) for condition in conditions]

    def fit(self) -> list[Operator]:
        """The operator that explains most of the samples, and rivals that explain as much."""
        open_ = [np.ones(len(s.bad), bool) for s in self.samples]
        clauses: list[Clause] = []
        rivals: list[Operator] = []
        for _ in range(_CLAUSES):
            if not any((s.bad & o).any() for s, o in zip(self.samples, open_, strict=True)):
                break
            try:
                best = self._best(open_)
            except BudgetSpentError:
                self._keep(clauses)
                raise
            if not best:
                break
            rivals += [Operator((*clauses, other)) for other in best[1:]]
            clauses.append(best[0])
            for sample, o in zip(self.samples, open_, strict=True):
                o &= ~best[0].condition.holds(sample.queries.table)
        return [self._pruned(Operator(tuple(clauses))), *rivals]

    def _keep(self, clauses: Sequence[Clause]) -> None:
        """Keep clauses that were found when the budget ended, if they explain more than what was known before."""
        operator = self._pruned(Operator(tuple(clauses)))
        if self.tally(operator, self.samples).explained > self.tally(self.operator, self.samples).explained:
            self.operator = operator

    def _pruned(self, operator: Operator) -> Operator:
        """The operator without clauses that later ones make superfluous."""
        tally = self.tally(operator, self.samples)
        for clause in operator.clauses[:-1]:
            fewer = Operator(tuple(other for other in operator.clauses if other is not clause))
            if (
                fewer_tally := self.tally(fewer, self.samples)
            ).explained >= tally.explained and fewer_tally.false <= tally.false:
                operator, tally = fewer, fewer_tally
        return operator

    def _best(self, open_: Sequence[Flags]) -> list[Clause]:
        """The clause that explains most of what is left, and its rivals; empty if there is none."""
        left = [(s, o) for s, o in zip(self.samples, open_, strict=True) if (s.bad & o).any()]
        total = sum(int((s.bad & o).sum()) for s, o in left)
        best: list[tuple[float, Clause]] = []
        for rated in self._stages(left):
            for number, effect in enumerate(_ranked(rated)[:_TRIED]):
                if number >= _SURELY_TRIED and best:
                    break
                hits, clauses = self._clauses(effect, open_)
                best += [(hits * (1 - 0.01 * min(clause.cost, 20)), clause) for clause in clauses]
            best.sort(key=lambda pair: -pair[0])
            if best and best[0][0] > _SETTLED * total:
                break
        near = [clause for score, clause in best if score > 0.8 * best[0][0]]
        return list(dict.fromkeys(near))[:8]

    def _stages(self, left: Sequence[tuple[Sample, Flags]]) -> Iterator[list[_Rated]]:
        """Yield effects with how many wrong rows of a few calls they explain: those that follow from what was read come first."""
        few = [(sample, o) for sample, o in left if any(sample is kept for kept in self._few)]
        if len(few) < min(_FEW, len(left)):
            few = list(left[:: max(1, len(left) // _FEW)][:_FEW])
        self._few = [sample for sample, _ in few]
        readings = []
        for sample, o in left:
            if sample.fits is not None:
                readings.append(replace(sample, fits=tuple(f if o[n] else () for n, f in enumerate(sample.fits))))
        right = [s.queries for s in self.samples if not s.bad.any()]
        answers = [(s.queries, s.actual, s.bad & o) for s, o in few]
        yield self._rated(_undefined(left), few)
        yield self._rated(key_factors(readings, right), few)
        yield self._rated(effects_of(readings, right), few)
        yield self._rated(addresses(readings), few)
        # These do not depend on what was read, so that a round in which nothing was explained need not try them again.
        asked = b"".join(str(id(s)).encode() + np.packbits(s.bad & o).tobytes() for s, o in few)
        if asked not in self._general:
            tiny = [self._tiny(s, o) for s, o in few[:_FIRST]]
            known = self._rated(known_effects(), few, tiny)
            self._general[asked] = known + self._rated(general_effects(answers), few, tiny)
        yield self._general[asked]

    def _rated(
        self, effects: Iterable[Effect], few: Sequence[tuple[Sample, Flags]], first: Sequence[tuple[Sample, Flags]] = ()
    ) -> list[_Rated]:
        """The effects that explain enough of what is left of a few calls; if some of it `first`, where that is given."""
        rated: list[_Rated] = []
        total = sum(int((s.bad & o).sum()) for s, o in few)
        for effect in effects:
            self.prober.check_time()
            if first and not any((s.agrees(effect.outputs(s.queries)) & s.bad & o).any() for s, o in first):
                continue
            judged = self._judged(effect, [s for s, _ in few])
            pairs = [
                (agrees & s.bad & o, changes & ~s.bad & ~agrees)
                for (agrees, changes), (s, o) in zip(judged, few, strict=True)
            ]
            explained, spoilt = (np.concatenate(flags) for flags in zip(*pairs, strict=True))
            if explained.sum() >= max(1.0, _LEAST * total):
                score = explained.sum() - _SPOILT * spoilt.sum() - _FAR * total * min(effect.cost, 10)
                rated.append((float(score), np.packbits([explained, spoilt]).tobytes(), effect))
        return rated

    @staticmethod
    def _tiny(sample: Sample, left: Flags) -> tuple[Sample, Flags]:
        """A few queries of a sample, wrong ones that are left to explain."""
        queries = sample.queries
        open_ = (sample.bad & left).reshape(queries.shape)
        wrong = np.flatnonzero(open_.any(1))
        rows = np.unique(wrong[np.linspace(0, len(wrong) - 1, _TINY).astype(int)])
        fewer = Queries(queries.call, queries.rows[rows])
        bad = sample.bad.reshape(queries.shape)[rows].ravel()
        tiny = Sample(fewer, sample.actual[rows], bad, sample.error)
        return tiny, left.reshape(queries.shape)[rows].ravel()

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


def _undefined(left: Sequence[tuple[Sample, Flags]]) -> list[Effect]:
    effects: dict[str, Effect] = {}
    for sample, o in left:
        bad = sample.actual.reshape(len(sample.bad), sample.actual.shape[-1])[sample.bad & o]
        if np.isnan(bad).any():
            effects["nan"] = constant(float("nan"))
        if (bad == 0).all(-1).any():
            effects["zero"] = constant(0.0)
        if np.isinf(bad).any():
            effects["inf"] = constant(float("inf"))
    return list(effects.values())
