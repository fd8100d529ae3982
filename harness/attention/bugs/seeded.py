"""A seeded fault: what one bug makes of a right output, and where it is restricted to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import Bug, Change, changing, links
from assay.harness.attention.call import AttentionCall

Effect = Callable[[AttentionCall, Tensor], "Tensor | None"]
"""(call, right output) -> wrong output, in the shape of the right one; None where the bug cannot show. NaN in it is meant."""
_ANY = (0, None)
"""A range without limits."""


@dataclass(frozen=True)
class Recomputed:
    """An effect that computes the output anew, in float64: the noise of the output that it is given is not in it.

    What the bug leaves undefined (a query that sees no key) is zero, as kernels leave it.

    Attributes:
        compute: what the bug computes; None where it cannot show.
    """

    compute: Callable[[AttentionCall], Tensor | None]

    def __call__(self, call: AttentionCall, out: Tensor) -> Tensor | None:
        wrong = self.compute(call)
        return None if wrong is None else wrong.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf"))


@dataclass(frozen=True)
class Where:
    """The place where a fault is seeded. Every restriction must hold; the defaults restrict nothing.

    Attributes:
        layers: layers; None for all.
        heads: q heads, negative ones counted from the last; None for all.
        phase: "extend" or "decode"; empty for both.
        new: (least, most) new tokens of a sequence; None for no limit.
        prefix: (least, most) cached tokens of a sequence.
        length: (least, most) tokens of a sequence, cached ones included.
        batch: (least, most) sequences of a call.
        unaligned: the length of a sequence is no multiple of this; 1 restricts nothing.
        from_call: first wrong call of each layer and phase, counted from 0 at the last `SeededFault.restart`.
        share: share of the calls that are wrong, drawn by `seed`.
        seed: seed of that draw.
    """

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    phase: str = ""
    new: tuple[int, int | None] = _ANY
    prefix: tuple[int, int | None] = _ANY
    length: tuple[int, int | None] = _ANY
    batch: tuple[int, int | None] = _ANY
    unaligned: int = 1
    from_call: int = 0
    share: float = 1.0
    seed: int = 0

    @property
    def counts(self) -> bool:
        """True if it depends on the number of calls before."""
        return self.from_call > 0 or self.share < 1

    def chooses(self, call: AttentionCall, number: int) -> bool:
        """Return True if a call is included, as the number-th of its layer and phase; sequences and heads are ignored."""
        return (
            (self.layers is None or call.layer in self.layers)
            and self.phase in ("", call.phase)
            and _within(len(call.cu_seqlens_q) - 1, self.batch)
            and number >= self.from_call
            and (
                self.share >= 1
                or random.Random(f"{self.seed} {call.layer} {call.phase} {number}").random() < self.share
            )
        )

    def sequences(self, call: AttentionCall) -> list[int]:
        """Return the indices of the sequences that it is restricted to."""
        return [
            b
            for b, (new, length) in enumerate(zip(call.lens_q, call.lens_k, strict=True))
            if _within(new, self.new)
            and _within(length - new, self.prefix)
            and _within(length, self.length)
            and (self.unaligned == 1 or length % self.unaligned)
        ]

    def q_heads(self, heads: int) -> list[int]:
        """Return the q heads that it is restricted to, of this many."""
        return (
            list(range(heads)) if self.heads is None else sorted({h % heads for h in self.heads if -heads <= h < heads})
        )


def _within(number: int, limits: tuple[int, int | None]) -> bool:
    least, most = limits
    return number >= least and (most is None or number <= most)


@dataclass(frozen=True)
class SeededFault:
    """One bug, seeded on purpose into right outputs.

    Attributes:
        id: stable, unique name, kebab-case.
        title: name in prose.
        about: what goes wrong, as a sentence without its full stop.
        effect: what the bug makes of a right output.
        links: public reports of such a bug; empty if none is known.
        where: where it is seeded.
        hypothesis: id of the hypothesis that it was made of; empty if none describes it.
        equivalent: whether it changes nothing that matters, so that it must not be flagged.
    """

    id: str
    title: str
    about: str
    effect: Effect
    links: tuple[str, ...] = ()
    where: Where = Where()
    hypothesis: str = ""
    equivalent: bool = False
    _calls: Counter[tuple[int, str]] = field(default_factory=Counter, compare=False, repr=False)

    def restart(self) -> None:
        """Count calls from the beginning: whoever switches a fault on calls this first."""
        self._calls.clear()

    def apply(self, call: AttentionCall, out: Tensor, truth: Tensor | None = None) -> Tensor:
        """Compute the output of a call with the fault.

        Args:
            call: the call.
            out: its right output, [total_q, num_q_heads, head_dim_v]; it is not written to.
            truth: the exact output, float64, if `out` has the noise of a quantisation, which the wrong output then has as well;
                None if it only rounds.

        Returns:
            `out` itself where the fault does not show, else a changed copy in its dtype.
        """
        number = self._calls[call.layer, call.phase]
        self._calls[call.layer, call.phase] += 1
        if not self.where.chooses(call, number):
            return out
        sequences, heads = self.where.sequences(call), self.where.q_heads(out.shape[1])
        if not sequences or not heads:
            return out
        wrong = self.effect(call, out)
        if wrong is None:
            return out
        if truth is not None and isinstance(self.effect, Recomputed):
            wrong = _with_noise(wrong, out, truth)
        return _mixed(out, wrong.to(out.dtype), _rows(call, sequences), heads)


def _with_noise(wrong: Tensor, out: Tensor, truth: Tensor) -> Tensor:
    """Add the noise of a right output to an exact wrong one, in each row and head in proportion to the size of both."""
    # A quantisation's noise is relative: where a query sees more keys, output and noise shrink alike. Noise of the same size on a
    # smaller output would hide the name of the bug.
    size = truth.norm(dim=-1, keepdim=True)
    share = torch.where(size > 0, wrong.double().norm(dim=-1, keepdim=True) / size, 0.0)
    return wrong + share.nan_to_num(nan=0.0, posinf=0.0) * (out.double() - truth)


def _rows(call: AttentionCall, sequences: Sequence[int]) -> Tensor:
    edges = list(pairwise(call.cu_seqlens_q.tolist()))
    return torch.cat([torch.arange(*edges[b], device=call.q.device) for b in sequences])


def _mixed(out: Tensor, wrong: Tensor, rows: Tensor, heads: Sequence[int]) -> Tensor:
    chosen = torch.tensor(heads, device=out.device)
    mixed = out.clone()
    mixed[rows[:, None], chosen] = wrong[rows[:, None], chosen]
    return mixed


def of_bug(
    bugs: Iterable[Bug], id: str, *reports: str, suffix: str = "", where: Where | None = None, only: str = ""
) -> SeededFault:
    """Make a fault of one of some bugs; `suffix` and `only` state in id and prose where it is seeded.

    Args:
        bugs: the bugs.
        id: of the bug.
        reports: public reports of what is seeded there, as those of a `Bug`; without a suffix, those of the bug.
        suffix: of the fault's id.
        where: where it is seeded.
        only: the same in prose.
    """
    of = next(bug for bug in bugs if bug.id == id)
    title = f"{of.title}, {only}" if only else of.title
    known = links(*(reports if suffix else of.reports))
    return SeededFault(id + suffix, title, of.about, Recomputed(of.compute), known, where or Where(), id)


def own(
    id: str, title: str, about: str, effect: Effect, *reports: str, where: Where | None = None, equivalent: bool = False
) -> SeededFault:
    """Make a fault that is of no known bug. `reports` are those of a `Bug`, the rest is as in `SeededFault`."""
    return SeededFault(id, title, about, effect, links(*reports), where or Where(), equivalent=equivalent)


def changes(change: Change) -> Effect:
    """Make an effect of a change of each sequence by itself."""
    return Recomputed(changing(change))


def constant(value: float) -> Effect:
    """Make the effect that every output is this number, which may be NaN or infinite."""
    return lambda call, out: torch.full_like(out, value)
