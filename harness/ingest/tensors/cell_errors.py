"""Two tensors, compared cell by cell: a cell is one token of one head.

Blocks whose bytes are equal are skipped by memcmp (33 GB/s where the sums run at 6); only the others are converted, block by
block in a buffer that stays in the cache, so that no float32 copy of a tensor is made.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.harness.ingest.tensors.layout import Layout

BLOCK = 1 << 18
"""Elements that are converted at once: two float32 buffers of 1 MiB (benchmarks/tensor_diff.py)."""
_ROUNDINGS = 4
"""Bound of a cell whose elements are stored in 16 bits or fewer, in units of the dtype's epsilon: each side rounds twice on the
way to what is dumped (the operands, the result), each time by at most half an epsilon, and the errors of a cell may all point
one way."""
_SUMMED = 64
"""The same for float32, whose error is that of sums in another order: about sqrt(n) half epsilons for n terms, n = 4096 ... 16384.
"""
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


def default_bound(dtype: torch.dtype) -> float:
    """Compute the error of a cell that rounding explains; 0 for integers."""
    if not dtype.is_floating_point:
        return 0.0
    eps = torch.finfo(dtype).eps
    return eps * (_ROUNDINGS if dtype.itemsize < 4 else _SUMMED)


@dataclass(frozen=True)
class TensorCell:
    """One cell.

    Attributes:
        batch: place in the batch; None if the tensor has no such dimension.
        token: row of the token; None for a tensor without tokens.
        head: None if the tensor was not split by head.
        error: the larger of relative L1, sum |b - a| / sum |a|, and of max |b - a| / max |a|: one element that is lost among a
            hundred changes the first by less than rounding does. Infinite if only b is not zero, NaN if one side is not finite.
    """

    batch: int | None
    token: int | None
    head: int | None
    error: float


@dataclass(frozen=True)
class Cells:
    """The differences between two tensors of one shape.

    Attributes:
        differing: cells that are out of bounds.
        total: cells.
        first: the first of them by place in the batch, token and head; None if there is none.
        worst: the largest error of any cell; None if no byte differs.
        by_head: float64 [heads], the largest error of each head, NaN if one side is not finite; [1] without heads.
        nonfinite: cells in which one side is not finite and the other differs.
        max_abs: largest absolute difference in the worst cell.
    """

    differing: int
    total: int
    first: TensorCell | None
    worst: TensorCell | None
    by_head: NDArray[np.float64]
    nonfinite: int
    max_abs: float


def compare(a: Tensor, b: Tensor, layout: Layout, bound: float | None) -> Cells:
    """Compare two tensors of one shape.

    Args:
        a: the reference, any strides, on the CPU.
        b: the candidate.
        layout: how to read their dimensions.
        bound: error up to which a cell is equal; None if every bit must be.
    """
    rows = math.prod(layout.lead)
    if not a.numel():  # nothing to compare, however many rows of no elements a damaged header states
        return Cells(0, rows, None, None, np.zeros(1), 0, 0.0)
    a, b = a.contiguous().view(rows, layout.dim), b.contiguous().view(rows, layout.dim)
    errors: NDArray[np.float32] | None = None
    bits: NDArray[np.bool_] | None = None
    step = max(BLOCK // max(layout.dim, 1), 1)
    buffers = _Buffers(step * layout.dim, _working(a.dtype, b.dtype))
    for start in range(0, rows, step):
        part_a, part_b = a[start : start + step], b[start : start + step]
        if part_a.dtype == part_b.dtype and not _memcmp(part_a.data_ptr(), part_b.data_ptr(), part_a.nbytes):
            continue
        if errors is None:
            errors, bits = np.zeros(rows, np.float32), np.zeros(rows, np.bool_)
        here = slice(start, start + part_a.shape[0])
        errors[here] = buffers.errors(part_a, part_b)
        if bound is None:
            assert bits is not None
            bits[here] = _differing_bits(part_a, part_b)
    if errors is None:
        heads = layout.lead[layout.axes.index("h")] if "h" in layout.axes else 1
        return Cells(0, rows, None, None, np.zeros(heads), 0, 0.0)
    assert bits is not None
    return _summary(a, b, layout, errors, bits if bound is None else ~(errors <= bound))


class _Buffers:
    """Scratch memory of one comparison."""

    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        self._one, self._two = torch.empty(elements, dtype=dtype), torch.empty(elements, dtype=dtype)

    def errors(self, a: Tensor, b: Tensor) -> NDArray[np.float32]:
        """Compute the error of each row of two [rows, dim] tensors, as `TensorCell` has it."""
        x, y = self._one[: a.numel()].view_as(a), self._two[: a.numel()].view_as(a)
        y.copy_(b)
        x.copy_(a)
        y.sub_(x).abs_()
        x.abs_()
        difference, size = y.sum(-1), x.sum(-1)
        relative = torch.maximum(difference / size, y.amax(-1) / x.amax(-1))
        relative[difference == 0] = 0.0
        odd = ~(torch.isfinite(difference) & torch.isfinite(size))
        if bool(odd.any()):
            for row in odd.nonzero().flatten().tolist():
                relative[row] = _odd_row(a[row], b[row])
        as_array: NDArray[np.float32] = relative.to(torch.float32).numpy()
        return as_array


def _odd_row(a: Tensor, b: Tensor) -> float:
    """Compute the error of a row with infinities or NaNs: those that both sides have are equal."""
    x, y = a.double(), b.double()
    same = (x == y) | (x.isnan() & y.isnan())
    if not bool((x[~same].isfinite() & y[~same].isfinite()).all()):
        return math.nan
    finite = x.isfinite()
    difference, size = (x - y)[~same].abs(), x[finite].abs()
    if not bool(difference.any()):
        return 0.0
    if not bool(size.any()):
        return math.inf
    return max(float(difference.sum() / size.sum()), float(difference.max() / size.max()))


def _differing_bits(a: Tensor, b: Tensor) -> NDArray[np.bool_]:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    differing: NDArray[np.bool_] = (a.view(kind) != b.view(kind)).any(-1).numpy()
    return differing


def _working(*dtypes: torch.dtype) -> torch.dtype:
    """Return float32, in which sums of fewer than 2^20 16-bit terms are good to 1e-4; float64 for float64 and for integers."""
    return torch.float32 if all(d.is_floating_point and d.itemsize <= 4 for d in dtypes) else torch.float64


def _summary(a: Tensor, b: Tensor, layout: Layout, errors: NDArray[np.float32], out: NDArray[np.bool_]) -> Cells:
    """Summarise `errors` and `out` (which cells are out of bounds): [rows], in the order of the tensor."""
    order = layout.order
    by_place, out_by_place = (x.reshape(layout.lead).transpose(order) for x in (errors, out))
    axes = "".join(layout.axes[i] for i in order)
    flat = np.ascontiguousarray(out_by_place).reshape(-1)
    count = int(np.count_nonzero(flat))
    first = _cell(by_place, axes, int(np.argmax(flat))) if count else None
    ranked = np.where(np.isnan(by_place), np.inf, by_place)
    at = int(np.argmax(ranked))
    nan = np.isnan(by_place)
    if nan.any():  # a NaN is worse than an infinite ratio
        at = int(np.argmax(nan))
    heads_last = by_place if "h" in axes else by_place[..., None]
    by_head = heads_last.reshape(-1, heads_last.shape[-1]).astype(np.float64).max(0)  # NaN wins
    row = int(np.argmax(np.isnan(errors))) if nan.any() else int(np.argmax(np.where(np.isnan(errors), np.inf, errors)))
    apart = (b[row].double() - a[row].double()).abs()
    return Cells(
        differing=count,
        total=errors.size,
        first=first,
        worst=_cell(by_place, axes, at),
        by_head=by_head,
        nonfinite=int(nan.sum()),
        max_abs=float(apart.max()) if apart.numel() else 0.0,
    )


def _cell(errors: NDArray[Any], axes: str, flat: int) -> TensorCell:
    at = dict(zip(axes, (int(i) for i in np.unravel_index(flat, errors.shape)), strict=True)) if axes else {}
    error = float(errors.reshape(-1)[flat])
    return TensorCell(at.get("b"), at.get("t"), at.get("h"), error)
