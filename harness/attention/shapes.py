"""The shape of a call: everything that decides how a call is made, but for its numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.matrix_data import DATA, RARE
from assay.harness.attention.matrix_features import ASKED, STORED
from assay.harness.attention.paging import through_pages
from assay.harness.attention.sample_calls import call_of

Lens = tuple[tuple[int, int], ...]
"""(new tokens, cached prefix) of each sequence."""
_number = re.compile(r"(window|softcap|temperature) ([\d.]+)").fullmatch


@dataclass(frozen=True)
class Shape:
    """How a call is made. The same shape and seed make the same call.

    Attributes:
        phase: "extend" or "decode".
        lens: (new tokens, cached prefix) of each sequence.
        heads: (q heads, kv heads).
        head_dim: of q, k and v.
        dtype: of q, k and v.
        data: what the numbers are like: a name of `DATA` or `RARE`.
        page: page size of the pool that k and v are gathered from, in tokens; 0 for none.
        head_dim_v: of v, where it is not that of q; else 0.
        layer: the calling layer.
        first_head: as `CallSpec.first_head`.
        layout: as `CallSpec.layout`.
        grad_mode: as `CallSpec.grad_mode`.
        asked: features that the call asks for, by the names of `ASKED` and `STORED`, and "window N" for any N.
        ways: as `CallSpec.ways`.
    """

    phase: str
    lens: Lens
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    data: str = "normal"
    page: int = 0
    head_dim_v: int = 0
    layer: int = 0
    first_head: int = 0
    layout: str = "packed"
    grad_mode: str = ""
    asked: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()

    def make(self, seed: int, device: str = "cpu") -> AttentionCall:
        """Make the call. Its numbers are drawn and changed in float32, then rounded once: a seed means the same in every dtype.

        Raises:
            ValueError: it cannot be made: such a call cannot have a feature, or the values of a feature are not known.
        """
        if unknown := [
            name for name in (self.data, *self.asked) if name not in (DATA | RARE | _KNOWN) and not _number(name)
        ]:
            raise ValueError(
                f"a shape has {', '.join(unknown)}, of which no call can be drawn; expected values of the matrix"
            )
        wide = call_of(list(self.lens), self.heads, self.head_dim, torch.float32, device, seed)
        if self.head_dim_v:
            wider = call_of(list(self.lens), self.heads, self.head_dim_v, torch.float32, device, seed)
            wide = replace(wide, v=wider.v)
        call = (DATA | RARE)[self.data](wide.with_spec(phase=self.phase))
        call = replace(call, q=call.q.to(self.dtype), k=call.k.to(self.dtype), v=call.v.to(self.dtype)).with_spec(
            layer=self.layer, first_head=self.first_head, layout=self.layout, grad_mode=self.grad_mode, ways=self.ways
        )
        if self.layout == "v in k":
            call = replace(call, v=call.k[..., : self.head_dim_v])
        for name in self.asked:
            call = _ask(call, name)
        call = through_pages(call, self.page) if self.page else call
        if self.layout == "v in k":
            call = replace(call, v=call.k[..., : self.head_dim_v])
        return call if call.spec.layout == "packed" else call.clone()


_KNOWN = STORED | {name: make for asking in ASKED.values() for name, make in asking.items()}


def shape_of(call: AttentionCall) -> Shape:
    """Return the shape of a call, as far as it can be seen: not its page size, nor what its numbers are like."""
    spec = call.spec
    numbers = {"window": spec.mask.window, "softcap": spec.softcap, "temperature": spec.temperature}
    others = {
        "sinks": spec.sinks,
        "padded rows": spec.padded_rows,
        "not causal": not call.causal,
        "K and V stored": call.stored,
    }
    asked = [f"{name} {value:g}" for name, value in numbers.items() if value]
    head_dim, head_dim_v = call.q.shape[2], call.v.shape[2]
    return Shape(
        spec.phase, tuple(zip(call.lens_q, call.prefixes, strict=True)), (call.q.shape[1], call.k.shape[1]), head_dim, call.q.dtype,
        "normal" if call.scale == head_dim**-0.5 else "another scale", 0, head_dim_v * (head_dim_v != head_dim), spec.layer,
        spec.first_head, spec.layout, spec.grad_mode, (*asked, *(name for name, value in others.items() if value)), spec.ways,
    )  # fmt: skip


def window_of(asked: tuple[str, ...]) -> int:
    """Return the window that a call asks for by such names; 0 for none."""
    return max((int(found[2]) for name in asked if (found := _number(name)) and found[1] == "window"), default=0)


def _ask(call: AttentionCall, name: str) -> AttentionCall:
    if number := _number(name):
        if number[1] == "window":
            return call.with_spec(mask=Mask(window=int(number[2])))
        return call.with_spec(**{number[1]: float(number[2]) if number[1] == "softcap" else int(number[2])})
    return _KNOWN[name](call)
