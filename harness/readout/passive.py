"""The read-out of recorded calls: what a kernel computed that nobody can ask, from its q, k, v and outputs alone.

The weights of queries with few keys are solved for. Rules are mined from these, and tried on all calls, long ones too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest

import numpy as np
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.attention.oracle import sequences
from assay.harness.localize.picturing import picture_of
from assay.harness.localize.reading import Flags, Numbers, WeightReading, row_errors
from assay.harness.localize.threads import budget_clock, few_threads
from assay.harness.picture import Picture
from assay.harness.readout.features import Ints
from assay.harness.readout.fitting import Fitter
from assay.harness.readout.forms import Fit, Row, Tolerance, fits
from assay.harness.readout.operators import Operator
from assay.harness.readout.probing import BudgetSpentError, Prober, plan_of
from assay.harness.readout.queries import Queries
from assay.harness.readout.readout import ReadOut
from assay.harness.readout.samples import Sample
from assay.harness.readout.sentences import sentence

# Most keys that are solved for, as a share of head_dim_v: a quarter of the equations is left to test the solution. The error of a
# weight is then no larger than that of one number of the output: with random rows of V of size 1 per number, it is that divided by
# sqrt(head_dim_v - keys).
_UNKNOWNS = 0.75
# Multiple of the noise that may be left of an output. The noise is that of the better rows of right calls; single rows have up to
# three times as much.
_REST = 4.0
# Multiple of the error of a weight, as a standard deviation, beyond which it is told from another: 1 of 16,000 is by chance.
_UNSURE = 4.0
# A row whose weights are not known better than this says nothing of its keys.
_LEAST = 0.05
# Standard deviation of normal errors as a multiple of their mean size: sqrt(pi / 2).
_TO_SIGMA = 1.25
# Sequences of a call whose keys are tried as another's.
_MOST_SEQUENCES = 6


@dataclass(frozen=True)
class _Solved:
    """The weights of some queries of a recorded call: zero, with `off` infinite, where they could not be solved for."""

    reading: WeightReading
    # Of each row, the largest standard error of a weight, and the sum of all, float64 [rows, num_q_heads].
    errors: Numbers
    total: Numbers

    @property
    def known(self) -> Flags:
        """Of which queries and heads the weights are known, bool [rows, num_q_heads]."""
        return np.isfinite(self.reading.off)

    def shown(self, head: int) -> WeightReading | None:
        """The known rows of a head, with weights that noise explains as it would have them; None if no row is known."""
        rows = np.flatnonzero(self.known[:, head])
        if not len(rows):
            return None
        reading = self.reading
        read, expected = reading.weights[rows, head], reading.expected[rows, head]
        unsure = _UNSURE * self.errors[rows, head][:, None, None]
        sure = (read > 5 * unsure) & (expected > 5 * unsure)
        ratios = np.where(sure, read / np.where(sure, expected, 1.0), np.nan)
        with np.errstate(all="ignore"):
            factor = np.array([np.nanmedian(r) if s.any() else 1.0 for r, s in zip(ratios, sure, strict=True)])
        right = ((np.abs(read - expected) <= unsure) | ~sure).all((1, 2))
        factor[right] = 1.0
        usual = factor[:, None, None] * expected
        shown = np.where(np.abs(read) <= unsure, 0.0, read)
        shown = np.where(np.abs(read - usual) <= unsure, usual, shown)
        weights = reading.expected[rows].copy()
        weights[:, head] = shown
        off = np.zeros(weights.shape[:2])
        return WeightReading(reading.call, reading.rows[rows], weights, reading.constant[rows], off, reading.number)


def _tolerance_of(error: float, total: float) -> Tolerance:
    """The tolerance of weights with this standard error, and with this sum of them."""
    # A log weight is off by error / weight. Where a row is noisy, a larger error of a log weight is accepted, so that fewer of its
    # weights are too faint to be looked at: both grow with the square root of the noise.
    usual = Tolerance()
    log = float(np.clip(10 * np.sqrt(error), usual.log, 0.2))
    return Tolerance(max(usual.weight, _UNSURE * total), log, max(usual.least, _UNSURE * error / log))


def _solve(call: AttentionCall, rows: Ints, out: Numbers, noise: float) -> _Solved:
    """The weights of some queries of a recorded call, where keys can be found that give the outputs up to the noise."""
    # The keys that a query should see come first, then those of its sequence, those at its ends, those of other sequences, and
    # other kv heads: the first that give the output, and are no more than `_UNKNOWNS` of head_dim_v.
    heads, kv_heads = call.q.shape[1], call.k.shape[1]
    values = call.v.double().cpu()
    wanted = torch.from_numpy(out)
    weights = np.zeros((len(rows), heads, kv_heads, call.k.shape[0]))
    off, errors, total = (np.full((len(rows), heads), bad) for bad in (np.inf, 0.0, 0.0))
    for n, row in enumerate(rows.tolist()):
        for own in range(kv_heads):
            its = call.heads.readers(own)
            left = wanted[n, its].isfinite().all(-1).numpy()
            for kv, keys in _supports(call, row, own):
                if not left.any():
                    break
                solution = _least_squares(values[keys, kv], wanted[n, its], noise)
                if solution is None:
                    continue
                solved, *rest, fit = solution
                hit = left & fit
                at = np.flatnonzero(hit) + its.start
                weights[n, at[:, None], kv, keys] = solved[hit]
                off[n, at], errors[n, at], total[n, at] = (of_head[hit] for of_head in rest)
                left &= ~hit
    constant = np.zeros((*off.shape, call.v.shape[2]))
    return _Solved(WeightReading(call, rows, weights, constant, off), errors, total)


def _least_squares(
    values: Tensor, wanted: Tensor, noise: float
) -> tuple[Numbers, Numbers, Numbers, Numbers, Flags] | None:
    """Solve for the weights of some keys, of which there are the values, by least squares with a QR decomposition.

    Returns:
        Weights [heads, keys]; of each head what they leave of the output, `errors` and `total` of `_Solved`, and whether they fit.
        None if the values are linearly dependent.
    """
    keys, dim = values.shape
    q, r = torch.linalg.qr(values.T)
    diagonal = r.diagonal().abs()
    if not bool((diagonal > 1e-9 * diagonal.max()).all()):
        return None
    inverse = torch.linalg.solve_triangular(r, torch.eye(keys, dtype=r.dtype), upper=True)
    inside = wanted @ q
    weights = inside @ inverse.T
    size = wanted.abs().sum(-1)
    rest = (wanted - inside @ q.T).abs().sum(-1)
    sigma = (_TO_SIGMA * noise / dim) * size
    spread = inverse.norm(dim=1)
    errors, total = sigma * spread.max(), sigma * spread.sum()
    fits = rest <= _REST * noise * (1 - keys / dim) ** 0.5 * size
    sure = np.array([_tolerance_of(float(e), float(t)).least <= _LEAST for e, t in zip(errors, total, strict=True)])
    off = (rest / size.clamp(min=1e-12)).numpy()
    return weights.numpy(), off, errors.numpy(), total.numpy(), fits.numpy() & sure


def _supports(call: AttentionCall, row: int, own: int) -> Iterator[tuple[int, Ints]]:
    """Keys that a query may have seen, (kv head, packed rows), likelier ones first; none twice."""
    most = int(_UNKNOWNS * call.v.shape[2])
    known: set[tuple[int, bytes]] = set()
    for kv in (own, *(n for n in range(call.k.shape[1]) if n != own)):
        for keys in _key_sets(call, row, most):
            if 0 < len(keys) <= most and (mark := (kv, keys.tobytes())) not in known:
                known.add(mark)
                yield kv, keys


def _key_sets(call: AttentionCall, row: int, most: int) -> Iterator[Ints]:
    spans = sequences(call)
    place = next(n for n, (q, _) in enumerate(spans) if q.start <= row < q.stop)
    (its_q, its_k), every = spans[place], np.arange(call.k.shape[0])
    first, stop = its_k.start, its_k.stop
    _, end = call.spec.mask.span(row - its_q.start, its_q.stop - its_q.start, stop - first)
    last = first + end  # one behind the last key that it should see
    yield every[first:last]
    yield every[first:stop]
    yield every[max(first, last - most) : last]
    beyond = min(stop, last + most // 4)
    yield every[max(first, beyond - most) : beyond]
    yield every[max(first, stop - most) : stop]
    ends = [every[first : min(last, first + most // 4)], every[max(first, last - most // 2) : last]]
    yield np.unique(np.concatenate(ends))
    yield every[max(0, last - most) : last]
    yield every[first : first + most]
    others = [k for n, (_, k) in enumerate(spans) if n != place][:_MOST_SEQUENCES]
    for other in others:
        yield every[other][:most]
        yield np.union1d(every[first:last], every[other])
    yield every


# Calls that are mined at first, of those with wrong outputs and of the others: at most half of them.
_WRONG_CALLS, _RIGHT_CALLS = 24, 12
# Calls on which rules are tried: with wrong outputs, and without.
_MOST_WRONG, _MOST_RIGHT = 96, 48
# Queries of a call that are looked at.
_ROWS = 24
# Most weights of a call that are looked at, for all kv heads: 4 MB, of which a call keeps some multiples.
_MOST_WEIGHTS = 2**19
# Most weights of a call that is solved for, with all its queries: forms compare a query with all others.
_MOST_OF_ALL_QUERIES = 2**24
# Wrong outputs after which no more are solved for: about as many as a kernel that is asked gives at first.
_EXPLAINED = 600
# Rounds in which calls that contradict the rules are mined too.
_ROUNDS = 4
# Calls that contradict the rules and are mined too, in each round.
_MORE = 4
# Error of a right output, relative L1, that is assumed at least: half a unit in the last place, and of float32 what sums lose.
_LEAST_NOISE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
# Error of a query from which on it is wrong, at least: as where a kernel is asked.
_CLEARLY = {torch.float32: 3e-4, torch.float16: 6e-3, torch.bfloat16: 4.5e-2}
_Recorded = tuple[AttentionCall, Tensor, float]
"""A call, the output that was recorded, [total_q, num_q_heads, head_dim_v], and the relative error of a query, L1, from which on it
is wrong."""


def recorded(call: AttentionCall, out: Tensor, noise: float) -> _Recorded:
    """A recorded call whose single queries are off by at most `noise`, relative L1, where they are right."""
    return call, out, max(noise, _CLEARLY.get(call.q.dtype, 0.0))


def read_recorded(calls: Sequence[_Recorded], seconds: float = 30.0) -> tuple[ReadOut, Picture | None]:
    """Read an operator off recorded calls of one kernel, within some CPU time, and draw the picture of the smallest telling one.

    The calls are halved: rules are mined from one half, and tried on the other. Calls that contradict them are mined too. `calls`
    of the read-out counts those that were looked at, and `fresh` speaks of those that it was not mined from.
    """
    begun, cpu = time.monotonic(), time.process_time()
    with few_threads(()):
        search = _Search(calls, seconds)
        complete = True
        try:
            search._run()
        except BudgetSpentError:
            complete = False
        fresh = [sample for sample in search.samples if sample.fresh]
        finder, operator = search.finder, search.operator
        solved = f"the weights of {search.solved:,} of {search.tried:,} wrong outputs of small calls were solved for"
        read = ReadOut(
            operator, sentence(operator), finder.tally(operator, search.samples), finder.tally(operator, fresh),
            len(search.samples), time.monotonic() - begun, time.process_time() - cpu, complete, (solved,) if search.tried else (),
            tuple(search.samples), passive=True,
        )  # fmt: skip
        return read, search._picture()


class _Search:
    """The search for the operator of recorded calls."""

    def __init__(self, calls: Sequence[_Recorded], seconds: float) -> None:
        draw = np.random.default_rng(0)
        every = [_sample(call, draw) for call in _ordered(calls)]
        self._wrong = [sample for sample in every if sample.bad.any()][:_MOST_WRONG]
        self._right = [sample for sample in every if not sample.bad.any()][:_MOST_RIGHT]
        self.samples = [*self._wrong, *self._right]
        self.operator = Operator()
        self.solved = self.tried = 0
        self._read: list[tuple[Sample, _Solved]] = []
        dtype = calls[0][0].q.dtype if calls else torch.float32
        self.finder = Fitter(Prober(_nobody, 0, seconds, clock=budget_clock("cpu")), "normal", dtype)

    def _run(self) -> None:
        """Find the operator.

        Raises:
            BudgetSpentError: the time is over; what is known stands in `operator`.
        """
        if not self._wrong:
            return
        first = [*self._wrong[::2][:_WRONG_CALLS], *self._right[::2][:_RIGHT_CALLS]]
        for sample in sorted(first, key=lambda mined: mined.plan.size):
            self._mine(sample)
        left = [sample for sample in self.samples if sample.fresh]
        operators = self.finder.fit()
        for _ in range(_ROUNDS):
            self.operator = operators[0]
            against = [sample for sample in left if self._contradicts(sample)]
            if not against:
                break
            for sample in against[:_MORE]:
                self._mine(sample)
            left = [sample for sample in left if sample.fresh]
            operators = self.finder.fit()
        self.operator = operators[0]

    def _picture(self) -> Picture | None:
        """Draw the weights of one q head of the smallest call that shows more than a few keys."""
        ranked: list[tuple[bool, int, int, _Solved, int]] = []
        for number, (sample, solved) in enumerate(self._read):
            of = (sample.bad.reshape(solved.known.shape) & solved.known).sum(0)
            if of.any():
                ranked.append((sample.plan.keys < 8, sample.plan.keys, number, solved, int(of.argmax())))
        for *_, solved, head in sorted(ranked, key=lambda entry: entry[:3]):
            if (reading := solved.shown(head)) is not None:
                return picture_of(reading, head)
        return None

    def _mine(self, sample: Sample) -> None:
        """Mine from a sample too: solve for the weights of its queries, and explain them, where the call is small."""
        sample.fresh = False
        self.finder.samples.append(sample)
        queries, left = sample.queries, _EXPLAINED - self.solved
        weights = queries.call.q[:, :, 0].numel() * queries.call.k[:, :, 0].numel()
        if not sample.bad.any() or left <= 0 or weights > _MOST_OF_ALL_QUERIES:
            return
        self.finder.prober.check_time()
        solved = _solve(queries.call, queries.rows, sample.actual, self._noise)
        known = sample.bad & solved.known.ravel()
        self.tried, self.solved = self.tried + int(sample.bad.sum()), self.solved + int(known.sum())
        every, fits_of_rows = Queries(queries.call, range(len(queries.call.q))), list[tuple[Fit, ...]]()
        for place in range(len(known)):
            at = divmod(place, queries.heads)
            tolerance = _tolerance_of(float(solved.errors[at]), float(solved.total[at]))
            explained = fits(Row(solved.reading, every, *at, tolerance)) if known[place] else []
            # A wrong output whose weights may be right, up to their noise, is evidence of nothing.
            fits_of_rows.append(tuple(fit for fit in explained if fit.form != "right"))
        sample.fits = tuple(fits_of_rows)
        self._read.append((sample, solved))

    @cached_property
    def _noise(self) -> float:
        """Error of right outputs, relative L1: that of four in five of them."""
        least = _LEAST_NOISE.get(self.finder.dtype, 1e-6)
        right = np.concatenate([sample.errors[~sample.bad] for sample in self.samples])
        return max(least, float(np.quantile(right, 0.8))) if len(right) else least

    def _contradicts(self, sample: Sample) -> bool:
        """Return True if an output of a sample is not the one that the operator gives."""
        contradicts = not self.finder.agreed(self.operator, sample).all()
        queries = sample.queries
        sample.queries = Queries(queries.call, queries.rows)  # without what it has computed: there may be many
        return contradicts


def _nobody(call: AttentionCall) -> Tensor:
    """Stands for the kernel, which cannot be asked."""
    raise KernelRefused("only recorded calls are known")


def _ordered(calls: Sequence[_Recorded]) -> list[_Recorded]:
    """Calls of each kind in turn; of a kind the smallest, the largest, the next to the smallest, and so on."""
    kinds: dict[tuple[object, ...], list[_Recorded]] = {}
    for record in sorted(calls, key=lambda item: plan_of(item[0]).size):
        call = record[0]
        kinds.setdefault((call.layer, call.phase, any(call.prefixes), len(call.lens_q) > 1), []).append(record)
    return list(_in_turn([list(_in_turn([some, some[::-1]]))[: len(some)] for some in kinds.values()]))


def _in_turn(lists: Iterable[Sequence[_Recorded]]) -> Iterable[_Recorded]:
    """The first of each list, then the second of each, and so on."""
    return (record for record in chain.from_iterable(zip_longest(*lists)) if record is not None)


def _sample(record: _Recorded, draw: np.random.Generator) -> Sample:
    call, recorded_out, error = record
    out = recorded_out.double().cpu()
    wrong = row_errors(call, out) > error
    most = max(1, min(_ROWS, _MOST_WEIGHTS // (call.q.shape[1] * call.k.shape[1] * call.k.shape[0])))
    rows = _rows(call, np.asarray(wrong.any(1)), most, draw)
    actual = out[torch.from_numpy(rows)].numpy()
    return Sample(plan_of(call), Queries(call, rows), actual, wrong[rows].ravel(), error, fresh=True)


def _rows(call: AttentionCall, wrong: Flags, most: int, draw: np.random.Generator) -> Ints:
    """Queries that are looked at: wrong ones, two in three, and right ones; of both the first ones of sequences, and any."""
    lens = zip(call.lens_q, call.prefixes, strict=True)
    keys = np.concatenate([np.arange(prefix, prefix + new) for new, prefix in lens])  # of its sequence, before a query
    bad, good = np.flatnonzero(wrong), np.flatnonzero(~wrong)
    beside = np.intersect1d(np.concatenate([bad[:1] - 1, bad[-1:] + 1]), good)
    queries: list[int] = []
    for rows, first, share in ((bad, bad[:0], max(1, most * 2 // 3)), (good, beside, most)):
        few = rows[np.argsort(keys[rows], kind="stable")]
        # Short rows are solved, but few keys say little: of each size some.
        spread = few[np.linspace(0, len(few) - 1, min(len(few), share // 2)).astype(int)] if len(few) else few
        order = np.concatenate([first, rows[:2], rows[-2:], few[: share // 4], spread, draw.permutation(rows)])
        queries += list(dict.fromkeys(order.tolist()))[: min(share, most - len(queries))]
    return np.unique(np.asarray(queries, dtype=np.int64))
