"""The footprint of a seeded fault: measured in float64 on the calls themselves, apart from everything that is to find it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import oracle
from assay.harness.bugs.seeded import SeededFault

_LEAST = 1e-6
"""Least relative change of a head's output in a sequence that counts: float64 rounds far below it, and no dtype in use above it."""


@dataclass(frozen=True)
class WideCall:
    """A call in float64 with its right output.

    Attributes:
        narrow: the call as it is.
        call: the call with q, k and v in float64.
        out: its right output, float64 [total_q, num_q_heads, head_dim_v].
    """

    narrow: AttentionCall
    call: AttentionCall
    out: Tensor


@dataclass(frozen=True)
class Footprint:
    """The places where a fault changes outputs.

    Attributes:
        calls: indices of the calls that it changes, in order.
        layers: layers of these calls.
        heads: q heads that it changes, by their numbers in the model.
        of_heads: number of heads of the model, as far as the calls that it changes have them.
        phases: phases of these calls.
        sequences: (call, sequence) that it changes.
    """

    calls: tuple[int, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    of_heads: int
    phases: tuple[str, ...]
    sequences: frozenset[tuple[int, int]]


def widened(calls: Sequence[AttentionCall]) -> list[WideCall]:
    """Widen the calls to float64, with their right outputs."""
    wide = [replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double()) for call in calls]
    return [WideCall(narrow, call, oracle(call)) for narrow, call in zip(calls, wide, strict=True)]


def footprint(fault: SeededFault, calls: Sequence[WideCall]) -> Footprint:
    """Find where a fault changes the outputs of these calls, made once each in this order."""
    fault.restart()
    changed: list[int] = []
    layers, heads, of_heads = set[int](), set[int](), 0
    phases, sequences = set[str](), set[tuple[int, int]]()
    for number, wide in enumerate(calls):
        there = _changed(fault.apply(wide.call, wide.out), wide)
        if not bool(there.any()):
            continue
        changed.append(number)
        layers.add(wide.call.layer)
        phases.add(wide.call.phase)
        first = wide.call.spec.first_head
        heads.update(first + head for head in there.any(0).nonzero().flatten().tolist())
        of_heads = max(of_heads, first + there.shape[1])
        sequences.update((number, b) for b in there.any(1).nonzero().flatten().tolist())
    return Footprint(
        tuple(changed), tuple(sorted(layers)), tuple(sorted(heads)), of_heads, tuple(sorted(phases, reverse=True)),
        frozenset(sequences),
    )  # fmt: skip


def _changed(out: Tensor, wide: WideCall) -> Tensor:
    """Return the sequences and heads that differ from the right output, bool [sequences, num_q_heads]."""
    off = (out - wide.out).abs().nan_to_num(nan=float("inf"))
    by_sequence = []
    for start, stop in pairwise(wide.call.cu_seqlens_q.tolist()):
        size = wide.out[start:stop].abs().sum((0, 2))
        by_sequence.append(off[start:stop].sum((0, 2)) > _LEAST * size)
    return torch.stack(by_sequence)
