"""The read-out of a kernel: describes the operator that it computes in a sentence.

The search fits an operator to some of the compared calls and tests it on the others. Calls that contradict it join the search,
and new calls decide between rivals.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice, zip_longest

import numpy as np
import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import Bug
from assay.harness.attention.call import AttentionCall, Kernel
from assay.harness.attention.matrix_data import ON_GRID
from assay.harness.attention.shapes import Shape, shape_of
from assay.harness.evidence.kernel_result import Tried
from assay.harness.localize.causes import explaining
from assay.harness.localize.kernel_runs import CallResult
from assay.harness.localize.threads import budget_clock, few_threads
from assay.harness.readout.features import tried_condition
from assay.harness.readout.fitting import Fitter
from assay.harness.readout.forms import Tolerance
from assay.harness.readout.operators import Operator
from assay.harness.readout.probing import REFUSED, BudgetSpentError, Prober
from assay.harness.readout.queries import Queries
from assay.harness.readout.samples import Agreement, Sample, close, sample_of
from assay.harness.readout.sentences import sentence
from assay.harness.stats.error_sums import relative_l1
from assay.harness.verdict import OPERATOR

CALLS, _SECONDS = 3000, 30.0
"""The budget of a read-out."""
# Most calls with wrong outputs, and without, for fitting and testing an operator; and the numbers of each for the first fit.
_WRONG, _RIGHT, _FIRST_WRONG, _FIRST_RIGHT = 96, 120, 24, 24
# Calls to read before the first fit, and contradicting calls to read after each fit.
_READ_AT_ONCE, _READ_AGAIN = 8, 5
# Most rounds of contradicting calls, and most of these calls in a round.
_ROUNDS, _AGAINST = 4, 12
# A round that explains less than this share of the wrong outputs, and no more than the previous round, is the last.
_LITTLE = 0.02
# Calls to decide between rivals in each round, and shapes to consider for them.
_TELLING, _LOOKED_AT = 6, 60
# Factors of q by which scores get all sizes.
_SIZES = (0.5, 2.0, 4.0, 8.0, 16.0, 32.0)
# Fresh calls to test an operator in each round.
_FRESH = 12
# Relative error of a query, L1, that rounding explains: float32 rounds by 6e-8, float16 by 5e-4, bfloat16 by 4e-3, both weights
# and output, and a sum of values that cancel has a larger relative error.
_NOISE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# A query is wrong from this multiple of the noise on; the second is for a GPU, whose float32 may be TF32, and for a quantisation.
# Closer to the noise, any effect would explain some query by chance.
_CLEARLY, _CLEARLY_NOISY = 3.0, 6.0
# The noise of a declared quantisation on data for which it is exact: the cost of a rounded scale.
_QUANTISED = 5e-3
# Calls of each dtype, wrong and correct ones, that an operator must predict, and the most work (elements of q times keys) of one.
_PREDICTED, _PREDICTED_WORK = 8, 2**24
# Features that can be read.
_READ = frozenset({"window", "softcap", "temperature", "sinks"})


@dataclass(frozen=True)
class ReadOut:
    """The operator inferred from a kernel's answers.

    Attributes:
        operator: the operator; without an effect, attention.
        sentence: a description without a full stop, or an empty string if the kernel was correct on all calls or no rule fits.
        all: the operator's agreement on all calls.
        fresh: its agreement on held-out calls.
        calls: the number of calls to the kernel.
        seconds: the time taken.
        cpu_seconds: the CPU time taken.
        complete: whether the budget sufficed.
        notes: other behaviour of the kernel, such as exceptions.
        samples: the answers.
        predicts: whether it also predicts compared calls of every dtype, on their own data, within their bounds.
        quantised: whether the kernel declares a quantisation.
    """

    operator: Operator = field(default_factory=Operator)
    sentence: str = ""
    all: Agreement = field(default_factory=Agreement)
    fresh: Agreement = field(default_factory=Agreement)
    calls: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    complete: bool = True
    notes: tuple[str, ...] = ()
    samples: tuple[Sample, ...] = field(default=(), repr=False)
    predicts: bool = True
    quantised: bool = False

    @property
    def exact(self) -> bool:
        """True if the operator gives every observed output, correct or wrong."""
        return self.all.exact


def read_out(
    kernel: Kernel,
    results: Sequence[CallResult],
    *,
    seconds: float = _SECONDS,
    calls: int = CALLS,
    shapes: Iterable[Shape] = (),
    tried: Tried | None = None,
) -> ReadOut:
    """Infer the operator of a wrong kernel within a budget. Only the given kernel is executed.

    Args:
        kernel: the kernel, which may raise or return NaN.
        results: its earlier results, on calls of one device; at least one is wrong.
        seconds: the time limit, on `budget_clock`; it does not interrupt a call.
        calls: most calls to the kernel.
        shapes: shapes of further calls that it may be asked for.
        tried: the condition under which sequences are wrong, from experiments.
    """
    begun, cpu = time.monotonic(), time.process_time()
    device = str(results[0].call.q.device)
    dims = frozenset((result.call.q.shape[2], result.call.v.shape[2]) for result in results)
    prober = Prober(kernel, calls, seconds, device, dims, clock=budget_clock(device))
    quantised = bool(results[0].noise)
    tried_condition.set(tried)
    with few_threads(()):
        search = _Search(prober, results, quantised, (shape for shape in shapes if not shape.asked))
        complete = True
        try:
            search.run()
        except BudgetSpentError:
            complete = False
        operator, samples = search.fitter.operator, [*search.pool, *search.told]
        seen = search.fitter.tally(operator, samples)
        read = ReadOut(
            operator, sentence(operator), seen, search.fitter.tally(operator, [s for s in samples if s.fresh]),
            samples=tuple(samples), quantised=quantised,
        )  # fmt: skip
        if read.exact and read.sentence:
            read = replace(read, predicts=_predicts(operator, results))
    return replace(
        read, calls=prober.asked, seconds=time.monotonic() - begun, cpu_seconds=time.process_time() - cpu,
        complete=complete, notes=_notes(prober),
    )  # fmt: skip


class _Search:
    """The search for the operator of a kernel.

    Attributes:
        fitter: fits operators to samples.
        pool: the samples of the compared calls.
        told: the samples of calls that decided between rivals, or tested an operator.
    """

    def __init__(self, prober: Prober, results: Sequence[CallResult], quantised: bool, shapes: Iterable[Shape]) -> None:
        self._prober, self._draw, self._calls = prober, np.random.default_rng(0), 0
        self.fitter, self.told = Fitter(prober), list[Sample]()
        computed = [result for result in results if result.call.rows and result.call.k.shape[0]]
        plain = [result for result in computed if _READ.issuperset(result.call.features)]
        wrong = [result for result in plain if result.fails]
        # The widest dtype with wrong outputs: its rounding hides the least.
        dtype = min((result.call.q.dtype for result in wrong), key=list(_NOISE).index, default=torch.float32)
        self._dtype, self._quantised = dtype, quantised
        self._wrong = list(islice(_in_turn([r for r in wrong if r.call.q.dtype == dtype]), _WRONG))
        # Without other shapes, those of wrong calls are asked for with other numbers.
        self._shapes = chain(shapes, cycle([shape_of(result.call) for result in self._wrong]))
        right = [result for result in plain if not result.fails]
        self._right = list(islice(_in_turn([r for r in right if r.call.q.dtype == dtype]), _RIGHT))
        self._noise, self._clearly = _NOISE[dtype], _CLEARLY
        noisy = quantised or prober.device != "cpu"
        if noisy:
            self._noise, self._clearly = max(self._noise, _QUANTISED), _CLEARLY_NOISY
        self._tolerance = Tolerance(self._noise / 2, 2 * self._noise, max(1e-7, self._noise * 1e-3))
        self.fitter.tolerance = self._tolerance
        self.pool = self._on_the_grid() if quantised else self._compared()

    @property
    def _error(self) -> float:
        return self._clearly * self._noise

    def _compared(self) -> list[Sample]:
        return [
            *(sample_of(r.call, r.out, self._error, self._draw) for r in self._wrong),
            *(sample_of(r.call, r.out, self._error, self._draw, True) for r in self._right),
        ]  # fmt: skip

    def _on_the_grid(self) -> list[Sample]:
        """Ask for calls of the same shapes on data for which a declared quantisation is exact."""
        shapes = dict.fromkeys(shape_of(result.call) for result in (*self._wrong, *self._right))
        calls = [call for shape in shapes if (call := self._made(shape)) is not None]
        answers = [(call, out) for call in calls if (out := self._prober(call)) is not None]
        return [sample_of(call, out, self._error, self._draw) for call, out in answers]

    def _made(self, shape: Shape) -> AttentionCall | None:
        """Return a call like those of the pool, or None if it cannot be drawn."""
        self._calls += 1
        try:
            data = ON_GRID if self._quantised else shape.data
            call = replace(shape, dtype=self._dtype, data=data).make(self._calls, self._prober.device)
            if self._quantised:  # the scale depends on the data, not on the kernel
                call = replace(call, v=call.v * 2.0 ** (self._calls % 3))
        except (LookupError, ValueError):
            return None
        return call if call.rows and call.k.shape[0] else None

    def run(self) -> None:
        """Find the operator.

        Raises:
            BudgetSpentError: the budget is used up; the fitter keeps the best operator so far.
        """
        fitter = self.fitter
        wrong = [sample for sample in self.pool if sample.bad.any()]
        right = [sample for sample in self.pool if not sample.bad.any()]
        if not wrong:
            return
        self._seek([*wrong[::2][:_FIRST_WRONG], *right[::2][:_FIRST_RIGHT]])
        fitter.read(fitter.samples, _READ_AT_ONCE)
        self._grade(wrong)
        explained = -1.0
        for _ in range(_ROUNDS):
            operators = fitter.fit()
            fitter.operator = operators[0]
            self._tell_apart(operators)
            self._challenge(operators[0])
            every = [*self.told, *self.pool]
            against = [s for s in every if s.fresh and not fitter.agreed(fitter.operator, s).all()]
            share = fitter.tally(fitter.operator, every).share
            if not against or (share < _LITTLE and share <= explained):
                return  # nothing contradicts it, or the readings of another round did not help
            explained = share
            self._seek(against[:_AGAINST])
            fitter.read(against[:_AGAINST], _READ_AGAIN)
        fitter.operator = fitter.fit()[0]
        self._challenge(fitter.operator)

    def _grade(self, wrong: Sequence[Sample]) -> None:
        """Ask for wrong calls with scores of all sizes, which tell a limit on scores, or on their rise, from another.

        Larger scores have larger errors in narrow dtypes, and with a quantisation.
        """
        if self._dtype != torch.float32 or self._quantised or self._prober.device != "cpu":
            return
        for n, size in enumerate(_SIZES):
            shape = shape_of(wrong[n * len(wrong) // len(_SIZES)].call)
            if (call := self._made(replace(shape, data="normal"))) is not None:
                call = replace(call, q=call.q * size)
                if (out := self._prober(call)) is not None:
                    self.told.append(sample_of(call, out, self._error, self._draw))
        self._seek(self.told)

    def _seek(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            if sample.fresh:
                sample.fresh = False
                self.fitter.samples.append(sample)

    def _tell_apart(self, operators: Sequence[Operator]) -> None:
        """Ask for calls on which a rival differs from the chosen operator."""
        undecided = [operator for operator in operators[1:] if operator != operators[0]]
        if not undecided:
            return
        asked = 0
        for shape in islice(self._shapes, _LOOKED_AT):
            if not undecided or asked >= _TELLING:
                return
            self._prober.check_time()
            if (call := self._made(shape)) is None:
                continue
            rows = np.arange(call.rows)[:: max(1, call.rows // 6)]
            queries = Queries(call, rows)
            size, said = np.abs(queries.right).sum(-1), operators[0].outputs(queries)
            split = [o for o in undecided if not close(o.outputs(queries), said, size, self._error).all()]
            if split and (out := self._prober(call)) is not None:
                self.told.append(sample_of(call, out, self._error, self._draw))
                undecided = [operator for operator in undecided if operator not in split]
                asked += 1

    def _challenge(self, operator: Operator) -> None:
        """Ask for fresh calls until one contradicts the operator: all calls so far may lie on one side of a limit."""
        if operator.effect is None:
            return
        shapes = (replace(shape, data="normal") for shape in islice(self._shapes, 2 * _FRESH))
        calls = (call for shape in shapes if (call := self._made(shape)) is not None)
        for call in islice(calls, _FRESH):
            if (out := self._prober(call)) is not None:
                self.told.append(sample_of(call, out, self._error, self._draw))
                if not self.fitter.agreed(operator, self.told[-1]).all():
                    return


def _predicts(operator: Operator, results: Sequence[CallResult]) -> bool:
    """Return True if an operator gives the outputs of compared calls, wrong and correct ones, within the bounds of each call.

    A read-out fits calls of one dtype, on data that a quantisation stores exactly: there, a clamp and a scale can be the same.
    """

    def compute(call: AttentionCall, rows: Tensor | None = None, /) -> Tensor:
        every = np.arange(call.rows) if rows is None else rows.cpu().numpy()
        return torch.from_numpy(operator.outputs(Queries(call, every))).to(call.q.device)

    bug = Bug(OPERATOR, "", "", "", "mask", compute)
    small = [
        r
        for r in results
        if _READ.issuperset(r.call.features) and r.call.q.numel() * r.call.k.shape[0] <= _PREDICTED_WORK
    ]
    wrong, right = (_by_dtype([r for r in small if r.fails == fails]) for fails in (True, False))
    return all(explaining(bug, r) is not None for r in wrong) and not any(
        bool((relative_l1(off) > r.fit_bounds).any()) for r in right if (off := explaining(bug, r)) is not None
    )


def _by_dtype(results: Sequence[CallResult]) -> list[CallResult]:
    """Choose some results of each dtype."""
    dtypes = {r.call.q.dtype for r in results}
    return [
        r for dtype in dtypes for r in islice(_in_turn([r for r in results if r.call.q.dtype == dtype]), _PREDICTED)
    ]


def _in_turn(results: Collection[CallResult]) -> Iterator[CallResult]:
    """Yield the smallest of each kind of calls, then the next of each, and so on."""
    kinds: dict[tuple[object, ...], list[CallResult]] = {}
    for result in sorted(results, key=lambda r: (r.call.k.numel(), r.call.q.numel())):
        call = result.call
        kind = (call.phase, any(call.prefixes), len(call.lens_q) > 1, call.q.shape[1:], call.layer > 0, call.features)
        kinds.setdefault(kind, []).append(result)
    return (result for result in chain.from_iterable(zip_longest(*kinds.values())) if result is not None)


def _notes(prober: Prober) -> tuple[str, ...]:
    # A refusal means that the kernel does not support such calls, which is not a fault.
    raised = sorted((why, n) for why, n in prober.raised.items() if why != REFUSED)
    return tuple(f"not answered: {why}, in {n} call{'s' * (n != 1)}" for why, n in raised)
