"""SGLang's attention calls, for everything that is attached to the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from assay.harness.attention.call import AttentionCall, KernelRefused
from assay.harness.engines.inside.graph_counts import capturing
from assay.harness.engines.inside.observed_call import ForwardPass, Phase
from assay.harness.engines.sglang.kv_pool import Pages, joined_rope, layer_number, lengths, spec_of

_MIXED = "MIXED"


@dataclass
class SGLangCall:
    """An attention call as SGLang makes it, with the arguments of the backend's forward method; see `ObservedCall`.

    Attributes:
        phase: "extend" or "decode".
        q: [tokens, heads * head_dim].
        k: [tokens, kv heads, head_dim] as the layer gave it, or None if the layer reads another layer's.
        v: as k.
        radix_attention: SGLang's layer.
        batch: SGLang's ForwardBatch.
        arguments: further arguments, without ``save_kv_cache``.
        pages: the KV pool.
        is_last_part: True: all sequences of a batch are in one phase.
        forward_pass: the pass, once described.
    """

    phase: Phase
    q: Tensor
    k: Tensor | None
    v: Tensor | None
    radix_attention: Any
    batch: Any
    arguments: dict[str, Any]
    pages: Pages
    is_last_part: bool = True
    forward_pass: ForwardPass = field(init=False)

    @property
    def layer(self) -> int:
        """Number of the layer."""
        return layer_number(self.radix_attention)

    @property
    def rows_of_batch(self) -> slice:
        """All rows."""
        return slice(None)

    @property
    def is_served(self) -> bool:
        """True if the batch has requests and is not captured in a CUDA graph."""
        return bool(getattr(self.batch, "rids", None)) and not capturing()

    @property
    def requests(self) -> Sequence[str]:
        """SGLang's ids of the requests of the batch."""
        return tuple(self.batch.rids or ())

    @property
    def heads(self) -> int:
        """Number of q heads that this process computes."""
        return int(self.radix_attention.tp_q_head_num)

    def describe_pass(self) -> ForwardPass:
        """Describe the pass. Raises KernelRefused if the batch is padded, or its mode is not a phase of the contract."""
        new, prefix = lengths(self.phase, self.batch, "the attached candidate")
        rows = self.q.shape[0]
        if sum(new) != rows:
            raise KernelRefused(f"a batch of {sum(new)} tokens has {rows} rows; start the server without padding")
        mixed = self.phase == "extend" and self.batch.forward_mode.name == _MIXED
        return ForwardPass(tuple(new), tuple(prefix), tuple(self.batch.rids), self.batch.input_ids, mixed)

    @property
    def given(self) -> tuple[Tensor, Tensor] | None:
        """Return the K and V of `own` if the pool stores them in fewer bits, or None."""
        return self.own() if self.pages.stores_fewer_bits(self.radix_attention, self.k) else None

    def own(self) -> tuple[Tensor, Tensor] | None:
        """Return K and V of the new tokens as the layer gave them, or None."""
        rows = sum(self.forward_pass.new)
        _, k = joined_rope(self.q, self.k, self.radix_attention, self.arguments)
        return None if k is None or self.v is None else (k[:rows], self.v[:rows])

    def pack(self, who: str) -> AttentionCall:
        """Gather the tensors; K and V are in the pool. Raises KernelRefused for anything that the contract cannot express."""
        spec = spec_of(self.radix_attention, self.arguments, self.phase, who)
        new, prefix = list(self.forward_pass.new), list(self.forward_pass.prefix)
        q, k = joined_rope(self.q, self.k, self.radix_attention, self.arguments)
        return self.pages.packed_call(spec, q, self.radix_attention, self.batch, new, prefix, (k, self.v))
