"""Compares the candidate's and the reference's output with the truth, and with what honest implementations compute, on the device.

Only sampled queries are compared (`assay.harness.server.row_sample`). Sums are kept by cell; nothing of the size of an output is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Mask
from assay.harness.attention.honest import here, honest_outputs
from assay.harness.attention.noise import family
from assay.harness.attention.oracle import oracle
from assay.harness.evidence.shadow_errors import CONDITIONS
from assay.harness.evidence.truth_errors import OUTPUT_SUMS, TRUTH_SUMS, TruthErrors
from assay.harness.evidence.worst_queries import WorstQueries
from assay.harness.server.query_maxima import QueryMaxima
from assay.harness.stats.query_bounds import dropping_cost

_AT_ONCE = 2**24
"""Most elements of honest outputs that are reduced at once: 128 MiB of float64."""
_NEARER = 1.25
"""How many times as near a query's output must be to attention with another window. Noise alone does not come so near: over the
numbers of a query, it points in no direction."""


class TruthSums:
    """The sums of one layer and phase, by condition and head.

    Args:
        heads: q heads that this process computes.
        candidate_noise: name of the candidate's noise family.
        reference_noise: name of the reference's noise family.

    Attributes:
        heads: q heads that this process computes.
        dtype: dtype of the calls, such as "float16"; empty before the first.
        accumulation: arithmetic of the candidate's family on the calls' device.
        off_by_a_key: calls of which the reference computed a window of one key fewer or more. Its error is that from attention
            with such a window; see `_with_asked_window`.

    Raises:
        ValueError: there is no such family.
    """

    def __init__(self, heads: int, candidate_noise: str, reference_noise: str) -> None:
        self.heads = heads
        self._families = [family(name) for name in dict.fromkeys((candidate_noise, reference_noise))]
        self._reference_family = 0 if candidate_noise == reference_noise else 1
        self._members: list[int] = []
        self.dtype = self.accumulation = ""
        self.off_by_a_key = 0
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}
        self._queries = QueryMaxima()

    def add(
        self, call: AttentionCall, candidate: Tensor, reference: Tensor, rows: NDArray[np.int64],
        conditions: NDArray[np.int64], seed: int, also: Sequence[int] = (), prefixes: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Add a call.

        Args:
            call: the call, as the candidate received it.
            candidate: its output, [total_q, num_q_heads, head_dim_v].
            reference: the reference's output, in the same shape.
            rows: the queries to compare, by row.
            conditions: condition of each query of the call, [total_q].
            seed: of what honest implementations draw: another one for each call, as roundings of one say nothing of those
                of the next.
            also: rows that are compared one by one as well. They were chosen for what the candidate computed, so they are left
                out of the sums.
            prefixes: cached prefix of each sequence, where the call has only the last keys of some; None for those of the call.
        """
        sampled = len(rows)
        rows = np.concatenate([rows, np.setdiff1d(np.asarray(also, dtype=np.int64), rows)])
        order = np.argsort(rows)
        rows, summed = rows[order], torch.from_numpy(np.flatnonzero(order < sampled)).to(call.q.device)
        at = torch.from_numpy(rows).to(call.q.device)
        right = oracle(call, at)
        defined = right.isfinite()
        right = torch.where(defined, right, 0.0)
        self.dtype = str(call.q.dtype).removeprefix("torch.")
        self.accumulation = here(self._families[0], call).accumulation
        honest = [honest_outputs(call, family, at, seed=seed) for family in self._families]
        self._members = [len(outputs) for outputs in honest]
        moved, off = _with_asked_window(call, at, reference[at].double(), right)
        self.off_by_a_key += off
        outputs = [torch.stack([candidate[at].double(), moved]), *honest]
        by_row = torch.cat([_output_sums(some, right, defined) for some in outputs])  # [outputs, rows, heads, 6]
        for output, own in enumerate((0, self._reference_family)):
            if self._families[own].dropped:
                cost = dropping_cost(call, self._families[own], at, right)
                by_row[output, ..., 4:] = torch.stack([cost, cost * right.abs().amax(-1)], -1)
        size = torch.stack([right.abs().sum(-1), (right * right).sum(-1), defined.sum(-1).double()], -1)
        roles = [(self._families[n], honest[n]) for n in (0, self._reference_family)]
        self._queries.add(call, outputs[0], roles, right, defined, rows, conditions[rows], prefixes or call.prefixes)
        by_row, size, rows = by_row[:, summed], size[summed], rows[summed.cpu().numpy()]
        numbers, place = np.unique(conditions[rows], return_inverse=True)
        where = torch.from_numpy(place.ravel()).to(at.device)
        sums = by_row.new_zeros(len(by_row), len(numbers), *by_row.shape[2:]).index_add_(1, where, by_row)
        sizes = size.new_zeros(len(numbers), *size.shape[1:]).index_add_(0, where, size)
        for number, condition in enumerate(numbers.tolist()):
            known = self._sums.get(condition)
            new = (sums[:, number], sizes[number])
            self._sums[condition] = new if known is None else (known[0] + new[0], known[1] + new[1])

    def queries(self, layer: int, first_head: int) -> WorstQueries:
        """Return the worst query of each cell; arguments are those of `cells`."""
        return self._queries.cells(layer, first_head)

    def cells(self, layer: int, first_head: int) -> TruthErrors:
        """Return the cells with their layer and heads.

        Args:
            layer: number of the layer.
            first_head: number of the first head that this process computes.
        """
        if not self._sums:
            return TruthErrors.none()
        shape = tuple(len(labels) for labels in CONDITIONS.values())
        conditions = np.stack(np.unravel_index(list(self._sums), shape), axis=1)
        heads = np.arange(first_head, first_head + self.heads)
        index = np.empty((len(conditions), self.heads, 2 + len(shape)), np.int64)
        index[..., 0], index[..., 1], index[..., 2:] = layer, heads, conditions[:, None]
        outputs = (
            torch.stack([sums for sums, _ in self._sums.values()]).cpu().numpy()
        )  # [conditions, outputs, heads, 6]
        sizes = torch.stack([size for _, size in self._sums.values()]).cpu().numpy()
        by_cell = outputs.swapaxes(1, 2).reshape(-1, outputs.shape[1], len(OUTPUT_SUMS))
        honest = np.split(by_cell[:, 2:], np.cumsum(self._members)[:-1], axis=1)
        cells = TruthErrors(
            index=index.reshape(-1, index.shape[-1]),
            truth=sizes.reshape(-1, len(TRUTH_SUMS)),
            candidate=by_cell[:, 0],
            reference=by_cell[:, 1],
            candidate_honest=honest[0],
            reference_honest=honest[self._reference_family],
        )
        return cells.chosen(cells.truth[:, TRUTH_SUMS.index("elements")] > 0)


