"""One attention call as SGLang makes it, and the forward pass that it is part of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from assay.harness.attention.call import KernelRefused
from assay.harness.server.paging import lengths

Phase = Literal["extend", "decode"]


@dataclass(frozen=True)
class Pass:
    """What the layers of one forward pass have in common.

    Attributes:
        number: tells it from the process's other passes.
        new: new tokens of each sequence.
        prefix: cached prefix of each sequence.
        requests: the engine's name of each sequence's request.
    """

    number: int
    new: tuple[int, ...]
    prefix: tuple[int, ...]
    requests: tuple[str, ...]

    def at(self, row: int) -> tuple[int, int]:
        """Sequence of a query, and its position in the sequence's new tokens."""
        ends = np.cumsum(self.new)
        sequence = int(np.searchsorted(ends, row, side="right"))
        return sequence, row - int(ends[sequence]) + self.new[sequence]


def pass_of(number: int, phase: Phase, batch: Any, rows: int) -> Pass:
    """The pass that an SGLang ``ForwardBatch`` is.

    Args:
        number: the pass's number.
        phase: "extend" or "decode".
        batch: the batch.
        rows: rows of its attention outputs.

    Raises:
        KernelRefused: the batch's mode is none of the contract's phases, or it is padded.
    """
    new, prefix = lengths(phase, batch, "the attached candidate")
    if sum(new) != rows:
        raise KernelRefused(f"a batch of {sum(new)} tokens came with {rows} rows; start without padding")
    return Pass(number, tuple(new), tuple(prefix), tuple(batch.rids))


@dataclass(frozen=True)
class EngineCall:
    """One attention call as SGLang makes it, with the pass that it is part of."""

    phase: Phase
    q: Tensor
    k: Tensor
    v: Tensor
    layer: Any
    batch: Any
    now: Pass
    kwargs: dict[str, Any]
