"""Reduces a candidate's errors on the device into small accumulators. Nothing of the size of an output is kept."""

from __future__ import annotations

import torch
from torch import Tensor

from assay.harness.evidence.error_table import CONDITION_COUNT, DISTANCE, ErrorTable, cell_index
from assay.harness.stats.error_sums import query_sums, relative_l1

_Worst = tuple[Tensor, Tensor]
"""A number of the worst query and head of a call, float64 [] (float32 precision on a GPU), and its index into [rows, heads],
int64 []."""


class LayerSums:
    """The accumulators of one layer: a row per condition, a column per head."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.heads = heads
        self._sums = torch.zeros(CONDITION_COUNT, heads, len(DISTANCE), dtype=torch.float64, device=device)

    def measure(self, out: Tensor, reference: Tensor, conditions: Tensor) -> tuple[_Worst, _Worst]:
        """Add the errors of a call: on a GPU with one kernel, elsewhere with `query_sums`.

        Args:
            out: the candidate's output, [rows, heads, head_dim], at least one row.
            reference: the same shape and dtype.
            conditions: int64 [rows], condition of each query.

        Returns:
            The worst query and head by relative L1, and by the sum of |out - reference|, which is not misled by a query whose
            reference is nearly zero. On the device.
        """
        if out.is_cuda:
            from assay.harness.engines.inside.reduction_kernel import reduce

            by_relative, by_difference = reduce(out, reference, conditions, self._sums)
            return by_relative, by_difference
        # Where the reference is not finite, nothing is expected of the candidate.
        sums = query_sums(out, reference.masked_fill(~reference.isfinite(), torch.nan))[..., : len(DISTANCE)]
        self._sums.index_add_(0, conditions, sums)
        (worst, at), (farthest, where) = (
            errors.flatten().max(0) for errors in (relative_l1(sums), sums[..., DISTANCE.index("difference")])
        )
        return (worst, at), (farthest, where)

    def cells(self, layer: int, first_head: int) -> ErrorTable:
        """Return the observed cells.

        Args:
            layer: number of the layer.
            first_head: number of the first head that this process computes.
        """
        sums = self._sums.cpu().numpy()
        seen = sums[..., -3:].any(-1)
        index = cell_index(layer, range(first_head, first_head + self.heads), range(CONDITION_COUNT))
        return ErrorTable.of(index[seen], sums[seen])
