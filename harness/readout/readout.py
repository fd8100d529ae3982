"""The read-out of a kernel: what it computes, in a sentence."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from assay.harness.attention.call import Kernel
from assay.harness.attention.declaration import declaration
from assay.harness.evidence.kernel_result import Tried
from assay.harness.localize.threads import budget_clock, few_threads
from assay.harness.readout.asking import Compared
from assay.harness.readout.features import tried_condition
from assay.harness.readout.finding import Finder
from assay.harness.readout.operators import Operator
from assay.harness.readout.probing import REFUSED, BudgetSpentError, Prober
from assay.harness.readout.samples import Agreement, Sample
from assay.harness.readout.sentences import sentence

CALLS, _SECONDS = 3000, 30.0
"""The budget of a read-out."""


@dataclass(frozen=True)
class ReadOut:
    """The operator that was read off a kernel.

    Attributes:
        operator: what it computes; without clauses, attention.
        sentence: the same in words, without a full stop; empty if it was right on all calls, or if no rule was found.
        all: how the operator does on all calls.
        fresh: how it does on calls that were asked to try it.
        calls: calls that the kernel got.
        seconds: time taken.
        cpu_seconds: CPU time taken.
        complete: whether the budget sufficed.
        notes: what the kernel did besides, such as raise.
        samples: what was seen.
        unsure: whether it could not be tried on the calls whose findings it explains.
        passive: whether it was read from recorded calls, without asking the kernel; see `assay.harness.readout.passive`.
        whole: whether it also says which calls of a matrix fail: it was tried on them, gives what is wrong, and changes nothing
            that is right.
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
    unsure: bool = False
    passive: bool = False
    whole: bool = False

    @property
    def share(self) -> float:
        """Share of the wrong queries and heads whose outputs the operator gives."""
        return self.all.share

    @property
    def exact(self) -> bool:
        """True if the operator gives every output that was seen, right and wrong."""
        return self.all.exact and not self.unsure


_WITHOUT_MASK = "calls without a causal mask are wrong in a way of their own, which was not read"


def read_out(
    kernel: Kernel,
    *,
    noise: str | None = None,
    calls: int = CALLS,
    seconds: float = _SECONDS,
    device: str = "cpu",
    seed: int = 0,
    shapes: Collection[tuple[int, int]] | None = None,
    compared: Sequence[Compared] = (),
    tried: Tried | None = None,
) -> ReadOut:
    """Read the operator off a kernel: it is asked, within a budget, and nothing that it was not given is executed.

    Args:
        kernel: the kernel. It may raise, and answer NaN.
        noise: noise family; None for what the kernel declares.
        calls: most calls that it gets.
        seconds: most time, on `budget_clock`; a call that was begun is not interrupted.
        device: of the calls.
        seed: of their data, and of what is drawn.
        shapes: (head_dim, head_dim_v) that it is asked for, besides the head dims that it declares; None for any.
        compared: calls that it was given before, wrong and right ones, each with the relative error of a query, L1, from which on
            it is wrong. It is asked for these too, and for calls that differ from the smallest one that is wrong in one thing.
        tried: the condition under which sequences are wrong, as experiments found it.
    """
    begun, cpu = time.monotonic(), time.process_time()
    known = None if shapes is None else frozenset(shapes)
    prober = Prober(kernel, calls, seconds, device, known, clock=budget_clock(device))
    family = declaration(kernel).noise if noise is None else noise
    finder: Finder | None = None
    complete, read = True, ReadOut()
    tried_condition.set(tried)
    with few_threads(()):
        try:
            finder = Finder.begun(prober, "levels" if family else "normal", seed, compared)
            if finder is not None:
                finder.run()
        except BudgetSpentError:
            complete = False
        if finder is not None:
            operator, seen = finder.operator, finder.samples
            without_mask = (_WITHOUT_MASK,) if finder.not_causal_note else ()
            read = ReadOut(
                operator, sentence(operator), finder.tally(operator, seen),
                finder.tally(operator, [sample for sample in seen if sample.fresh]),
                notes=without_mask, samples=tuple(seen),
            )  # fmt: skip
    return replace(
        read, calls=prober.asked, seconds=time.monotonic() - begun, cpu_seconds=time.process_time() - cpu,
        complete=complete, notes=(*read.notes, *_notes(prober)),
    )  # fmt: skip


def _notes(prober: Prober) -> tuple[str, ...]:
    # A refusal says that the kernel does not compute such calls, which is no fault.
    raised = sorted((why, n) for why, n in prober.raised.items() if why != REFUSED)
    return tuple(f"not answered: {why}, in {n} call{'s' * (n != 1)}" for why, n in raised)
