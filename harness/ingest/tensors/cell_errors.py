"""Two tensors, compared cell by cell: a cell is one token of one head.

Blocks with equal bits are skipped; only the others are converted, block by block, so that no float32 copy of a tensor is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.harness.ingest.tensors.layout import Layout

BLOCK = 1 << 18
"""Elements that are converted at once: 1 MiB of float32, which stays in the cache (benchmarks/tensor_diff.py)."""
# Bound of a cell whose elements are stored in 16 bits or fewer, in units of the dtype's epsilon: each side rounds twice on the way
# to what is saved (the operands, the result), each time by at most half an epsilon, and all errors of a cell may point one way.
_ROUNDINGS = 4
# The same for float32, whose error is that of sums in another order: about sqrt(n) half epsilons for n = 4096 ... 16384 terms.
_SUMMED = 64


def default_bound(dtype: torch.dtype) -> float:
    """Compute the error of a cell that rounding explains; 0 for integers."""
    if not dtype.is_floating_point:
        return 0.0
    return torch.finfo(dtype).eps * (_ROUNDINGS if dtype.itemsize < 4 else _SUMMED)


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
        worst: the largest error of any cell; None if no bit differs.
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


def compare_cells(a: Tensor, b: Tensor, layout: Layout, bound: float | None) -> Cells:
    """Compare two tensors of one shape.

    Args:
        a: the reference, any strides, on the CPU.
        b: the candidate.
        layout: how to read their dimensions.
        bound: error up to which a cell is equal; None if every bit must be.
    """
    rows = math.prod(layout.lead)
    heads = layout.lead[layout.axes.index("h")] if "h" in layout.axes else 1
    equal = Cells(0, rows, None, None, np.zeros(heads), 0, 0.0)
    if not a.numel():  # nothing to compare, however many rows of no elements a damaged header states
        return equal
    a, b = a.contiguous().view(rows, layout.dim), b.contiguous().view(rows, layout.dim)
    # float32 holds sums of fewer than 2^20 16-bit terms to 1e-4.
    narrow = all(dtype.is_floating_point and dtype.itemsize <= 4 for dtype in (a.dtype, b.dtype))
    errors: Tensor | None = None
    step = max(BLOCK // max(layout.dim, 1), 1)
    for start in range(0, rows, step):
        x, y = a[start : start + step], b[start : start + step]
        if x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)):
            continue
        if errors is None:
            errors, out = torch.zeros(rows), torch.zeros(rows, dtype=torch.bool)
        here = slice(start, start + len(x))
        errors[here] = _errors(x, y, torch.float32 if narrow else torch.float64)
        out[here] = (_bits(x) != _bits(y)).any(-1) if bound is None else ~(errors[here] <= bound)
    return equal if errors is None else _summary(a, b, layout, errors.numpy(), out.numpy())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize])


def _errors(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the error of each row of two [rows, dim] tensors, as `TensorCell` has it."""
    x = a.to(dtype, copy=True)
    y = b.to(dtype, copy=True).sub_(x).abs_()
    x.abs_()
    difference, size = y.sum(-1), x.sum(-1)
    relative = torch.maximum(difference / size, y.amax(-1) / x.amax(-1))
    relative[difference == 0] = 0.0
    for row in (~(torch.isfinite(difference) & torch.isfinite(size))).nonzero().flatten().tolist():
        relative[row] = _odd_row(a[row], b[row])
    return relative.float()


def _odd_row(a: Tensor, b: Tensor) -> float:
    """Compute the error of a row with infinities or NaNs: those that both sides have are equal."""
    x, y = a.double(), b.double()
    same = (x == y) | (x.isnan() & y.isnan())
    if not bool((x[~same].isfinite() & y[~same].isfinite()).all()):
        return math.nan
    difference, size = (x - y)[~same].abs(), x[x.isfinite()].abs()
    if not bool(difference.any()):
        return 0.0
    return (
        max(float(difference.sum() / size.sum()), float(difference.max() / size.max()))
        if bool(size.any())
        else math.inf
    )


def _summary(a: Tensor, b: Tensor, layout: Layout, errors: NDArray[np.float32], out: NDArray[np.bool_]) -> Cells:
    """Summarise `errors` and `out` (which cells are out of bounds): [rows], in the order of the tensor."""
    axes = "".join(layout.axes[i] for i in layout.order)
    by_place, out_by_place = (x.reshape(layout.lead).transpose(layout.order) for x in (errors, out))
    count, ranked = int(out.sum()), _ranked(errors)
    row = int(ranked.argmax())
    heads_last = by_place if "h" in axes else by_place[..., None]
    apart = (b[row].double() - a[row].double()).abs()
    return Cells(
        differing=count,
        total=errors.size,
        first=_cell(by_place, axes, int(out_by_place.reshape(-1).argmax())) if count else None,
        worst=_cell(by_place, axes, int(_ranked(by_place).argmax())),
        by_head=heads_last.reshape(-1, heads_last.shape[-1]).astype(np.float64).max(0),  # NaN wins
        nonfinite=int(np.isnan(errors).sum()),
        max_abs=float(apart.max()) if apart.numel() else 0.0,
    )


def _ranked(errors: NDArray[Any]) -> NDArray[Any]:
    """Rank errors: a NaN is worse than an infinite ratio."""
    finite = np.nan_to_num(errors.astype(np.float64), nan=0.0, posinf=np.finfo(np.float64).max)
    return np.where(np.isnan(errors), np.inf, finite).reshape(-1)


def _cell(errors: NDArray[Any], axes: str, flat: int) -> TensorCell:
    at = dict(zip(axes, (int(i) for i in np.unravel_index(flat, errors.shape)), strict=True)) if axes else {}
    return TensorCell(at.get("b"), at.get("t"), at.get("h"), float(errors.reshape(-1)[flat]))
