"""The shape of a call: everything that determines a call except its numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.matrix_data import DATA, RARE
from assay.harness.attention.matrix_features import asking
from assay.harness.attention.sample_calls import call_of

Lens = tuple[tuple[int, int], ...]
"""(new tokens, cached prefix) of each sequence."""


@dataclass(frozen=True)
class Shape:
    """The recipe of a call. The same shape and seed make the same call.

    Attributes:
        phase: "extend" or "decode".
        lens: (new tokens, cached prefix) of each sequence.
        heads: (q heads, kv heads).
        head_dim: head dim of q, k and v.
        dtype: dtype of q, k and v.
        data: the distribution of the numbers: a name of `DATA` or `RARE`.
        head_dim_v: head dim of v if it differs from q's, or else 0.
        layer: the calling layer.
        first_head: see `CallSpec.first_head`.
        layout: see `CallSpec.layout`.
        grad_mode: see `CallSpec.grad_mode`.
        asked: features that the call asks for, by their names in `ASKED` and `STORED`, and "window N" for any N.
        ways: see `CallSpec.ways`.
    """

    phase: str
    lens: Lens
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    data: str = "normal"
    head_dim_v: int = 0
    layer: int = 0
    first_head: int = 0
    layout: str = "packed"
    grad_mode: str = ""
    asked: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()

    def make(self, seed: int, device: str = "cpu", pool: int | None = None) -> AttentionCall:
        """Make the call, laid out as `layout` describes. Takes arguments and raises like `draw`."""
        return self.draw(seed, device, pool).clone()

    def draw(self, seed: int, device: str = "cpu", pool: int | None = None) -> AttentionCall:
        """Draw the numbers of the call, packed. Do not write to them: other calls may share them.

        Numbers are drawn and changed in float32, then rounded once: a seed means the same in every dtype.

        Args:
            seed: the seed of the numbers.
            device: the device of the tensors.
            pool: see `call_of`.

        Raises:
            LookupError: data or a feature that cannot be drawn, such as one of a recorded call.
            ValueError: such a call cannot have one of the features.
        """
        wide, rounded = (self._normal(dtype, seed, device, pool) for dtype in (torch.float32, self.dtype))
        call = (DATA | RARE)[self.data](wide.with_spec(phase=self.phase))
        changed = {
            name: x.to(self.dtype) for name in ("q", "k", "v") if (x := call.tensors[name]) is not wide.tensors[name]
        }
        call = call.with_tensors(rounded.tensors | changed).with_spec(
            layer=self.layer, first_head=self.first_head, layout=self.layout, grad_mode=self.grad_mode, ways=self.ways
        )
        if self.layout == "v in k":
            call = replace(call, v=call.k[..., : self.head_dim_v])
        for name in self.asked:
            call = asking(name)(call)
        return replace(call, v=call.k[..., : self.head_dim_v]) if self.layout == "v in k" else call

    def _normal(self, dtype: torch.dtype, seed: int, device: str, pool: int | None) -> AttentionCall:
        """Draw a call of normal numbers with these lengths, heads and head dims."""
        call = call_of(list(self.lens), self.heads, self.head_dim, dtype, device, seed, pool)
        if not self.head_dim_v:
            return call
        return replace(call, v=call_of(list(self.lens), self.heads, self.head_dim_v, dtype, device, seed, pool).v)


def shape_of(call: AttentionCall) -> Shape:
    """Return the shape of a call; the distribution of its numbers is not part of it."""
    spec = call.spec
    numbers = {"window": spec.mask.window, "softcap": spec.softcap, "temperature": spec.temperature}
    others = {"sinks": spec.sinks, "padding": spec.padded_rows, "no mask": not call.causal, "stored": call.stored}
    asked = [f"{name} {value:g}" for name, value in numbers.items() if value]
    head_dim, head_dim_v = call.q.shape[2], call.v.shape[2]
    return Shape(
        spec.phase, tuple(zip(call.lens_q, call.prefixes, strict=True)), (call.q.shape[1], call.k.shape[1]), head_dim, call.q.dtype,
        "normal" if call.scale == head_dim**-0.5 else "another scale", head_dim_v * (head_dim_v != head_dim), spec.layer,
        spec.first_head, spec.layout, spec.grad_mode, (*asked, *(name for name, value in others.items() if value)), spec.ways,
    )  # fmt: skip
