"""Keeps the worst query of each cell: its error against the truth, beside what honest implementations cost that very query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.noise import NoiseFamily
from assay.harness.evidence.error_table import QUERY, ErrorTable, Floats, RoleErrors, cell_index, excess, joined
from assay.harness.stats.noise_bound import MODEL_FACTOR
from assay.harness.stats.query_bounds import (
    QUERY_SHARE,
    dropping_cost,
    least_error,
    query_bounds,
    with_all_heads,
    with_rare_draws,
)


class QueryMaxima:
    """The worst queries of one layer and phase, by condition and head, and over all heads together."""

    def __init__(self) -> None:
        self._worst: dict[int, Floats] = {}  # condition -> [roles, heads + 1, columns]

    def add(
        self, call: AttentionCall, outputs: Tensor, honest: Sequence[tuple[NoiseFamily, Tensor]], right: Tensor,
        defined: Tensor, rows: NDArray[np.int64], conditions: NDArray[np.int64], prefixes: Sequence[int],
    ) -> None:  # fmt: skip
        """Add queries of a call.

        Args:
            call: the call.
            outputs: of the candidate and of the reference, float64 [2, rows, heads, head_dim].
            honest: by role, its noise family, and what honest implementations of that answer, float64 [members, rows, heads,
                head_dim].
            right: the truth, float64 [rows, heads, head_dim], 0 where it is not defined.
            defined: where it is.
            rows: these queries, packed rows in increasing order, [rows].
            conditions: the condition of each, [rows].
            prefixes: cached prefix of each sequence, of which the call may have the last keys alone.
        """
        at = torch.from_numpy(rows).to(right.device)
        size = with_all_heads(right.abs().sum(-1)).cpu().numpy()
        position, prefix = _positions(call, rows, prefixes)
        numbers, cell = np.unique(conditions, return_inverse=True)
        by_output = []
        for output, (family, members) in zip(outputs, honest, strict=True):
            off = torch.where(defined & ~output.isfinite(), torch.inf, torch.where(defined, output - right, 0.0))
            own = with_all_heads(off.abs().sum(-1)).cpu()
            noise = torch.where(defined & members.isfinite(), members - right, 0.0)
            bound = with_rare_draws(*query_bounds(noise), own, call, family, at, right)
            bound += with_all_heads(dropping_cost(call, family, at, right)).cpu()
            usual = with_all_heads(noise.abs().sum(-1)).square().mean(0).sqrt().cpu().numpy()
            floor = np.maximum(
                _mean(QUERY_SHARE * MODEL_FACTOR * usual, cell.ravel()), least_error(call.q.dtype) * size
            )
            columns = [own.numpy(), np.maximum(bound.numpy(), floor), size]
            columns += [np.broadcast_to(column[:, None], size.shape) for column in (position, prefix)]
            by_output.append(np.stack(columns, -1))
        by_role = np.stack(by_output)  # [roles, rows, heads + 1, columns]
        for n, condition in enumerate(numbers.tolist()):
            here = by_role[:, cell.ravel() == n]
            known = self._worst.get(condition)
            if known is not None:
                here = np.concatenate([here, known[:, None]], 1)
            worst = excess(here).argmax(1)[:, None, :, None]
            self._worst[condition] = np.take_along_axis(here, worst, 1)[:, 0]

    def cells(self, layer: int, first_head: int) -> ErrorTable:
        """Return the cells with their layer and heads.

        Args:
            layer: number of the layer.
            first_head: number of the first head that this process computes.
        """
        if not self._worst:
            return joined([])
        rows = np.stack(list(self._worst.values()))  # [conditions, roles, heads + 1, columns]
        index = cell_index(layer, [*range(first_head, first_head + rows.shape[2] - 1), -1], list(self._worst))
        candidate, reference = (
            replace(RoleErrors.none(index[..., 0].size), worst=rows[:, role].reshape(-1, len(QUERY))) for role in (0, 1)
        )
        return ErrorTable.of(index.reshape(-1, index.shape[-1]), candidate=candidate, reference=reference)


def _positions(
    call: AttentionCall, rows: NDArray[np.int64], prefixes: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Compute each query's position in its sequence, cached prefix included, and cached prefix."""
    ends = np.cumsum(call.lens_q)
    sequence = np.searchsorted(ends, rows, side="right")
    prefix = np.asarray(prefixes)[sequence]
    return rows - ends[sequence] + np.asarray(call.lens_q)[sequence] + prefix, prefix


def _mean(values: Floats, cell: NDArray[np.int64]) -> Floats:
    """Compute the mean over the queries of the same cell, [rows, ...] -> the same shape."""
    total = np.zeros((cell.max() + 1, *values.shape[1:]))
    np.add.at(total, cell, values)
    means: Floats = (total / np.bincount(cell)[:, None])[cell]
    return means
