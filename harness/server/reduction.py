"""Reduces a candidate's errors on the device into small accumulators. Nothing of the size of an output is kept."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from assay.harness.evidence.error_sums import SUMS, Floats, ratio
from assay.harness.evidence.shadow_errors import CONDITION_COUNT, CONDITIONS, Integers

Worst = tuple[Tensor, Tensor]
"""A number of the worst query and head of a call, float64 [] (float32 precision on a GPU), and its index into [rows, heads],
int64 []."""


def row_errors(out: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the errors of a candidate's output relative to the reference's, by query and head.

    16-bit outputs are reduced in float32, and wider ones in float64.

    Args:
        out: [rows, heads, head_dim].
        reference: the same shape and dtype.

    Returns:
        The sums over head_dim, float64 [rows, heads, 5], the columns of `SUMS`; and the relative L1, [rows, heads]: infinite where
        the candidate is not finite but the reference is.
    """
    wide = torch.float64 if reference.dtype in (torch.float32, torch.float64) else torch.float32
    defined = reference.isfinite()
    compared = defined & out.isfinite()
    a = torch.where(compared, out, 0).to(wide)
    b = torch.where(compared, reference, 0).to(wide)
    difference, size = (a - b).abs().sum(-1), b.abs().sum(-1)
    count, known = compared.sum(-1), defined.sum(-1)
    sums = [difference, size, count, known - count, reference.shape[-1] - known]
    assert len(sums) == len(SUMS)
    relative = ratio(difference, size).nan_to_num(nan=float("inf"), posinf=float("inf"))
    return torch.stack([part.double() for part in sums], -1), relative.masked_fill(known > count, float("inf"))


class LayerSums:
    """The accumulators of one layer: a row per condition, a column per head."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.heads = heads
        self._sums = torch.zeros(CONDITION_COUNT, heads, len(SUMS), dtype=torch.float64, device=device)

    def measure(self, out: Tensor, reference: Tensor, conditions: Tensor) -> tuple[Worst, Worst]:
        """Add the errors of a call: on a GPU with one kernel, elsewhere with `row_errors` and `add`.

        Args:
            out: the candidate's output, [rows, heads, head_dim], at least one row.
            reference: the same shape and dtype.
            conditions: int64 [rows], condition of each query.

        Returns:
            The worst query and head by relative L1, and by the sum of |out - reference|, which is not misled by a query whose
            reference is nearly zero. On the device.
        """
        if out.is_cuda:
            from assay.harness.server.reduction_kernel import reduce, unpack

            by_relative, by_difference = unpack(reduce(out, reference, conditions, self._sums))
            return by_relative, by_difference
        sums, relative = row_errors(out, reference)
        self.add(sums, conditions)
        (worst, at), (farthest, where) = (
            errors.flatten().max(0) for errors in (relative, sums[..., SUMS.index("difference")])
        )
        return (worst.double(), at), (farthest, where)

    def add(self, sums: Tensor, conditions: Tensor) -> None:
        """Add the sums of a call, [rows, heads, 5]. `conditions` is int64 [rows], the condition of each query."""
        self._sums.index_add_(0, conditions, sums)

    def cells(self, layer: int, first_head: int) -> tuple[Integers, Floats]:
        """Return the observed cells, as `index` and `sums` of `ShadowErrors`.

        Args:
            layer: number of the layer.
            first_head: number of the first head that this process computes.
        """
        sums = self._sums.cpu().numpy()
        number, head = np.nonzero(sums[..., -3:].sum(-1))
        parts = np.unravel_index(number, tuple(len(labels) for labels in CONDITIONS.values()))
        index = np.stack([np.full(len(head), layer), head + first_head, *parts], axis=1).astype(np.int64)
        return index, sums[number, head]
