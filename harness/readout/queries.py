"""Queries of a call and all data about them before a kernel answers; every effect is a function of these."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import sequences
from assay.harness.localize.reading import Flags, Numbers, right_weights, scores_of, sinks_of, softmax, visible
from assay.harness.readout.features import Ints, Pairs, row_table

# Scores are clipped this far above the largest one, since exp(710) overflows float64.
_MOST_EXPONENT = 700.0


def einsum(rule: str, *arrays: Numbers) -> Numbers:
    """Compute numpy.einsum in PyTorch, so that the caller controls the number of threads."""
    return torch.einsum(rule, *(torch.from_numpy(array) for array in arrays)).numpy()


class Queries:
    """Some queries of a call, with all data about them before the kernel answers."""

    def __init__(self, call: AttentionCall, rows: Sequence[int] | Ints) -> None:
        self.call, self.rows = call, np.asarray(rows, dtype=np.int64)

    @property
    def heads(self) -> int:
        """q heads."""
        return self.call.q.shape[1]

    @property
    def kv_heads(self) -> int:
        """kv heads."""
        return self.call.k.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, q heads)."""
        return len(self.rows), self.heads

    @cached_property
    def own(self) -> Ints:
        """The kv head of each q head, int64 [heads]."""
        return self.call.heads.kv_head(np.arange(self.heads))

    @cached_property
    def table(self) -> dict[str, Ints]:
        """Features of each query and head, int64 [rows * heads] each."""
        return row_table(self.call, self.rows.tolist())

    @cached_property
    def pairs(self) -> Pairs:
        """Features of each query, head and packed key, int64 [rows * heads * total_k] each."""
        return Pairs(self.call, self.table)

    @cached_property
    def q(self) -> Numbers:
        """The rows of q, float64 [rows, heads, head_dim]."""
        return self.call.q[torch.from_numpy(self.rows).to(self.call.q.device)].double().cpu().numpy()

    @cached_property
    def k(self) -> Numbers:
        """All rows of k, float64 [total_k, kv heads, head_dim]."""
        return self.call.k.double().cpu().numpy()

    @cached_property
    def values(self) -> Numbers:
        """All rows of v, float64 [total_k, kv heads, head_dim_v]."""
        return self.call.v.double().cpu().numpy()

    @cached_property
    def scores(self) -> Numbers:
        """Scores, float64 [rows, heads, kv heads, total_k]; see `scores_of`."""
        return scores_of(self.call, self.rows)

    @cached_property
    def own_scores(self) -> Numbers:
        """Scores with the keys of the own kv head, float64 [rows, heads, total_k]."""
        return self.scores[:, np.arange(self.heads), self.own]

    @cached_property
    def sinks(self) -> Numbers | None:
        """See `sinks_of`."""
        return sinks_of(self.call)

    @cached_property
    def visible(self) -> Flags:
        """Keys that should be seen, bool [rows, total_k]."""
        return visible(self.call, self.rows)

    @cached_property
    def own_rows(self) -> Flags:
        """Keys of the query's own sequence, bool [rows, total_k]."""
        rows = np.zeros((len(self.rows), self.call.k.shape[0]), bool)
        for q, k in sequences(self.call):
            rows[(self.rows >= q.start) & (self.rows < q.stop), k] = True
        return rows

    @cached_property
    def universes(self) -> dict[str, Flags]:
        """The packed keys of each query by kind, bool [rows, total_k] each; see `KeyFactor`."""
        back = self.pairs["back"].reshape(*self.shape, self.call.k.shape[0])[:, 0]
        rest = self.own_rows & ~self.visible
        return {
            "seen": self.visible,
            "hidden": rest & (back < 0),
            "outside": rest & (back >= 0),
            "foreign": ~self.own_rows,
        }

    @cached_property
    def weights(self) -> Numbers:
        """The correct weights, float64 [rows, heads, kv heads, total_k]."""
        return right_weights(self.call, self.rows, self.scores)

    @cached_property
    def right(self) -> Numbers:
        """The correct output, float64 [rows, heads, head_dim_v]."""
        return einsum("thck,kcd->thd", self.weights, self.values)

    def of_own(self, weights: Numbers, values: Numbers | None = None) -> Numbers:
        """Compute the output from weights of the own kv head, [rows, heads, total_k] -> [rows, heads, head_dim_v].

        `values`, [total_k, kv heads, head_dim_v], replace the call's.
        """
        rows, heads = self.shape
        given = self.values if values is None else values
        by_group = weights.reshape(rows, self.kv_heads, self.call.heads.group, weights.shape[-1])
        return einsum("tcgk,kcd->tcgd", by_group, given).reshape(rows, heads, given.shape[-1])

    def attended(self, scores: Numbers, values: Numbers | None = None) -> Numbers:
        """Compute the output with other scores of the visible keys, [rows, heads, total_k] -> [rows, heads, head_dim_v]."""
        return self.of_own(softmax(scores, self.visible[:, None], self.sinks), values)


def weighted_softmax(
    factors: Numbers,
    scores: Numbers,
    sinks: Numbers | None = None,
    phantom: Numbers | None = None,
) -> Numbers:
    """Compute weights proportional to factor * exp(score), [rows, heads, total_k]; zero where the denominator is zero.

    The denominator also counts `sinks` (see `softmax`) and `phantom` keys with a score of 0, [rows, heads, 1].
    """
    top = np.where(factors > 0, scores, -np.inf).max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0) if sinks is None else np.maximum(top, sinks)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        e = np.exp(np.minimum(scores - top, _MOST_EXPONENT))
        total = (factors * e).sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks - top)
        if phantom is not None:
            total = total + phantom * np.exp(np.minimum(-top, _MOST_EXPONENT))
        return np.where(total > 0, factors * e / np.where(total > 0, total, 1.0), 0.0)
