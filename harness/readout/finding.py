"""Finding the operator of a kernel: screen, read, explain, mine, and try what was found on calls that were not seen before."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.localize.reading import WeightReading, read, row_errors
from assay.harness.readout.addresses import addresses
from assay.harness.readout.candidates import effects_of, general_effects, key_factors
from assay.harness.readout.effects import Constant, known_effects
from assay.harness.readout.features import ROW_TERMS, chosen, joined
from assay.harness.readout.forms import CallContext, Row, fits
from assay.harness.readout.key_factors import KeyFactors
from assay.harness.readout.mining import Condition, Literal, mine
from assay.harness.readout.operators import Clause, Effect, Operator
from assay.harness.readout.probing import (
    STEEP,
    BudgetSpentError,
    CallPlan,
    Prober,
    drawn_plans,
    extreme_plans,
    fixed_plans,
    plan_of,
    repeated_plans,
    steep_plans,
    varied_plans,
)
from assay.harness.readout.queries import Flags, Queries
from assay.harness.readout.samples import LOOSE, Agreement, Exactness, Explained, Sample, close

Compared = tuple[AttentionCall, float]
"""A call that a kernel was given before, and the relative error of a query, L1, from which on it is wrong."""
_COMPARED = "compared"
"""`CallPlan.data` of such calls, whose data may be any."""
_FEW_HEADS = 300
"""Keys from which on a call that is made has two q heads, where it may."""
READ_AT_ONCE, READ_AGAIN = 8, 5
"""Calls that are read before a rule is sought, and those that contradict it that are read after."""
_LITTLE = 0.1
"""Share of the wrong outputs below which a round that explains no more than the one before is the last."""
_LEAST = 0.05
"""Share of the wrong outputs that are left that an effect must explain. With three clauses, the first must explain a sixth for the
half from which on anything is said."""
_ROUNDS = 4
"""Rounds in which calls that contradict the rules are read."""
FRESH = 20
"""Calls on which an operator is tried that it was not mined from, in each round."""
CLAUSES = 3
"""Most clauses of an operator."""
FAR_FETCHED = 5.0
"""A condition of this cost may be a coincidence where whole calls are wrong and others are right: they are wrong now and then."""
_BITS = 15.0
"""Bits that a literal of a condition is worth: there are some 10,000 literals, hence 13 bits, and two to be on the safe side."""
WRONG_ROWS, RIGHT_ROWS = 16, 8
"""Queries of a call that are looked at."""
_FEW = 10
"""Calls on which effects are compared before the best ones are tried on all."""
_SPOILT = 0.05
"""What it costs an effect to change a right query, in wrong ones explained: a condition must then keep it from there."""
_FAR = 0.02
"""What one more of cost costs an effect, in shares of the wrong queries explained."""
_RIVALS = 3
"""Effects that are tried of those that do the same on a few calls."""
_Rated = tuple[float, bytes, Effect]
"""An effect, how well it does on a few calls, and what is the same for effects that do the same there."""
_FIRST, _TINY = 3, 3
"""Calls, and wrong queries of each, on which an effect must explain something to be compared at all: most explain nothing."""
_SURELY_TRIED, _TRIED = 6, 10
"""Effects whose conditions are mined, best first; and most of them, where no condition is found for any."""
_TOTALS, _PREFIXES = ("total", "most_total"), ("prefix", "previous_prefix", "first_prefix", "most_prefix")
_NEW, _POSITIONS, _SEQUENCES = ("new", "most_new"), ("pos", "i"), ("seqs", "seq")
_ASKED = frozenset((*_TOTALS, *_PREFIXES, *_NEW, *_POSITIONS, *_SEQUENCES))
"""Features of a query of which calls with any value can be made."""
_HALVINGS = 8
"""Calls that are asked for at a threshold, each halfway between a wrong and a right query: enough for lengths of a few hundred."""
_TELLING = 6
"""Calls that are drawn to tell rivals apart, in each round."""


class Finder:
    """Finds the operator of one kernel.

    Args:
        prober: the kernel.
        data: see `CallPlan.data`.
        dtype: of the calls.
        exactness: what counts as wrong.
        seed: of the data, and of what is drawn.
        slow: whether the kernel is slow, so that long calls are left out and fewer are made.
        compared: calls that it was given before, of which those of this dtype are asked for.
    """

    def __init__(
        self,
        prober: Prober,
        data: str,
        dtype: torch.dtype,
        exactness: Exactness,
        seed: int = 0,
        slow: bool = False,
        compared: Sequence[Compared] = (),
    ) -> None:
        self._compared = [one for one in compared if one[0].q.dtype == dtype]
        self.prober, self.data, self.dtype, self.exactness, self.slow = prober, data, dtype, exactness, slow
        self._seed = seed
        self.samples: list[Sample] = []
        """What was seen so far."""
        self.operator = Operator()
        """What is known so far."""
        self.causal_only = False
        """Whether calls without a causal mask are left out."""
        self.not_causal_note = False
        """Whether calls without a causal mask are wrong in a way of their own, which is not read: most kernels get none."""
        self._apart: list[CallPlan] = []
        self._few: list[Sample] = []
        self._general: dict[bytes, list[_Rated]] = {}
        self._draw = np.random.default_rng(self._seed)
        self._drawn = drawn_plans(data, dtype, 7 + seed)

    @property
    def wrong(self) -> bool:
        """Whether anything was seen to be wrong."""
        return any(sample.bad.any() for sample in self.samples)

    def run(self) -> None:
        """Find the operator; what is known so far stands in `operator` and `samples`.

        Raises:
            BudgetSpentError: the budget is spent.
        """
        self.screen(repeated_plans(self.data, self.dtype))
        self._ask_compared()
        self.screen(fixed_plans(self.data, self.dtype, not self.slow))
        if self.data == "normal":  # what is rounded as declared is exact on no others
            self.screen(steep_plans(self.dtype))
            if (
                not self.wrong and self.dtype == torch.float32 and self.prober.device == "cpu"
            ):  # 16 bits and TF32 are less exact
                self.screen(extreme_plans())
        if not self.wrong and self._apart:
            self.causal_only = False
            self.screen(self._apart)
            self.screen(plan for plan in fixed_plans(self.data, self.dtype, not self.slow) if not plan.causal)
        self.not_causal_note = self.causal_only and bool(self._apart)
        if not self.wrong:
            self.screen(islice(self._drawn, FRESH // 2 if self.slow else FRESH))
        if self.wrong:
            self._refine()

    def _refine(self) -> None:
        """Read calls, seek rules, and try them on others, until none contradicts them."""
        drawn = self._drawn
        for sample in self.to_read(self.samples, READ_AT_ONCE - 3 * self.slow):
            self.read(sample)
        tried: set[CallPlan] = set()
        explained = -1.0
        for _ in range(_ROUNDS):
            operators = self.fit()
            self.operator = operators[0]
            plans = [*self.again(), *self.edges(operators), *self.telling(operators, drawn)]
            asked = {sample.plan for sample in self.samples if sample.fresh}
            plans = [plan for plan in dict.fromkeys(plans) if replace(plan, seed=0) not in tried and plan not in asked]
            tried |= {replace(plan, seed=0) for plan in plans}
            plans += islice(drawn, FRESH // 2 if self.slow else FRESH)
            self.screen(plans, fresh=True)
            if not self.slow:
                self.bisect(self.operator)
            against = [sample for sample in self.samples if not self.agreed(self.operator, sample).all()]
            share = self.tally(self.operator, self.samples).share
            if not against or (share < _LITTLE and share <= explained):
                break  # nothing contradicts it; or what was read in a second round did not help
            explained = share
            if share >= _LITTLE:
                self._few = []
            for sample in self.to_read(against, READ_AGAIN - 2 * self.slow):
                self.read(sample)
        else:
            self.operator = self.fit()[0]

    # Asking

    def _ask_compared(self) -> None:
        """Ask for the calls that the kernel was given before, and for variations of the smallest one that is wrong."""
        before = len(self.samples)
        for call, error in self._compared:
            if call.causal or not self.causal_only:
                self._ask(plan_of(call, _COMPARED), call, max(error, self.exactness.error))
        wrong = [sample.plan for sample in self.samples[before:] if sample.bad.any()]
        if wrong:
            base = replace(min(wrong, key=lambda plan: plan.size), data=self.data)
            if base.keys > _FEW_HEADS:  # with few heads, a long call is read in seconds, if it is wrong then too
                self.screen([replace(base, heads=(2, 1))])
                base = self.samples[-1].plan if self.samples[-1].bad.any() else base
            self.screen(varied_plans(base)[: 8 if self.slow else None])

    def screen(self, plans: Iterable[CallPlan], fresh: bool = False) -> None:
        """Ask for the calls, and keep some queries of each."""
        for plan in plans:
            if self.causal_only and not plan.causal:
                continue
            seed = plan.seed + 1_000_003 * self._seed
            dim, value_dim = self.prober.nearest_shape(plan.head_dim, plan.value_dim)
            call = replace(plan, seed=seed, head_dim=dim, value_dim=value_dim).make(self.prober.device)
            self._ask(plan, call, self._least_error(plan), fresh)

    def _least_error(self, plan: CallPlan) -> float:
        """The relative error of a query from which on it is wrong."""
        return {"scores": LOOSE, "steep": STEEP * self.exactness.error}.get(plan.data, self.exactness.error)

    def _ask(self, plan: CallPlan, call: AttentionCall, error: float, fresh: bool = False) -> None:
        number, nth = self.prober.asked, self.prober.of_kind[call.layer, call.phase]
        out = self.prober(call)
        if out is None:
            return
        wrong = row_errors(call, out) > error
        some: Flags = np.asarray(wrong.any(1))
        rows = self._rows(some)
        queries = Queries(call, rows, number, nth)
        actual = out[torch.from_numpy(rows)].numpy()
        bad = wrong[rows].ravel()
        self.samples.append(Sample(plan, queries, actual, bad, error, fresh))

    def leave_out_not_causal(self) -> None:
        """Find out whether the kernel computes calls without a causal mask at all, and ask for calls that have one if it does not.

        It does not if it answers them as if they had one, rightly or wrongly, as many kernels do. If they are wrong otherwise, they
        are asked for where nothing else is wrong: most kernels are never called so.
        """
        plans = [CallPlan(lens, dtype=self.dtype, data=self.data) for lens in (((9, 0), (3, 0)), ((12, 20), (5, 6)))]
        before = len(self.samples)
        self.screen(plans)
        right = [not sample.bad.any() for sample in self.samples[before:]]
        before += len(right)
        without = [replace(plan, causal=False) for plan in plans]
        self.screen(without)
        found = self.samples[before:]
        if not all(sample.bad.any() for sample in found):
            return
        as_causal = all(self._as_causal(sample) for sample in found) or self._ignores_causal(plans)
        if not (as_causal or any(right)):
            return
        self.causal_only = bool(found)
        self._apart = [] if as_causal else without
        del self.samples[before:]

    @staticmethod
    def _as_causal(sample: Sample) -> bool:
        """Whether the answer is that of the same call with a causal mask."""
        one = sample.queries
        causal = Queries(one.call.with_spec(mask=Mask(causal=True)), one.rows, one.number, one.nth)
        return bool(sample.agrees(causal.right).all())

    def _ignores_causal(self, plans: Sequence[CallPlan]) -> bool:
        """Whether the kernel gives one answer, and not zeros, to calls that differ in their mask only."""
        for plan in plans:
            call = plan.make(self.prober.device)
            masked = self.prober(call)
            if masked is None or not masked.any():
                return False
            other = self.prober(call.with_spec(mask=Mask(causal=False)))
            if other is None or not torch.equal(masked, other):
                return False
        return True

    def judge_by(self, exactness: Exactness) -> None:
        """Judge what was seen so far, and what follows, by this."""
        self.exactness = exactness
        for sample in self.samples:
            sample.error = exactness.error
            sample.bad = sample.errors > exactness.error

    def _rows(self, wrong: Flags) -> NDArray[np.int64]:
        bad, good = np.flatnonzero(wrong), np.flatnonzero(~wrong)
        beside = np.intersect1d(np.concatenate([bad[:1] - 1, bad[-1:] + 1]), good)
        parts = [bad[:2], bad[-2:], self._draw.permutation(bad)[: WRONG_ROWS - 4]]
        parts += [good[:2], good[-2:], beside, self._draw.permutation(good)[: RIGHT_ROWS - 4]]
        return np.unique(np.concatenate(parts)).astype(np.int64)

    def read(self, sample: Sample) -> None:
        """Read the weights of a sample's queries, once."""
        if sample.reading is not None:
            return
        queries = sample.queries
        reading = read(self.prober, queries.call, queries.rows.tolist(), queries.number)
        if reading is not None:
            self._explain(sample, reading)

    def _explain(self, sample: Sample, reading: WeightReading) -> None:
        """Find the forms that fit the wrong rows."""
        queries, context, tolerance = sample.queries, CallContext(reading), self.exactness.tolerance
        rows = [Row(context, *divmod(place, queries.heads), tolerance) for place in range(len(sample.bad))]
        found = tuple(tuple(fits(row)) if bad else () for row, bad in zip(rows, sample.bad, strict=True))
        sample.reading = reading
        sample.explained = Explained(queries, found, ~sample.bad)

    def to_read(self, samples: Sequence[Sample], most: int) -> list[Sample]:
        """Samples that are worth reading: small ones first, of each kind some."""
        kinds: dict[tuple[object, ...], int] = {}

        def rank(sample: Sample) -> int:
            plan = sample.plan
            kind = (plan.phase, len(plan.lens) > 1, any(p for _, p in plan.lens), plan.keys > 70)
            kinds[kind] = kinds.get(kind, 0) + 1
            return kinds[kind]

        plain = [
            s
            for s in samples
            if s.bad.any() and s.plan.keys > 3 and s.plan.data in (self.data, _COMPARED, "steep") and s.reading is None
        ]
        plain.sort(key=lambda s: s.plan.size)
        ranks = [rank(sample) for sample in plain]
        order = sorted(range(len(plain)), key=lambda n: (ranks[n], n))
        return [plain[n] for n in order[:most]]

    # Explaining

    def judged(self, effect: Effect, samples: Sequence[Sample]) -> Iterable[tuple[Flags, Flags]]:
        """For each sample, which rows the effect gives the answer of, and on which it changes the right output."""
        for sample in samples:
            out = effect.outputs(sample.queries)
            yield sample.agrees(out), sample.differs(out)

    def clauses(self, effect: Effect, open_: Sequence[Flags]) -> tuple[int, list[Clause]]:
        """How many wrong rows an effect explains, and its clauses, cheapest first; no clause if none keeps right rows right."""
        tables, flags, hits, strange = [], [], 0, 0
        calls: list[tuple[int, int]] = []
        for sample, (agrees, changes), left in zip(self.samples, self.judged(effect, self.samples), open_, strict=True):
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
        conditions = mine(joined(tables), np.concatenate(flags), ROW_TERMS)
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
        for _ in range(CLAUSES):
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
        found = self._pruned(Operator(tuple(clauses)))
        if self.tally(found, self.samples).explained > self.tally(self.operator, self.samples).explained:
            self.operator = found

    def _pruned(self, operator: Operator) -> Operator:
        """The operator without clauses that later ones make superfluous."""
        tally = self.tally(operator, self.samples)
        for clause in operator.clauses[:-1]:
            fewer = Operator(tuple(one for one in operator.clauses if one is not clause))
            if (found := self.tally(fewer, self.samples)).explained >= tally.explained and found.false <= tally.false:
                operator, tally = fewer, found
        return operator

    def _best(self, open_: Sequence[Flags]) -> list[Clause]:
        """The clause that explains most of what is left, and its rivals; empty if there is none."""
        left = [(s, o) for s, o in zip(self.samples, open_, strict=True) if (s.bad & o).any()]
        ranked = self._ranked(left)
        best: list[tuple[float, Clause]] = []
        for number, effect in enumerate(ranked[:_TRIED]):
            if number >= _SURELY_TRIED and best:
                break
            hits, clauses = self.clauses(effect, open_)
            best += [(hits * (1 - 0.01 * min(clause.cost, 20)), clause) for clause in clauses]
        best.sort(key=lambda one: -one[0])
        near = [clause for score, clause in best if score > 0.8 * best[0][0]]
        return list(dict.fromkeys(near))[:8]

    def _ranked(self, left: Sequence[tuple[Sample, Flags]]) -> list[Effect]:
        """Effects by how many wrong rows of a few calls they explain."""
        few = [one for one in left if any(one[0] is kept for kept in self._few)]
        if len(few) < min(_FEW, len(left)):
            few = list(left[:: max(1, len(left) // _FEW)][:_FEW])
        self._few = [sample for sample, _ in few]
        total = sum(int((s.bad & o).sum()) for s, o in few)
        readings = []
        for sample, o in left:
            if sample.explained is not None:
                kept = tuple(f if o[n] else () for n, f in enumerate(sample.explained.fits))
                readings.append(Explained(sample.queries, kept, sample.explained.right))
        right = [s.queries for s in self.samples if not s.bad.any()]
        answers = [(s.queries, s.actual, s.bad & o) for s, o in few]
        rated = self._rated(_undefined(left), few)

        def settled() -> bool:
            return any(one[0] > 0.9 * total for one in rated)

        rated += self._rated(key_factors(readings, right), few)
        if not settled():
            rated += self._rated(effects_of(readings, right), few)
        if not settled():
            rated += self._rated(addresses(readings), few)
        if not settled():
            # These do not depend on what was read, so that a round in which nothing was explained need not try them again.
            asked = b"".join(str(id(s)).encode() + np.packbits(s.bad & o).tobytes() for s, o in few)
            if asked not in self._general:
                tiny = [self._tiny(s, o) for s, o in few[:_FIRST]]
                found = self._rated(general_effects(answers), few, tiny)
                if not any(one[0] > 0.9 * total for one in found):
                    found += self._rated(known_effects(), few, tiny)
                self._general[asked] = found
            rated += self._general[asked]
        alike_before: Counter[bytes] = Counter()
        ranked = []
        for _, alike, effect in sorted(rated, key=lambda one: one[0], reverse=True):
            alike_before[alike] += 1
            if alike_before[alike] <= _RIVALS:
                ranked.append(effect)
        return ranked

    def _rated(
        self, effects: Iterable[Effect], few: Sequence[tuple[Sample, Flags]], first: Sequence[tuple[Sample, Flags]] = ()
    ) -> list[_Rated]:
        """The effects that explain enough of what is left of a few calls; if some of it `first`, where that is given."""
        found: list[_Rated] = []
        total = sum(int((s.bad & o).sum()) for s, o in few)
        for effect in effects:
            self.prober.check_time()
            if first and not any((s.agrees(effect.outputs(s.queries)) & s.bad & o).any() for s, o in first):
                continue
            judged = self.judged(effect, [s for s, _ in few])
            pairs = [
                (agrees & s.bad & o, changes & ~s.bad & ~agrees)
                for (agrees, changes), (s, o) in zip(judged, few, strict=True)
            ]
            explained, spoilt = (np.concatenate(flags) for flags in zip(*pairs, strict=True))
            if explained.sum() >= max(1.0, _LEAST * total):
                score = explained.sum() - _SPOILT * spoilt.sum() - _FAR * total * min(effect.cost, 10)
                found.append((float(score), np.packbits([explained, spoilt]).tobytes(), effect))
        return found

    @staticmethod
    def _tiny(sample: Sample, left: Flags) -> tuple[Sample, Flags]:
        """A few queries of a sample, wrong ones that are left to explain."""
        queries = sample.queries
        open_ = (sample.bad & left).reshape(queries.shape)
        wrong = np.flatnonzero(open_.any(1))
        rows = np.unique(wrong[np.linspace(0, len(wrong) - 1, _TINY).astype(int)])
        fewer = Queries(queries.call, queries.rows[rows], queries.number, queries.nth)
        bad = sample.bad.reshape(queries.shape)[rows].ravel()
        return (
            Sample(sample.plan, fewer, sample.actual[rows], bad, sample.error),
            left.reshape(queries.shape)[rows].ravel(),
        )

    # Trying

    def agreed(self, operator: Operator, sample: Sample) -> Flags:
        """Where an operator gives the kernel's answer."""
        return sample.agrees(operator.outputs(sample.queries))

    def tally(self, operator: Operator, samples: Sequence[Sample]) -> Agreement:
        """How an operator does."""
        flags = [(sample.bad, self.agreed(operator, sample)) for sample in samples]
        return Agreement(
            sum(int(bad.sum()) for bad, _ in flags), sum(int((bad & agrees).sum()) for bad, agrees in flags),
            sum(int((~bad & ~agrees).sum()) for bad, agrees in flags),
        )  # fmt: skip

    def again(self) -> list[CallPlan]:
        """Some calls that were wrong, with other data: what is wrong now and then is right this time."""
        wrong = sorted((s.plan for s in self.samples if s.bad.any() and not s.fresh), key=lambda plan: plan.size)
        return [replace(plan, seed=plan.seed + 50_000, data=self._made(plan)) for plan in wrong[:3]]

    def _made(self, plan: CallPlan) -> str:
        """The data of a call that is made as one was."""
        return self.data if plan.data == _COMPARED else plan.data

    def edges(self, operators: Sequence[Operator]) -> list[CallPlan]:
        """Calls on both sides of the thresholds of operators."""
        wanted = dict.fromkeys(
            (literal.term.name, value)
            for operator in operators
            for literal in _literals(operator)
            if not literal.term.minus and not literal.term.modulo
            for value in _sides(literal)
        )
        bases = self._bases()
        found = [plan for name, value in wanted for plan in self._at(name, value, bases)]
        return list(dict.fromkeys(found))[: 20 if self.slow else 60]

    def bisect(self, operator: Operator) -> None:
        """Ask for calls between the nearest wrong and right queries on both sides of each threshold of an operator."""
        for condition in _conditions(operator):
            for literal in condition.literals:
                gap = self._gap(condition, literal)
                asked = {sample.plan for sample in self.samples}
                for _ in range(_HALVINGS):
                    if gap is None or abs(gap[0] - gap[1]) <= 1:
                        break
                    between = self._at(literal.term.name, (gap[0] + gap[1]) // 2, [gap[2]])
                    self.screen([plan for plan in between if plan not in asked][:1], fresh=True)
                    if (now := self._gap(condition, literal)) == gap:
                        break
                    gap = now

    def open_limits(self) -> list[tuple[Literal, int, int]]:
        """Thresholds of the operator whose nearest wrong and right queries are not neighbours, with the values of these two."""
        found: list[tuple[Literal, int, int]] = []
        for condition in _conditions(self.operator):
            for literal in condition.literals:
                gap = self._gap(condition, literal)
                if gap is not None and abs(gap[0] - gap[1]) > 1:
                    found.append((literal, gap[0], gap[1]))
        return found

    def _gap(self, condition: Condition, literal: Literal) -> tuple[int, int, CallPlan] | None:
        """The nearest wrong and right query at a threshold that meet the other literals, and the call of the wrong one.

        None if the literal is no threshold on an amount, or one side has no query.
        """
        term = literal.term
        if (
            term.name not in _ASKED
            or term.minus
            or literal.op not in (">=", "<")
            or term.modulo
            or term.block > 1
            or condition.negated
        ):
            return None
        rest = Condition(tuple(one for one in condition.literals if one is not literal))
        side = 1 if literal.op == ">=" else -1
        wrong: list[tuple[int, CallPlan]] = []
        right: list[int] = []
        for sample in self.samples:
            x, there = side * term.of(sample.queries.table), rest.holds(sample.queries.table)
            if (bad := there & sample.bad).any():
                wrong.append((int(x[bad].min()), sample.plan))
            right += np.unique(x[there & ~sample.bad]).tolist()
        if not wrong:
            return None
        nearest, plan = min(wrong, key=lambda one: one[0])
        before = [x for x in right if x < nearest]
        return (side * nearest, side * max(before), replace(plan, data=self._made(plan))) if before else None

    def _bases(self) -> list[CallPlan]:
        """Small wrong calls of different kinds: a call at an edge is one of them with another length."""
        kinds: dict[tuple[object, ...], CallPlan] = {}
        for sample in sorted(
            (s for s in self.samples if s.bad.any() and s.plan.data == self.data), key=lambda s: s.plan.size
        ):
            plan = sample.plan
            kinds.setdefault((plan.phase, len(plan.lens), any(p for _, p in plan.lens)), plan)
        return list(kinds.values())[:3]

    def _at(self, name: str, value: int, bases: Sequence[CallPlan]) -> list[CallPlan]:
        """Calls in which a feature has a value."""
        found: list[CallPlan] = []
        for base in bases or [CallPlan(((7, 9),), dtype=self.dtype, data=self.data)]:
            for place, (new, prefix) in enumerate(base.lens):
                lens = list(base.lens)
                decode = base.phase == "decode"
                if name in (*_TOTALS, "j") and 1 < value < 5000:
                    now = 1 if decode or not prefix else min(new, value - 1)
                    lens[place] = (now, value - now) if prefix else (value, 0)
                elif name in _PREFIXES and 0 <= value < 5000:
                    lens[place] = (new, value)
                elif name in _NEW and 0 < value < 700:
                    lens[place] = (value, prefix)
                elif name in _POSITIONS and 0 < value < 700:
                    lens[place] = (1, value) if decode else (value + 2, prefix if name == "i" else 0)
                elif name in _SEQUENCES and 0 < value < 20:
                    lens = (lens * value)[:value]
                else:
                    continue
                if sum(n * (n + p) for n, p in lens) < 10**6:
                    heads = (2, 1) if value > _FEW_HEADS and base.heads[1] > 1 and base.heads[0] < 4 else base.heads
                    found.append(replace(base, lens=tuple(lens), heads=heads, seed=7000 + value))
        return found

    def telling(self, operators: Sequence[Operator], plans: Iterable[CallPlan]) -> list[CallPlan]:
        """Plans of calls on which a rival says something else than the chosen operator."""
        undecided = [operator for operator in operators[1:] if operator != operators[0]]
        found: list[CallPlan] = []
        for plan in islice(plans, 60):
            if not undecided or len(found) >= _TELLING:
                break
            call = plan.make()
            rows = np.arange(call.q.shape[0])[:: max(1, call.q.shape[0] // 6)]
            queries = Queries(call, rows, self.prober.asked, self.prober.of_kind[call.layer, call.phase])
            size = np.abs(queries.right).sum(-1)
            said = operators[0].outputs(queries)
            split = [o for o in undecided if not close(o.outputs(queries), said, size, self.exactness.error).all()]
            if split:
                found.append(plan)
                undecided = [o for o in undecided if o not in split]
        return found


def _by_chance(condition: Condition, wrong: int, calls: int) -> bool:
    """Whether a condition may tell wrong calls from right ones by chance: it is far-fetched, and the calls could be told apart by
    as few bits as it has."""
    if wrong == 1:
        return bool(condition.literals)
    bits = math.log2(math.comb(calls, wrong))
    return condition.cost > FAR_FETCHED and bits < _BITS * len(condition.literals)


def _literals(operator: Operator) -> Iterable[Literal]:
    for condition in _conditions(operator):
        yield from condition.literals
    for clause in operator.clauses:
        effect = clause.effect
        of_keys: list[Condition] = []
        if isinstance(effect, KeyFactors):
            of_keys += [part.condition for part in effect.parts]
        for condition in of_keys:
            yield from condition.literals


def _conditions(operator: Operator) -> list[Condition]:
    """The conditions on queries."""
    return [clause.condition for clause in operator.clauses]


def _sides(literal: Literal) -> tuple[int, ...]:
    block = literal.term.block
    value = literal.value * block
    return (value - 1, value, value + 1) if literal.op in (">=", "<") or block > 1 else (value,)


def _undefined(left: Sequence[tuple[Sample, Flags]]) -> list[Effect]:
    found: dict[str, Effect] = {}
    for sample, o in left:
        bad = sample.actual.reshape(len(sample.bad), -1)[sample.bad & o]
        if np.isnan(bad).any():
            found["nan"] = Constant(float("nan"))
        if (bad == 0).all(-1).any():
            found["zero"] = Constant(0.0)
        if np.isinf(bad).any():
            found["inf"] = Constant(float("inf"))
    return list(found.values())