def _with_asked_window(call: AttentionCall, rows: Tensor, reference: Tensor, right: Tensor) -> tuple[Tensor, bool]:
    """Move outputs of a window that is off by one key to the window that was asked for, and keep their noise.

    Engines count a window's keys in two ways. Where a backend takes one for the other, as SGLang's triton does in decode, what it
    computes is still known, and its noise can be told from that. The candidate's error stays that from what the layer asks for.

    Args:
        call: the call.
        rows: packed rows of the queries, int64 [rows].
        reference: the reference's output of these, float64 [rows, heads, head_dim_v].
        right: the truth, likewise, 0 where it is not defined.

    Returns:
        The outputs, and whether there were any of such a window.
    """
    window, moved = call.spec.mask.window, reference
    if not window:
        return reference, False
    errors = (reference - right).abs().sum((1, 2))
    of_windows = torch.zeros_like(errors, dtype=torch.bool)
    for other in {window - 1, window + 1} - {0}:
        truth = oracle(call.with_spec(mask=Mask(window=other)), rows).nan_to_num()
        nearer = (reference - truth).abs().sum((1, 2)) * _NEARER < errors
        moved = torch.where(nearer[:, None, None], reference - truth + right, moved)
        of_windows |= nearer
    return moved, bool(of_windows.any())


def _output_sums(outputs: Tensor, right: Tensor, defined: Tensor) -> Tensor:
    """Compute the sums of `OUTPUT_SUMS` over head_dim, float64 [outputs, rows, heads, 6], without what is left out.

    Args:
        outputs: float64 [outputs, rows, heads, head_dim].
        right: the truth, float64 [rows, heads, head_dim], 0 where it is not defined.
        defined: where it is.
    """
    parts = []
    for some in torch.split(outputs, max(1, _AT_ONCE // max(1, right.numel()))):
        compared = some.isfinite() & defined
        off = torch.where(compared, some - right, 0.0)
        lost = (defined & ~compared).sum(-1).double()
        parts.append(
            torch.stack([off.abs().sum(-1), (off * right).sum(-1), (off * off).sum(-1), lost, 0 * lost, 0 * lost], -1)
        )
    return torch.cat(parts)
