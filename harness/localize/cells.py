"""The error of an output by cell (relative L1 by sequence, query position and head), and tests of tensors for equal values."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.conditions import POSITION
from assay.harness.stats.error_sums import query_sums

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True)
class CallCells:
    """The cells of a call: its queries by sequence and position bucket.

    Attributes:
        sequence: sequence of each cell.
        position: index into `assay.harness.conditions.POSITION.labels` of each cell.
        of_row: int64 [rows], the cell of each query.
        rows: int64 [rows], the packed query rows that are compared, in increasing order, or None for all.
    """

    sequence: tuple[int, ...]
    position: tuple[int, ...]
    of_row: Tensor
    rows: Tensor | None = None

    def at(self, chosen: Tensor) -> CallCells:
        """Return all cells with some of their queries: `chosen` are indices into `of_row`, int64, in increasing order."""
        return CallCells(
            self.sequence, self.position, self.of_row[chosen], chosen if self.rows is None else self.rows[chosen]
        )

    def sums(self, by_row: Tensor) -> Tensor:
        """Sum over the queries of each cell: float64 [rows, ...] -> [cells, ...], on the same device."""
        total = torch.zeros(len(self.sequence), *by_row.shape[1:], dtype=torch.float64, device=by_row.device)
        return total.index_add_(0, self.of_row, by_row)

    def only(self, chosen: Sequence[int]) -> CallCells:
        """Return some of the cells, in the given order."""
        number = torch.full((len(self.sequence),), -1, dtype=torch.int64)
        number[torch.tensor(chosen, dtype=torch.int64)] = torch.arange(len(chosen))
        of_row = number.to(self.of_row.device)[self.of_row]
        kept = (of_row >= 0).nonzero().flatten()
        return CallCells(
            tuple(self.sequence[cell] for cell in chosen),
            tuple(self.position[cell] for cell in chosen),
            of_row[kept],
            kept if self.rows is None else self.rows[kept],
        )


def cells_of(call: AttentionCall, compared: Tensor | None = None) -> CallCells:
    """Return the cells of a call that hold a query.

    Args:
        call: the call.
        compared: packed query rows to compare, int64, in increasing order, or None for all.
    """
    sequence: list[int] = []
    position: list[int] = []
    rows: list[int] = []
    for b, new in enumerate(call.lens_q):
        for bucket, (start, stop) in enumerate(pairwise((*POSITION.starts, new))):
            if start < new:
                sequence.append(b)
                position.append(bucket)
                rows.append(min(stop, new) - start)
    of_row = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows, dtype=torch.int64))
    every = CallCells(tuple(sequence), tuple(position), of_row.to(call.q.device))
    if compared is None:
        return every
    present, of_compared = torch.unique(every.of_row[compared], return_inverse=True)
    chosen = present.tolist()
    return CallCells(tuple(sequence[c] for c in chosen), tuple(position[c] for c in chosen), of_compared, compared)


def deviation(out: Tensor, expected: Tensor, cells: CallCells) -> Tensor:
    """Sum the errors of `out` by cell, float64 [cells, num_q_heads, 7], on the CPU: the columns of `SUMS`.

    NaN in `expected` means undefined and is not compared. Infinity matches anything that is not finite.

    Args:
        out: [total_q, num_q_heads, head_dim_v], or only the compared rows.
        expected: likewise.
        cells: the cells.
    """
    return cells.sums(row_deviation(out, expected, cells)).cpu()


def row_deviation(out: Tensor, expected: Tensor, cells: CallCells) -> Tensor:
    """Compute the columns of `SUMS` by query: float64 [rows, num_q_heads, 7], on the device of `out`."""
    return query_sums(_compared(out, cells), _compared(expected, cells))


def size_of(out: Tensor, cells: CallCells) -> Tensor:
    """Sum the finite |out|, float64 [cells, num_q_heads], on the CPU; `out` as in `deviation`."""
    values = _compared(out.detach(), cells).double().abs()
    return cells.sums(torch.where(values.isfinite(), values, 0.0).sum(-1)).cpu()


def _compared(values: Tensor, cells: CallCells) -> Tensor:
    """Return the rows that are compared."""
    return values if cells.rows is None or len(values) == len(cells.rows) else values[cells.rows]


def same_values(a: Tensor, b: Tensor) -> bool:
    """Return True if both hold the same values in the same shape; NaN equals NaN, and 0 equals -0."""
    if a.shape != b.shape:
        return False
    if a.dtype == b.dtype:
        first, second = (tensor.detach().contiguous() for tensor in (a, b))
        if a.device.type == b.device.type == "cpu":  # 15 times as fast as `torch.equal` is in half precision
            same = not _memcmp(first.data_ptr(), second.data_ptr(), first.nbytes)
        else:
            same = torch.equal(*(tensor.ravel().view(torch.uint8) for tensor in (first, second)))
        if same:
            return True
        if a.dtype.itemsize == 1 and a.is_floating_point():  # not every device can compare FP8
            return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def all_finite(values: Tensor) -> bool:
    """Return True if no element is infinite or NaN."""
    # A sum is finite only if all its terms are, and costs a tenth of testing each. A sum that overflows proves nothing.
    return math.isfinite(float(values.sum(dtype=torch.float64))) or bool(values.isfinite().all())
