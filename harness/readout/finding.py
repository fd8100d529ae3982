"""Finding the operator of a kernel: screen, read, explain, mine, and try what was found on calls that were not seen before."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from assay.harness.attention.declaration import declaration
from assay.harness.readout.asking import COMPARED_DATA, FEW_HEADS, Compared
from assay.harness.readout.fitting import Fitter
from assay.harness.readout.forms import Tolerance
from assay.harness.readout.key_factors import KeyFactors
from assay.harness.readout.mining import Condition, Literal
from assay.harness.readout.operators import Operator
from assay.harness.readout.probing import CallPlan, Prober, extreme_plans, fixed_plans, repeated_plans, steep_plans
from assay.harness.readout.queries import Queries
from assay.harness.readout.samples import Sample, close

# Calls that are read before a rule is sought, and those that contradict it that are read after.
_READ_AT_ONCE, _READ_AGAIN = 8, 5
# Share of the wrong outputs below which a round that explains no more than the one before is the last.
_LITTLE = 0.1
# Rounds in which calls that contradict the rules are read.
_ROUNDS = 4
# Calls on which an operator is tried that it was not mined from, in each round.
_FRESH = 20
_TOTALS, _PREFIXES = ("total", "most_total"), ("prefix", "previous_prefix", "first_prefix", "most_prefix")
_NEW, _POSITIONS, _SEQUENCES = ("new", "most_new"), ("pos", "i"), ("seqs", "seq")
# Features of a query of which calls with any value can be made.
_ASKED = frozenset((*_TOTALS, *_PREFIXES, *_NEW, *_POSITIONS, *_SEQUENCES, "layer"))
# Numbers of a call, of which each is asked for in its turn.
_COUNTS = frozenset(("call", "nth"))
# Tokens of the longest sequence that is made.
_MOST_KEYS = 5000
# Calls that are drawn to tell rivals apart, in each round.
_TELLING = 6
# A kernel that takes longer on a small call gets fewer and shorter ones.
_SLOW_S = 0.03
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Relative error of a query that rounding explains on normal data: float32 rounds by 6e-8, float16 by 5e-4, bfloat16 by 4e-3, both
# weights and output, and a sum of values that cancel has a larger relative error.
_NOISE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# Multiple of the noise from which on a query is wrong; on a GPU, whose float32 may be TF32, and of a quantisation. Nearer to the
# noise, whatever is tried would explain some query by chance.
_CLEARLY, _CLEARLY_NOISY = 3.0, 6.0
# The same for a declared quantisation, on data on which it is exact: what a scale that is itself rounded costs.
_QUANTISED = 5e-3


class Finder(Fitter):
    """Finds the operator of one kernel: `operator`."""

    @classmethod
    def begun(cls, prober: Prober, data: str, seed: int, compared: Sequence[Compared]) -> Finder | None:
        """Make a finder for the first dtype that the kernel computes; None if it computes none."""
        for dtype in _DTYPES:
            declared = declaration(prober.kernel).dtypes
            if declared is not None and str(dtype).removeprefix("torch.") not in declared:
                continue
            finder = cls(prober, data, dtype, _NOISE[dtype], seed, compared=compared)
            # A kernel may declare one phase only. Of some length: what begins with a later call should not seem to begin there.
            first = [CallPlan(lens, dtype=dtype, data=data) for lens in (((40, 70), (37, 29)), ((1, 110), (1, 66)))]
            finder._screen(first)
            if not finder.samples:
                continue
            # The second calls, since the first may compile; and CPU time, where a call takes that, since the machine may be busy.
            clock = time.process_time if prober.device == "cpu" else time.monotonic
            begun, asked = clock(), prober.asked
            finder._screen([replace(plan, seed=1) for plan in first])
            finder.slow = clock() - begun > _SLOW_S * (prober.asked - asked)
            finder._screen([CallPlan(((1, 30),), dtype=dtype, data=data), CallPlan(((40, 0),), dtype=dtype, data=data)])
            finder._judge_by(*_exactness(finder.samples, _NOISE[dtype], data, prober.device))
            finder._leave_out_not_causal()
            return finder
        return None

    def run(self) -> None:
        """Find the operator, as long as the budget lasts; what is known so far stands in `operator` and `samples`."""
        self._screen(repeated_plans(self.data, self.dtype))
        self._ask_compared()
        self._screen(fixed_plans(self.data, self.dtype, not self.slow))
        if self.data == "normal":  # what is rounded as declared is exact on no others
            self._screen(steep_plans(self.dtype))
            exact = self.dtype == torch.float32 and self.prober.device == "cpu"  # 16 bits and TF32 are less exact
            if not self._wrong and exact:
                self._screen(extreme_plans())
        if not self._wrong and self._apart:
            self.causal_only = False
            self._screen(self._apart)
            self._screen(plan for plan in fixed_plans(self.data, self.dtype, not self.slow) if not plan.causal)
        self.not_causal_note = self.causal_only and bool(self._apart)
        if not self._wrong:
            self._screen(islice(self._drawn, _FRESH // 2 if self.slow else _FRESH))
        if self._wrong:
            self._refine()

    def _refine(self) -> None:
        """Read calls, seek rules, and try them on others, until none contradicts them."""
        drawn = self._drawn
        for sample in self._to_read(self.samples, _READ_AT_ONCE - 3 * self.slow):
            self._read(sample)
        tried: set[CallPlan] = set()
        explained = -1.0
        for _ in range(_ROUNDS):
            operators = self.fit()
            self.operator = operators[0]
            plans = [*self._again(), *self._edges(operators), *self._telling(operators, drawn)]
            asked = {sample.plan for sample in self.samples if sample.fresh}
            plans = [plan for plan in dict.fromkeys(plans) if replace(plan, seed=0) not in tried and plan not in asked]
            tried |= {replace(plan, seed=0) for plan in plans}
            plans += islice(drawn, _FRESH // 2 if self.slow else _FRESH)
            self._screen(plans, fresh=True)
            against = [sample for sample in self.samples if not self.agreed(self.operator, sample).all()]
            share = self.tally(self.operator, self.samples).share
            if not against or (share < _LITTLE and share <= explained):
                break  # nothing contradicts it; or what was read in a second round did not help
            explained = share
            if share >= _LITTLE:
                self._few = []
            for sample in self._to_read(against, _READ_AGAIN - 2 * self.slow):
                self._read(sample)
        else:
            self.operator = self.fit()[0]

    def _again(self) -> list[CallPlan]:
        """Some calls that were wrong, with other data: what is wrong now and then is right this time."""
        wrong = sorted((s.plan for s in self.samples if s.bad.any() and not s.fresh), key=lambda plan: plan.size)
        return [replace(plan, seed=plan.seed + 50_000, data=self._made(plan)) for plan in wrong[:3]]

    def _made(self, plan: CallPlan) -> str:
        """The data of a call that is made as one was."""
        return self.data if plan.data == COMPARED_DATA else plan.data

    def _edges(self, operators: Sequence[Operator]) -> list[CallPlan]:
        """Calls on both sides of the thresholds of operators."""
        wanted = dict.fromkeys(
            (literal.term.name, value)
            for operator in operators
            for literal in _literals(operator)
            if not literal.term.minus and not literal.term.modulo
            for value in _sides(literal)
        )
        bases = self._bases()
        plans = [plan for name, value in wanted for plan in self._at(name, value, bases)]
        return list(dict.fromkeys(plans))[: 20 if self.slow else 60]

    def _bases(self) -> list[CallPlan]:
        """Small wrong calls of different kinds: a call at an edge is one of them with another length."""
        kinds: dict[tuple[object, ...], CallPlan] = {}
        plans = (s.plan for s in self.samples if s.bad.any() and s.plan.data == self.data)
        for plan in sorted(plans, key=lambda wrong: wrong.size):
            kinds.setdefault((plan.phase, len(plan.lens), any(p for _, p in plan.lens)), plan)
        return list(kinds.values())[:3]

    def _at(self, name: str, value: int, bases: Sequence[CallPlan]) -> list[CallPlan]:
        """Calls in which a feature has a value."""
        plans: list[CallPlan] = []
        for base in bases or [CallPlan(((7, 9),), dtype=self.dtype, data=self.data)]:
            if name == "layer" and value >= 0:
                plans.append(replace(base, layer=value))
                continue
            for place, (new, prefix) in enumerate(base.lens):
                lens = list(base.lens)
                decode = base.phase == "decode"
                if name in (*_TOTALS, "j") and 1 < value < _MOST_KEYS:
                    now = 1 if decode or not prefix else min(new, value - 1)
                    lens[place] = (now, value - now) if prefix else (value, 0)
                elif name in _PREFIXES and 0 <= value < _MOST_KEYS:
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
                    heads = (2, 1) if value > FEW_HEADS and base.heads[1] > 1 and base.heads[0] < 4 else base.heads
                    plans.append(replace(base, lens=tuple(lens), heads=heads, seed=7000 + value))
        return plans

    def _telling(self, operators: Sequence[Operator], plans: Iterable[CallPlan]) -> list[CallPlan]:
        """Plans of calls on which a rival says something else than the chosen operator."""
        undecided = [operator for operator in operators[1:] if operator != operators[0]]
        telling: list[CallPlan] = []
        for plan in islice(plans, 60):
            if not undecided or len(telling) >= _TELLING:
                break
            call = plan.make()
            rows = np.arange(call.q.shape[0])[:: max(1, call.q.shape[0] // 6)]
            queries = Queries(call, rows, self.prober.asked, self.prober.of_kind[call.layer, call.phase])
            size = np.abs(queries.right).sum(-1)
            said = operators[0].outputs(queries)
            split = [o for o in undecided if not close(o.outputs(queries), said, size, self.error).all()]
            if split:
                telling.append(plan)
                undecided = [o for o in undecided if o not in split]
        return telling


def _literals(operator: Operator) -> Iterable[Literal]:
    yield from (literal for _, literal in _of_queries(operator))
    for clause in operator.clauses:
        if isinstance(clause.effect, KeyFactors):
            yield from (literal for part in clause.effect.parts for literal in part.condition.literals)


def counts_calls(operator: Operator) -> bool:
    """Return True if an operator speaks of the number of a call, so that it may give another output after other calls."""
    return any(literal.term.name in _COUNTS for literal in _literals(operator))


def _of_queries(operator: Operator) -> list[tuple[Condition, Literal]]:
    """List the literals of the conditions on queries, each with its condition."""
    return [(clause.condition, literal) for clause in operator.clauses for literal in clause.condition.literals]


def _sides(literal: Literal) -> tuple[int, ...]:
    block = literal.term.block
    value = literal.value * block
    return (value - 1, value, value + 1) if literal.op in (">=", "<") or block > 1 else (value,)


def _exactness(samples: Sequence[Sample], base: float, data: str, device: str) -> tuple[float, Tolerance]:
    """Return the error that counts as wrong, more than rounding or twelve times the spread of the better queries explains; and the
    tolerance of readings."""
    errors = np.concatenate([sample.errors for sample in samples])
    spread = 12 * float(np.quantile(np.nan_to_num(errors, posinf=1e9), 0.2))
    noisy = device != "cpu" or data == "levels"
    base = max(base, _QUANTISED) if data == "levels" else base
    noise = min(max(base, spread), 50 * base if noisy else base)
    tolerance = Tolerance(noise / 2, 2 * noise, max(1e-7, noise * 1e-3))
    return (_CLEARLY_NOISY if noisy else _CLEARLY) * noise, tolerance
