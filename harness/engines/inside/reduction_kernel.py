"""The error reduction as one Triton kernel. It reads both outputs once and writes nothing of their size.

A program handles a block of queries of one head. Sums over head_dim are float32
for 16-bit outputs, and float64 for wider ones; all further sums are float64. The order of the
atomic additions is not fixed, so sums may differ between runs by float64 rounding (1e-16 of the sum of magnitudes). Counts and
the worst query do not differ.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from assay.harness.evidence.error_table import CONDITION_COUNT, DISTANCE

# Elements of each output that a program reads at once; half as many where it reduces in float64.
_TILE = 1024
# With `_TILE`, the fastest of nine on an H200 over both dtypes and sizes.
_WARPS = 1
_LAST = 2**31 - 1


@triton.jit
def _add(sums, chosen, values):  # type: ignore[no-untyped-def]
    tl.atomic_add(sums, tl.sum(tl.where(chosen, values, 0).to(tl.float64), 0), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _reduce(  # type: ignore[no-untyped-def]
    out, reference, conditions, sums, worst, rows, heads, out_row, out_head, reference_row, reference_head,
    dim: tl.constexpr, block_dim: tl.constexpr, block_rows: tl.constexpr, wide: tl.constexpr,
    none: tl.constexpr, sum_count: tl.constexpr, last: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    there = row < rows
    column = tl.arange(0, block_dim)
    inside = there[:, None] & (column < dim)[None, :]
    row_wide = row.to(tl.int64)[:, None]
    a = tl.load(out + row_wide * out_row + head * out_head + column[None, :], mask=inside, other=0.0).to(wide)
    b = tl.load(
        reference + row_wide * reference_row + head * reference_head + column[None, :], mask=inside, other=0.0
    ).to(wide)

    defined = inside & (tl.abs(b) < float("inf"))  # false for NaN as well
    compared = defined & (tl.abs(a) < float("inf"))
    a = tl.where(compared, a, 0.0)
    b = tl.where(compared, b, 0.0)
    difference = tl.sum(tl.abs(a - b), 1)
    size = tl.sum(tl.abs(b), 1)
    counts = tl.sum(tl.where(compared, 65537, tl.where(defined, 1, 0)), 1)  # two numbers, one reduction
    count, known = counts >> 16, counts & 65535

    relative = (difference / tl.where(size == 0.0, 1.0, size)).to(tl.float32)
    unbounded = (known > count) | ((size == 0.0) & (difference > 0.0)) | (relative != relative)
    relative = tl.where(unbounded, float("inf"), relative)
    # The bits of non-negative floats sort like the floats. Among equals the first query and head wins.
    bits = relative.to(tl.int32, bitcast=True).to(tl.int64) << 32
    packed = tl.where(there, bits + (last - (row * heads + head)).to(tl.int64), 0)
    tl.atomic_max(worst, tl.max(packed, 0), sem="relaxed")
    far = difference.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64) << 32
    far = tl.where(there, far + (last - (row * heads + head)).to(tl.int64), 0)
    tl.atomic_max(worst + 1, tl.max(far, 0), sem="relaxed")

    # Queries of a sequence are adjacent, so a block has few conditions, usually one.
    condition = tl.load(conditions + row, mask=there, other=none).to(tl.int32)
    now = tl.min(condition, 0)
    while now < none:
        chosen = condition == now
        mine = sums + (now * heads + head) * sum_count
        _add(mine, chosen, difference)
        _add(mine + 1, chosen, size)
        _add(mine + 2, chosen, count)
        _add(mine + 3, chosen, known - count)
        _add(mine + 4, chosen, tl.where(chosen, dim - known, 0))
        now = tl.min(tl.where(condition > now, condition, none), 0)


def reduce(out: Tensor, reference: Tensor, conditions: Tensor, sums: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Add the errors of a call to the accumulators of its layer.

    Args:
        out: [rows, heads, head_dim], at least one row, fewer than 2**31 rows times heads, head_dim up to 8192.
        reference: the same shape and dtype.
        conditions: int64 [rows], condition of each query.
        sums: contiguous float64 [conditions, heads, 5], the columns of `DISTANCE`. Updated in place.

    Returns:
        The worst query and head of the call by relative L1, and by the sum of |out - reference|: each its number (float64 [],
        float32 precision) and its index into [rows, heads] (int64 []), on the device.
    """
    out, reference = (t if t.stride(-1) == 1 else t.contiguous() for t in (out, reference))
    rows, heads, dim = reference.shape
    double = reference.dtype in (torch.float32, torch.float64)
    block_dim = triton.next_power_of_2(dim)
    block_rows = max(1, (_TILE // 2 if double else _TILE) // block_dim)
    worst = torch.zeros(2, dtype=torch.int64, device=out.device)
    _reduce[(heads, triton.cdiv(rows, block_rows))](
        out, reference, conditions, sums, worst, rows, heads,
        out.stride(0), out.stride(1), reference.stride(0), reference.stride(1),
        dim=dim, block_dim=block_dim, block_rows=block_rows, wide=tl.float64 if double else tl.float32,
        none=CONDITION_COUNT, sum_count=len(DISTANCE), last=_LAST, num_warps=_WARPS,
    )  # fmt: skip
    values = (worst >> 32).to(torch.int32).view(torch.float32).double()
    return list(zip(values, _LAST - (worst & 0xFFFFFFFF), strict=True))
