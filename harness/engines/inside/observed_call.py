"""What is observed inside of a server: calls at a boundary of its model, and the forward pass that they belong to.

Nothing here knows an engine. An engine's adapter gives each call to `assay.harness.engines.inside.attachment` as an `EngineCall`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        number: unique in the process.
        new: new tokens per sequence.
        prefix: cached prefix per sequence, in tokens.
        requests: the engine's request id per sequence.
        tokens: ids of the new tokens, [tokens].
        mixed: True if the engine put sequences in decode into an extend pass.
    """

    number: int
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


@dataclass(frozen=True)
class ObservedCall:
    """A call at a boundary, after the reference has computed it.

    Attributes:
        layer: number of the layer.
        phase: "extend" or "decode".
        heads: q heads that this process computes.
        forward_pass: the pass.
        pack: gathers the call's tensors as a call of the kernel contract, for the one that it names in its errors. Raises
            KernelRefused for what the contract cannot express.
        native: the engine's own objects, which only candidates of that engine read.
        given: K and V of the new tokens as the layer gave them, where the cache stores them in fewer bits; None elsewhere.
        own: returns K and V of the new tokens as the layer gave them, [tokens, kv heads, dims]; None where it gives none, as one
            that reads those of another layer.
    """

    layer: int
    phase: Phase
    heads: int
    forward_pass: ForwardPass
    pack: Callable[[str], AttentionCall]
    native: Any
    given: tuple[Tensor, Tensor] | None = None
    own: Callable[[], tuple[Tensor, Tensor] | None] = lambda: None


class EngineCall(Protocol):
    """A call as an engine makes it, before anything is known to need it: making one must cost next to nothing."""

    @property
    def layer(self) -> int:
        """Number of the layer."""

    @property
    def phase(self) -> Phase:
        """ "extend" or "decode"."""

    @property
    def batch(self) -> Any:
        """The engine's batch, which all layers of a pass have in common; compared by identity."""

    @property
    def is_served(self) -> bool:
        """True if the batch has requests; without one it is the engine's own, for warm-up or the capture of CUDA graphs."""

    @property
    def requests(self) -> Sequence[str]:
        """The engine's ids of the requests of the batch."""

    def forward_pass(self, number: int) -> ForwardPass:
        """Describe the pass. Raises KernelRefused if the contract cannot express it."""

    def observed(self, forward_pass: ForwardPass) -> ObservedCall:
        """Return the call, of a pass that was described before."""
