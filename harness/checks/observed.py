"""Runs the read-out of a wrong kernel, and adds the operator to its findings.

This is the entry point of the read-out: no other module outside of it imports `assay.harness.readout`. Without that package there
are no read-outs, and everything else stays the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from assay.harness.attention.call import AttentionCall
from assay.harness.localize.call_conditions import describe
from assay.harness.localize.experiment import NOTHING_TRIED, Experiments
from assay.harness.localize.guard import Guard
from assay.harness.localize.kernel_runs import CallResult, measure
from assay.harness.localize.lse import LSE_FINDINGS
from assay.harness.localize.picturing import BEFORE, hides, picture_of, unread_picture
from assay.harness.localize.reading import WeightReading, read, row_errors
from assay.harness.localize.threads import budget_clock, few_threads
from assay.harness.picture import MAX_QUERIES, Picture
from assay.harness.verdict import CONTRACT_BROKEN, Finding, serious, with_evidence

try:
    from assay.harness.readout.named import with_operator
    from assay.harness.readout.probing import BudgetSpentError, Prober
    from assay.harness.readout.readout import ReadOut as ReadOut
    from assay.harness.readout.readout import read_out
except ModuleNotFoundError as missing:
    if not str(missing.name).startswith("assay.harness.readout"):
        raise
    _READS = False
else:
    _READS = True

READ_OUT_S = 30.0
"""Most seconds for the read-out of a wrong kernel, by default."""
_PICTURE_CALLS, _PICTURE_S = 300, 10.0
"""The budget for reading one call for its picture."""
# Most weights of a call to read at once: 256 MB.
_MAX_WEIGHTS = 2**25
# With a declared quantisation, smaller relative errors of weights are not shown: INT8 scores are off by up to a few tenths.
_NOISY_WEIGHT = 0.3
# Most read-outs that a `Reader` keeps: each holds its calls.
_KEPT = 4


@dataclass(frozen=True)
class _Observed:
    """The findings, with the operator in the first serious one, and the read-out without its samples."""

    findings: tuple[Finding, ...]
    read: ReadOut | None = None


class Reader:
    """Runs the read-outs of wrong kernels.

    Args:
        seconds: most time for each kernel, or 0 for no read-outs.
        known: ids of bugs that an earlier read-out explained. A kernel that has no other is neither read nor tried again.

    Attributes:
        last: the last read-out, without its samples, or None if there is none.
    """

    def __init__(self, seconds: float = READ_OUT_S, known: Collection[str] = ()) -> None:
        self.seconds, self.known = seconds, frozenset(known)
        self.last: ReadOut | None = None

    def knows(self, findings: Sequence[Finding]) -> bool:
        """Return True if an earlier read-out explained every serious finding."""
        return bool(self.known) and all(finding.id in self.known for finding in serious(findings))

    def wants(self, findings: Sequence[Finding], results: Sequence[CallResult]) -> bool:
        """Return True if a read-out is needed: an output is wrong, rather than missing, for a new reason, and there is time."""
        return (
            _READS
            and self.seconds > 0
            and any(result.fails for result in results)
            and any(finding.id not in (CONTRACT_BROKEN, *LSE_FINDINGS, *self.known) for finding in serious(findings))
        )

    def observe(
        self,
        findings: Sequence[Finding],
        guard: Guard | None,
        results: Sequence[CallResult],
        experiments: Experiments = NOTHING_TRIED,
    ) -> _Observed:
        """Run the read-out of a kernel if its findings need it.

        Args:
            findings: the findings of a check, or on recorded calls.
            guard: the kernel, which may raise; if it ends its process or never returns, it does so here too. None if it cannot be
                run: then its findings only get a picture.
            results: its results.
            experiments: the results of experiments.
        """
        self.last = None
        if not self.wants(findings, results):
            return _Observed(tuple(findings))
        if guard is None:
            return _Observed(tuple(_with_picture(findings, guard, results)))
        try:
            kernel = guard.asked_freely()  # writes beyond its tensors do no harm
            tried = experiments.tried if experiments.tried and not experiments.tried.outside else None
            reading = read_out(kernel, results, seconds=self.seconds, shapes=experiments.drawn(), tried=tried)
        except Exception as error:  # a kernel's numbers can be anything; the findings without a read-out stand
            named = with_evidence(findings, f"the kernel could not be read: {type(error).__name__}: {str(error)[:200]}")
        else:
            named, self.last = with_operator(findings, reading), replace(reading, samples=())
        if serious(named)[0].picture is None:
            named = _with_picture(named, guard, results)
        return _Observed(tuple(named), self.last)


def _picture_on(guard: Guard | None, result: CallResult) -> Picture | str:
    """Draw the picture of a failing call by reading the kernel's weights now, or return the reason why there is none."""
    call = result.call
    if guard is None:
        errors = row_errors(call, result.out.double().cpu())
        return unread_picture(call, result.out, errors >= min(float(result.bounds.max()), float(errors.max())))
    device = str(call.q.device)
    ask = Prober(guard.asked_freely(), _PICTURE_CALLS, _PICTURE_S, device, clock=budget_clock(device))
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


def _with_picture(findings: Sequence[Finding], guard: Guard | None, results: Sequence[CallResult]) -> list[Finding]:
    """Add the picture of the smallest failing call, or why there is none, to the first serious finding; return all findings."""
    failing = sorted((result for result in results if result.fails), key=_size)
    if not failing:
        return list(findings)
    smallest = min(failing, key=lambda result: hides(result.call.q.shape[0], result.call.k.shape[0]))
    try:
        with few_threads([smallest.call]):
            picture = _picture_on(guard, smallest)
    except Exception as error:  # as in `observe`
        picture = f"the call could not be read: {type(error).__name__}: {str(error)[:200]}"
    return with_evidence(findings, picture) if isinstance(picture, str) else with_evidence(findings, picture=picture)


def _size(result: CallResult) -> tuple[int, int]:
    return result.call.k.numel(), result.call.q.numel()


def _most_rows(call: AttentionCall) -> int:
    """Return the number of a call's queries whose weights fit in memory at once."""
    return max(1, _MAX_WEIGHTS // (call.q.shape[1] * call.k.shape[1] * call.k.shape[0]))
