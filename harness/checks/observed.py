"""Reads a wrong kernel, and adds what it was observed to compute to its findings.

This is the door of the read-out: no other module outside of it imports `assay.harness.readout`. Without that room nothing is read,
and all else stays as it is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.declaration import Declaration
from assay.harness.evidence.kernel_result import Tried
from assay.harness.localize.call_conditions import describe
from assay.harness.localize.guard import Guard
from assay.harness.localize.kernel_runs import CallResult, measure
from assay.harness.localize.lse import LSE_FINDINGS
from assay.harness.localize.picturing import BEFORE, hides, picture_of, unread_picture
from assay.harness.localize.reading import WeightReading, read, row_errors
from assay.harness.localize.threads import few_threads
from assay.harness.picture import MAX_QUERIES, Picture
from assay.harness.verdict import CONTRACT_BROKEN, Finding, serious, with_evidence

try:
    from assay.harness.readout.asking import Compared
    from assay.harness.readout.finding import counts_calls
    from assay.harness.readout.named import said, with_operator
    from assay.harness.readout.passive import read_recorded, recorded
    from assay.harness.readout.probing import BudgetSpentError, Prober
    from assay.harness.readout.queries import Queries
    from assay.harness.readout.readout import ReadOut as ReadOut
    from assay.harness.readout.readout import read_out
    from assay.harness.readout.samples import Agreement
except ModuleNotFoundError as missing:
    if not str(missing.name).startswith("assay.harness.readout"):
        raise
    _READS = False
else:
    _READS = True

READ_OUT_S = 30.0
"""Most seconds that reading a wrong kernel takes, unless the user says otherwise."""
_PICTURE_CALLS, _PICTURE_S = 300, 10.0
"""Budget of reading one call for its picture."""
# Most weights of a call that are read at once: 256 MB.
_MAX_WEIGHTS = 2**25
# Relative error of a weight that is not shown where a quantisation is declared: INT8 scores are off by up to a few tenths.
_NOISY_WEIGHT = 0.3
# An operator holds on recorded calls if it gives this share of the wrong outputs of so many calls, the smallest that fail, at so
# many wrong queries of each, and as many right ones.
_HELD_ON, _HELD_ROWS, _HELD_SHARE = 8, 16, 0.95
# Failing calls of a kind that a read-out begins with.
_FAILING_OF_A_KIND = 2
# Calls that do not fail on which an operator is tried.
_PASSING = 150
# Number of a call that no period of two to twelve calls takes for the first.
_LATER = 10_007
# Read-outs that a `Reader` keeps: each holds the calls that it rests on.
_KEPT = 4
# Noise of a single query, as a multiple of the bound of its cell, which is an average.
_ROW_SPREAD = 3.0


@dataclass(frozen=True)
class _Observed:
    """The findings, of which the first serious one says what was read, and the read-out without its samples."""

    findings: tuple[Finding, ...]
    read: ReadOut | None = None


class Reader:
    """Reads wrong kernels: each once, however often its findings are given.

    Args:
        seconds: most time for each kernel; 0 to read none.

    Attributes:
        last: what was read last, without its samples; None if nothing was.
    """

    def __init__(self, seconds: float = READ_OUT_S) -> None:
        self.seconds = seconds
        self.last: ReadOut | None = None
        self._known: list[tuple[object, Declaration, str, ReadOut | str]] = []

    def wants(self, findings: Sequence[Finding], results: Sequence[CallResult]) -> bool:
        """Return True if a kernel is to be read: some output is wrong, rather than missing, and there is time."""
        return (
            _READS
            and self.seconds > 0
            and bool(results)
            and any(finding.id not in (CONTRACT_BROKEN, *LSE_FINDINGS) for finding in serious(findings))
        )

    def observe(
        self,
        findings: Sequence[Finding],
        guard: Guard,
        results: Sequence[CallResult],
        recorded: bool = False,
        tried: Tried | None = None,
    ) -> _Observed:
        """Read a kernel whose findings want it, on calls that are made for it.

        Args:
            findings: of a check, or on recorded calls.
            guard: the kernel, which may raise. One that ends its process or never returns does so here too.
            results: what it computed.
            recorded: whether these calls were recorded. Then the operator is said only if it gives their wrong outputs too, and
                else the picture is of the smallest of them that fails.
            tried: the condition under which the kernel is wrong.
        """
        plain = [result for result in results if not result.call.features]
        if len(plain) < len(results) and not any(result.fails for result in plain) and self.wants(findings, results):
            return _Observed(
                tuple(with_evidence(findings, "only calls that ask for a feature are wrong, and those are not read"))
            )
        if not self.wants(findings, plain):
            return _Observed(tuple(findings))
        results = plain
        reading = self._read(guard, results, tried)
        if isinstance(reading, str):
            named = with_evidence(findings, reading)
        elif not said(reading):
            named = with_operator(findings, reading)
        elif not recorded:
            reading = _tried(reading, results)
            named = with_operator(findings, reading)
        else:
            seen = _held(reading, _smallest(results))
            outputs = f"{seen.explained:,} of {seen.wrong:,} wrong outputs of the recorded calls"
            if seen.share >= _HELD_SHARE:
                named = with_evidence(with_operator(findings, _tried(reading, results)), f"it gives {outputs}")
            else:
                other = f"on other calls the kernel computes this, which gives {outputs}: {reading.sentence}"
                named = with_evidence(findings, other)
        if serious(named)[0].picture is None:
            named = _with_picture(named, guard, results)
        self.last = None if isinstance(reading, str) else replace(reading, samples=())
        return _Observed(tuple(named), self.last)

    def observe_outputs(
        self,
        findings: Sequence[Finding],
        results: Sequence[CallResult],
        others: Iterable[tuple[AttentionCall, Tensor]] = (),
    ) -> _Observed:
        """Read a backend that cannot be asked, and is wrong on recorded calls, from their outputs.

        Args:
            findings: on the recorded calls.
            results: recorded calls that were compared with the oracle.
            others: further calls with their outputs; they are held to the widest bound of the results.
        """
        results = [result for result in results if not result.call.features]
        if not (_READS and self.seconds > 0 and results and serious(findings)):
            return _Observed(tuple(findings))
        limits = [_ROW_SPREAD * float(result.fit_bounds.max()) for result in results]
        calls = [recorded(result.call, result.out, limit) for result, limit in zip(results, limits, strict=True)]
        calls += [recorded(call, out, max(limits)) for call, out in others]
        try:
            read, picture = read_recorded(calls, self.seconds)
        except Exception as error:  # as in `_read_kernel`
            return _Observed(
                tuple(with_evidence(findings, f"nothing was read: {type(error).__name__}: {str(error)[:200]}"))
            )
        named = with_operator(findings, read)
        shown = with_evidence(named, picture=picture or serious(named)[0].picture)
        return _Observed(tuple(shown), replace(read, samples=()))

    def sentence(self, guard: Guard, result: CallResult) -> str:
        """Return what was read, if it gives the wrong outputs of a failing call; empty if not."""
        reading = self._read(guard, [result]) if _READS and not result.call.features else ""
        if isinstance(reading, str) or not said(reading):
            return ""
        return said(reading) if _held(reading, [result]).share >= _HELD_SHARE else ""

    def _read(self, guard: Guard, results: Sequence[CallResult], tried: Tried | None = None) -> ReadOut | str:
        """Read a kernel in a dtype in which it is wrong, on the device of its calls; or return why there is no read-out."""
        device = str(results[0].call.q.device)
        wrong = dict.fromkeys(str(result.call.q.dtype).removeprefix("torch.") for result in results if result.fails)
        declared = replace(guard.assay, dtypes=tuple(wrong) or guard.assay.dtypes)
        function = getattr(guard.kernel, "function", guard.kernel)  # a kernel may have been loaded twice
        for asked, its, on, reading in self._known:
            if asked is function and (its, on) == (declared, device):
                return reading
        shapes = {(result.call.q.shape[2], result.call.v.shape[2]) for result in results}
        made = _read_kernel(guard, declared, device, self.seconds, shapes, _telling(results), tried)
        self._known = [*self._known[1 - _KEPT :], (function, declared, device, made)]
        return made


def _read_kernel(
    guard: Guard,
    declared: Declaration,
    device: str,
    seconds: float,
    shapes: Collection[tuple[int, int]],
    compared: Sequence[Compared] = (),
    tried: Tried | None = None,
) -> ReadOut | str:
    """Read a kernel, or return why there is no read-out. It is asked for these (head_dim, head_dim_v), and what it declares."""
    try:
        kernel = guard.asked_freely(declared)  # what it writes beyond its tensors does no harm
        return read_out(
            kernel, noise=declared.noise, seconds=seconds, device=device, shapes=shapes, compared=compared, tried=tried
        )
    except Exception as error:  # a kernel's numbers can be anything; what was found without a read-out stands
        return f"the kernel could not be read: {type(error).__name__}: {str(error)[:200]}"


def _telling(results: Sequence[CallResult]) -> list[Compared]:
    """Choose the calls that a read-out begins with: of each kind the smallest ones that fail, and some that do not."""
    chosen: list[CallResult] = []
    for fails, of_a_kind in ((True, _FAILING_OF_A_KIND), (False, 1)):
        kinds: Counter[tuple[object, ...]] = Counter()
        for small in sorted((result for result in results if result.fails == fails), key=_size):
            call = small.call
            kind = (call.q.dtype, call.phase, any(call.prefixes), len(call.lens_q) > 1, call.causal)
            kinds[kind] += 1
            if kinds[kind] <= of_a_kind:
                chosen.append(small)
    return [(result.call, _ROW_SPREAD * float(result.fit_bounds.max())) for result in chosen]


def _tried(reading: ReadOut, results: Sequence[CallResult]) -> ReadOut:
    """Hold a read-out to the calls that were compared too: all that fail, and some that do not."""
    # A finding says in which dtypes, head dims and layouts the kernel fails, so only calls of these count. What depends on earlier
    # calls cannot be tried on calls whose order is not known: then it is not exact.
    known = [result for result in results if not (counts_calls(reading.operator) and _remembers(reading, result.call))]
    failing = [result for result in known if result.fails]
    kinds = {_unspoken(result.call) for result in failing}
    passing = [result for result in known if not result.fails and _unspoken(result.call) in kinds]
    seen = _held(reading, [*failing, *passing[:: max(1, len(passing) // _PASSING)]])
    if not seen.wrong:
        return replace(reading, unsure=True)
    if seen.exact:
        others = [result for result in known if not result.fails and _unspoken(result.call) not in kinds]
        apart = _held(reading, others[:: max(1, len(others) // _PASSING)]) if reading.exact else seen
        return replace(reading, whole=reading.exact and not apart.false)
    if seen.share < reading.share:
        return replace(reading, all=seen)
    whole = reading.all
    return replace(
        reading, all=Agreement(whole.wrong + seen.wrong, whole.explained + seen.explained, whole.false + seen.false)
    )


def _unspoken(call: AttentionCall) -> tuple[object, ...]:
    """Return what no operator describes."""
    return call.q.dtype, call.q.shape[2], call.v.shape[2], call.spec.layout, call.spec.grad_mode


def _remembers(reading: ReadOut, call: AttentionCall) -> bool:
    """Return True if the operator gives other outputs of a call after other calls."""
    rows = np.arange(min(len(call.q), _HELD_ROWS, _most_rows(call)))
    first, later = Queries(call, rows), Queries(call, rows, _LATER, _LATER)
    return not np.array_equal(reading.operator.outputs(first), reading.operator.outputs(later), equal_nan=True)


def _held(reading: ReadOut, results: Sequence[CallResult]) -> Agreement:
    """Test an operator on calls that were compared: on `_HELD_ROWS` of the wrong queries of each, and as many right ones."""
    wrong = explained = false = 0
    for result in results:
        call, size = result.call, row_errors(result.call, result.out.double().cpu())
        limit = _ROW_SPREAD * float(result.fit_bounds.max())
        least = min(limit, float(size.max()) / 2) if result.fails else np.inf
        bad = np.asarray(size > least, dtype=np.bool_)
        rows = _spread(np.asarray(bad.any(1)), min(_HELD_ROWS, _most_rows(call)))
        said_ = reading.operator.outputs(Queries(call, rows))
        actual = result.out[torch.from_numpy(rows).to(result.out.device)].double().cpu().numpy()
        with np.errstate(invalid="ignore"):
            same = (said_ == actual) | (np.isnan(said_) & np.isnan(actual))
            gap = np.where(same, 0.0, np.abs(said_ - actual)).sum(-1)
            scale = np.maximum(np.abs(actual).sum(-1), np.abs(said_).sum(-1))
            # Bounds of a right call may not have been simulated: rounding of a query may exceed them.
            most = np.full_like(gap, limit) if result.fails else np.maximum(limit, 2 * size[rows])
            agrees = gap <= most * np.nan_to_num(scale) + 1e-12
        wrong += int(bad[rows].sum())
        explained += int((agrees & bad[rows]).sum())
        false += int((~agrees & ~bad[rows]).sum())
    return Agreement(wrong, explained, false)


def _spread(wrong: NDArray[np.bool_], most: int) -> NDArray[np.int64]:
    """Choose queries from the first to the last, evenly: at most so many of the wrong ones, and of the right ones."""
    either = [np.flatnonzero(which) for which in (wrong, ~wrong)]
    return np.sort(
        np.concatenate(
            [places[np.linspace(0, len(places) - 1, min(most, len(places))).astype(int)] for places in either]
        )
    )


def _picture_on(guard: Guard, result: CallResult) -> Picture | str:
    """Draw the picture of a failing call, read off the kernel now; or return why there is none."""
    call = result.call
    ask = Prober(guard.asked_freely(), _PICTURE_CALLS, time.monotonic() + _PICTURE_S, str(call.q.device))
    out = ask(call)
    if out is None:
        return f"asked again, the kernel does not answer {describe(call)}"
    now = measure(call, out.to(call.q.device, call.q.dtype), guard.assay.noise)
    if not now.fails:
        return f"asked again, the kernel computes {describe(call)} within its bound"
    errors = row_errors(call, out)
    finite = errors[np.isfinite(errors)]
    wrong = errors >= min(float(now.bounds.max()), float(finite.max()) if len(finite) else np.inf)
    first = int(wrong.any(1).argmax())
    start = max(0, min(first - BEFORE, len(errors) - MAX_QUERIES))
    rows = range(start, min(len(errors), start + min(MAX_QUERIES, _most_rows(call))))
    keys, kv_heads, dim = call.v.shape
    reading: WeightReading | None = None
    if keys * kv_heads <= (ask.calls_left - 3) * dim:
        with suppress(BudgetSpentError):
            reading = read(ask, call, rows)
    if reading is None:
        return unread_picture(call, out, np.asarray(wrong))
    return picture_of(reading, relative=_NOISY_WEIGHT if guard.assay.noise else None)


def _with_picture(findings: Sequence[Finding], guard: Guard, results: Sequence[CallResult]) -> list[Finding]:
    """Add to the first serious finding the picture of the smallest failing call, or why there is none; return all findings."""
    failing = sorted((result for result in results if result.fails), key=_size)
    if not failing:
        return list(findings)
    smallest = min(failing, key=lambda result: hides(result.call.q.shape[0], result.call.k.shape[0]))
    try:
        with few_threads([smallest.call]):
            picture = _picture_on(guard, smallest)
    except Exception as error:  # as in `_read_kernel`
        picture = f"the call could not be read: {type(error).__name__}: {str(error)[:200]}"
    return with_evidence(findings, picture) if isinstance(picture, str) else with_evidence(findings, picture=picture)


def _smallest(results: Sequence[CallResult]) -> list[CallResult]:
    """Find the smallest calls that fail."""
    return sorted((result for result in results if result.fails), key=_size)[:_HELD_ON]


def _size(result: CallResult) -> tuple[int, int]:
    return result.call.k.numel(), result.call.q.numel()


def _most_rows(call: AttentionCall) -> int:
    """Compute the number of a call's queries whose weights can be held at once."""
    return max(1, _MAX_WEIGHTS // (call.q.shape[1] * call.k.shape[1] * call.k.shape[0]))
