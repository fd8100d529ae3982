"""Dimensions that are lost or in the wrong place: of the output, of Q or of K."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from assay.harness.readout.features import Ints
from assay.harness.readout.operators import Effect
from assay.harness.readout.queries import Queries, einsum
from assay.harness.readout.reading import Numbers
from assay.harness.readout.sources import shift


@dataclass(frozen=True)
class Dims(Effect):
    """Dimensions of the output, of Q or of K are zero, or those of other dimensions.

    Attributes:
        words: what becomes of them, such as "the last 8 dims of {} are zero"; the braces stand for the output, Q or K.
        source: (head_dim) -> for each dimension the one that it holds, int64 [head_dim]; negative for zero.
        of: "the output", "Q" or "K".
    """

    words: str
    source: Callable[[int], Ints] = field(compare=False)
    cost: float = 1.0
    of: str = "the output"

    def outputs(self, queries: Queries) -> Numbers:
        if self.of == "the output":
            return self._moved(queries.right)
        q, k = queries.q, queries.k
        if self.of == "Q":
            q = self._moved(q)
        else:
            k = self._moved(k)
        return queries.attended(queries.call.scale * einsum("thd,khd->thk", q, k[:, queries.own]))

    def _moved(self, x: Numbers) -> Numbers:
        to = self.source(x.shape[-1])
        return np.where(to >= 0, x[..., np.maximum(to, 0)], 0.0)


def _below(n: int, dims: int) -> Ints:
    """Dimensions below n."""
    return np.where(np.arange(dims) < n, np.arange(dims), -1)


def _but_last(n: int, dims: int) -> Ints:
    return _below(dims - n, dims)


def _from(n: int, dims: int) -> Ints:
    return np.where(np.arange(dims) >= n, np.arange(dims), -1)


def _rolled(by: int, dims: int) -> Ints:
    return (np.arange(dims) + by) % dims


def _halves_swapped(dims: int) -> Ints:
    return _rolled(dims // 2, dims)


def _reversed(dims: int) -> Ints:
    return np.arange(dims)[::-1].copy()


def _flipped(bit: int, dims: int) -> Ints:
    return np.arange(dims) ^ bit


def _deinterleaved(dims: int) -> Ints:
    return np.arange(dims).reshape(-1, 2).T.ravel().copy()


def _interleaved(dims: int) -> Ints:
    return np.arange(dims).reshape(2, -1).T.ravel().copy()


def _only(parity: int, dims: int) -> Ints:
    return np.where(np.arange(dims) % 2 == parity, np.arange(dims), -1)


def _plural(n: int) -> str:
    return f"{n} dims of {{}} are" if n > 1 else "dim of {} is"


_OF_OUTPUT: tuple[Dims, ...] = (
    *(Dims(f"dims of {{}} from {n} on are zero", partial(_below, n))
      for n in (8, 16, 32, 48, 56, 60, 62, 63, 64, 80, 96, 112, 120, 127)),
    *(Dims(f"the last {_plural(n)} zero", partial(_but_last, n), 1.2) for n in (1, 2, 4, 8, 16, 32)),
    *(Dims(f"the first {_plural(n)} zero", partial(_from, n), 1.2) for n in (1, 2, 4, 8, 16, 32, 64)),
    *(Dims(f"dim d of {{}} holds dim ({shift('d', by)}) mod head_dim", partial(_rolled, by), 1.3)
      for n in (1, 2, 3, 4, 8, 16, 32) for by in (n, -n)),
    Dims("the halves of the dims of {} are swapped", _halves_swapped),
    Dims("the dims of {} are in reverse order", _reversed),
    *(Dims(f"dims d and d XOR {n} of {{}} are swapped", partial(_flipped, n)) for n in (1, 2, 4, 8, 16)),
    Dims("the dims of {} are de-interleaved: even ones first, then odd ones", _deinterleaved),
    Dims("the dims of {} are interleaved: those of the two halves alternate", _interleaved),
    Dims("even dims of {} are zero", partial(_only, 1)),
    Dims("odd dims of {} are zero", partial(_only, 0)),
)  # fmt: skip
_FARTHER = 0.3
"""What a fault of Q or K costs more: it is only seen through the scores."""
DIMS: tuple[Dims, ...] = (
    *_OF_OUTPUT,
    *(replace(one, of=of, cost=one.cost + _FARTHER) for of in ("K", "Q") for one in _OF_OUTPUT),
)
"""What may happen to dimensions: a mask on head_dim that ends at a vector, a warp's width or one early; lanes that are swapped,
rolled or in another order, as by a wrong swizzle, or a rotary layout of halves that is read as pairs."""
