"""Asks a kernel for calls, and keeps some queries of each with the answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.localize.reading import Flags, row_errors
from assay.harness.readout.forms import Tolerance
from assay.harness.readout.probing import STEEP, CallPlan, Prober, drawn_plans, plan_of, varied_plans
from assay.harness.readout.queries import Queries
from assay.harness.readout.samples import LOOSE, Sample

Compared = tuple[AttentionCall, float]
"""A call that a kernel was given before, and the relative error of a query, L1, from which on it is wrong."""
COMPARED_DATA = "compared"
"""`CallPlan.data` of such calls, whose data may be any."""
FEW_HEADS = 300
"""Keys from which on a call that is made has two q heads, where it may."""
# Queries of a call that are looked at.
_WRONG_ROWS, _RIGHT_ROWS = 16, 8


@dataclass
class Asker:
    """Asks one kernel for calls.

    Attributes:
        prober: the kernel.
        data: see `CallPlan.data`.
        dtype: of the calls.
        error: relative error of a query from which on it is wrong.
        seed: of the data, and of what is drawn.
        slow: whether the kernel is slow, so that long calls are left out and fewer are made.
        compared: calls that it was given before, of which those of this dtype are asked for.
        tolerance: of readings.
        samples: what was seen so far.
        causal_only: whether calls without a causal mask are left out.
        not_causal_note: whether calls without a causal mask are wrong in a way of their own, which is not read: most kernels get
            none.
    """

    prober: Prober
    data: str
    dtype: torch.dtype
    error: float = 3e-4
    seed: int = 0
    slow: bool = False
    compared: Sequence[Compared] = ()
    tolerance: Tolerance = field(default_factory=Tolerance, init=False)
    samples: list[Sample] = field(default_factory=list, init=False)
    causal_only: bool = field(default=False, init=False)
    not_causal_note: bool = field(default=False, init=False)
    _apart: list[CallPlan] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.compared = [pair for pair in self.compared if pair[0].q.dtype == self.dtype]
        self._draw = np.random.default_rng(self.seed)
        self._drawn = drawn_plans(self.data, self.dtype, 7 + self.seed)

    @property
    def _wrong(self) -> bool:
        """True if anything was seen to be wrong."""
        return any(sample.bad.any() for sample in self.samples)

    def _ask_compared(self) -> None:
        """Ask for the calls that the kernel was given before, and for variations of the smallest one that is wrong."""
        before = len(self.samples)
        for call, error in self.compared:
            if call.causal or not self.causal_only:
                self._ask(plan_of(call, COMPARED_DATA), call, max(error, self.error))
        wrong = [sample.plan for sample in self.samples[before:] if sample.bad.any()]
        if wrong:
            base = replace(min(wrong, key=lambda plan: plan.size), data=self.data)
            if base.keys > FEW_HEADS:  # with few heads, a long call is read in seconds, if it is wrong then too
                self._screen([replace(base, heads=(2, 1))])
                base = self.samples[-1].plan if self.samples[-1].bad.any() else base
            self._screen(varied_plans(base)[: 8 if self.slow else None])

    def _screen(self, plans: Iterable[CallPlan], fresh: bool = False) -> None:
        """Ask for the calls, and keep some queries of each: some that meet a condition among them, if one is given."""
        least = {"scores": LOOSE, "steep": STEEP * self.error}
        for plan in plans:
            if self.causal_only and not plan.causal:
                continue
            seed = plan.seed + 1_000_003 * self.seed
            dim, value_dim = self.prober.nearest_shape(plan.head_dim, plan.value_dim)
            call = replace(plan, seed=seed, head_dim=dim, value_dim=value_dim).make(self.prober.device)
            self._ask(plan, call, least.get(plan.data, self.error), fresh)

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

    def _leave_out_not_causal(self) -> None:
        """Find out whether the kernel computes calls without a causal mask at all, and ask for calls that have one if it does not.

        It does not if it answers them as if they had one, rightly or wrongly, as many kernels do. If they are wrong otherwise, they
        are asked for where nothing else is wrong: most kernels are never called so.
        """
        plans = [CallPlan(lens, dtype=self.dtype, data=self.data) for lens in (((9, 0), (3, 0)), ((12, 20), (5, 6)))]
        before = len(self.samples)
        self._screen(plans)
        right = [not sample.bad.any() for sample in self.samples[before:]]
        before += len(right)
        without = [replace(plan, causal=False) for plan in plans]
        self._screen(without)
        samples = self.samples[before:]
        if not all(sample.bad.any() for sample in samples):
            return
        as_causal = all(self._as_causal(sample) for sample in samples) or self._ignores_causal(plans)
        if not (as_causal or any(right)):
            return
        self.causal_only = bool(samples)
        self._apart = [] if as_causal else without
        del self.samples[before:]

    @staticmethod
    def _as_causal(sample: Sample) -> bool:
        """Return True if the answer is that of the same call with a causal mask."""
        queries = sample.queries
        causal = Queries(queries.call.with_spec(mask=Mask(causal=True)), queries.rows, queries.number, queries.nth)
        return bool(sample.agrees(causal.right).all())

    def _ignores_causal(self, plans: Sequence[CallPlan]) -> bool:
        """Return True if the kernel gives one answer, and not zeros, to calls that differ in their mask only."""
        for plan in plans:
            call = plan.make(self.prober.device)
            masked = self.prober(call)
            if masked is None or not masked.any():
                return False
            other = self.prober(call.with_spec(mask=Mask(causal=False)))
            if other is None or not torch.equal(masked, other):
                return False
        return True

    def _judge_by(self, error: float, tolerance: Tolerance) -> None:
        """Judge what was seen so far, and what follows, by this error, and read weights with this tolerance."""
        self.error, self.tolerance = error, tolerance
        for sample in self.samples:
            sample.error, sample.bad = error, sample.errors > error

    def _rows(self, wrong: Flags) -> NDArray[np.int64]:
        bad, good = np.flatnonzero(wrong), np.flatnonzero(~wrong)
        beside = np.intersect1d(np.concatenate([bad[:1] - 1, bad[-1:] + 1]), good)
        parts = [bad[:2], bad[-2:], self._draw.permutation(bad)[: _WRONG_ROWS - 4]]
        parts += [good[:2], good[-2:], beside, self._draw.permutation(good)[: _RIGHT_ROWS - 4]]
        return np.unique(np.concatenate(parts)).astype(np.int64)
