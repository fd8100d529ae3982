"""Observations inside a server: calls at a boundary of its model, and the forward pass that they belong to.

Nothing here knows an engine. An engine's adapter gives each call to `assay.harness.engines.inside.attachment`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor

from assay.harness.attention.call import AttentionCall

Phase = Literal["extend", "decode"]


@dataclass(frozen=True)
class ForwardPass:
    """The facts that all layers of a forward pass share.

    Attributes:
        new: new tokens per sequence.
        prefix: cached prefix per sequence, in tokens.
        requests: the engine's request id per sequence.
        tokens: ids of the new tokens, [tokens].
        mixed: True if the engine put sequences in decode into an extend pass.
    """

    new: tuple[int, ...]
    prefix: tuple[int, ...]
    requests: tuple[str, ...]
    tokens: Tensor
    mixed: bool = False

    def locate(self, row: int) -> tuple[int, int]:
        """Return the sequence of a query row, and the query's position among the new tokens of that sequence."""
        ends = np.cumsum(self.new)
        sequence = int(np.searchsorted(ends, row, side="right"))
        return sequence, row - int(ends[sequence]) + self.new[sequence]


class ObservedCall(Protocol):
    """A call at a boundary of an engine's model, as the engine makes it: making this object must cost next to nothing.

    Attributes:
        phase: "extend" or "decode".
        is_last_part: False if the rest of the same call of the engine, with its sequences in the other phase, follows as another
            object.
        forward_pass: the pass, once described: for an observed call, after the reference has computed it. The sequences of each
            phase have one of their own.
    """

    phase: Phase
    is_last_part: bool
    forward_pass: ForwardPass

    @property
    def layer(self) -> int:
        """Number of the layer."""

    @property
    def heads(self) -> int:
        """Number of q heads that this process computes."""

    @property
    def batch(self) -> Any:
        """The engine's batch, which all layers of a pass share; compared by identity."""

    @property
    def rows_of_batch(self) -> slice | Tensor:
        """The rows of the call among the tokens of the batch: a slice, or int64 [tokens]."""

    @property
    def is_served(self) -> bool:
        """True if the batch has requests; a batch without any is the engine's own, for warm-up or the capture of CUDA graphs."""

    @property
    def requests(self) -> Sequence[str]:
        """The engine's ids of the requests of the batch."""

    def describe_pass(self) -> ForwardPass:
        """Describe the pass. Raises KernelRefused if the contract cannot express it."""

    def own(self) -> tuple[Tensor, Tensor] | None:
        """Return K and V of the new tokens as the layer gave them, [tokens, kv heads, dims], or None."""

    @property
    def given(self) -> tuple[Tensor, Tensor] | None:
        """Return the K and V of `own` if the cache stores them in fewer bits, or None."""

    def pack(self, who: str) -> AttentionCall:
        """Gather the tensors as a call of the kernel contract for `who`. Raises KernelRefused for anything it cannot express."""
