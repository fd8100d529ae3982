"""An attention call as SGLang makes it, and the forward pass that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from assay.harness.attention.call import KernelRefused
from assay.harness.server.kv_pool import lengths

Phase = Literal["extend", "decode"]


@dataclass(frozen=True)
class ForwardPass:
    """The data that all layers of a forward pass share.

    Attributes:
        number: unique in the process.
        new: new tokens per sequence.
        prefix: cached prefix per sequence, in tokens.
        requests: the engine's request id per sequence.
    """

    number: int
    new: tuple[int, ...]
    prefix: tuple[int, ...]
    requests: tuple[str, ...]

    @classmethod
    def of(cls, number: int, phase: Phase, batch: Any, rows: int) -> ForwardPass:
        """Make the pass of an SGLang ``ForwardBatch``.

        Args:
            number: number of the pass.
            phase: "extend" or "decode".
            batch: the batch.
            rows: rows of its attention outputs.

        Raises:
            KernelRefused: the batch is padded, or its mode is not a phase of the contract.
        """
        new, prefix = lengths(phase, batch, "the attached candidate")
        if sum(new) != rows:
            raise KernelRefused(f"a batch of {sum(new)} tokens has {rows} rows; start the server without padding")
        return cls(number, tuple(new), tuple(prefix), tuple(batch.rids))

    def locate(self, row: int) -> tuple[int, int]:
        """Return the sequence of a query row, and the query's position among the new tokens of that sequence."""
        ends = np.cumsum(self.new)
        sequence = int(np.searchsorted(ends, row, side="right"))
        return sequence, row - int(ends[sequence]) + self.new[sequence]


@dataclass(frozen=True)
class EngineCall:
    """An attention call as SGLang makes it: q [tokens, heads * head_dim], SGLang's layer and batch, and the forward pass."""

    phase: Phase
    q: Tensor
    k: Tensor
    v: Tensor
    layer: Any
    batch: Any
    forward_pass: ForwardPass
    kwargs: dict[str, Any]
