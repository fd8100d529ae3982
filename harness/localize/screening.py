"""Compares outputs with hypotheses: a few queries at a time, until a hypothesis is ruled out.

Most hypotheses are wrong by far, and some queries of a call are enough to see it. The limit is rigorous, so the answer is the one
that all queries give.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from assay.harness.attention.bugs.bug import Bug
from assay.harness.evidence.error_table import SUMS
from assay.harness.localize.cells import deviation, row_deviation
from assay.harness.localize.kernel_runs import CallResult
from assay.harness.stats.error_sums import distance, relative_l1
from assay.harness.stats.query_bounds import with_all_heads

SHARES = (16, 4, 2, 1)
"""Of the queries, a sixteenth is compared first, then up to a quarter, up to half and all of them."""
_SMALL_SCORES = 2**16
"""Scores (queries x keys x heads) up to which all queries are compared at once: there, computing takes less than preparing."""


class Comparisons:
    """Compares the results of one run with hypotheses, each pair once. The results must outlive it."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Tensor | None] = {}

    def explaining(self, hypothesis: Bug, result: CallResult) -> Tensor | None:
        """Sum the errors of an output against that of a hypothesis, float64 [cells, num_q_heads, 7].

        None if the hypothesis does not show on the call, or does not explain a failing cell: its distance there is beyond the
        result's `fit_bounds`.
        """
        key = hypothesis.id, id(result)
        if key not in self._known:
            self._known[key] = _explaining(hypothesis, result)
        return self._known[key]


def _explaining(hypothesis: Bug, result: CallResult) -> Tensor | None:
    total: Tensor | None = None
    for chosen in _shares(result):
        cells = result.cells if chosen is None else result.cells.at(chosen)
        expected = hypothesis.compute(result.call, cells.rows)
        if expected is None:
            return None
        off = deviation(result.out, expected, cells)
        total = off if total is None else total + off
        if _ruled_out(total, result):
            return None
    assert total is not None
    beyond = relative_l1(total) > result.fit_bounds
    return None if bool(beyond[result.failing].any()) or _leaves_queries(hypothesis, result) else total


def _leaves_queries(hypothesis: Bug, result: CallResult) -> bool:
    """Return True if a query out of bounds stays so in a cell within its own: its cell would excuse any hypothesis."""
    if not result.wrong_queries:
        return False
    places = torch.tensor(
        sorted({wrong_query.place for wrong_query in result.wrong_queries}), device=result.cells.of_row.device
    )
    cells = result.cells.at(places)
    expected = hypothesis.compute(result.call, cells.rows)
    if expected is None:
        return True
    off = with_all_heads(distance(row_deviation(result.out, expected, cells))).cpu()
    size = with_all_heads(result.by_row[..., SUMS.index("size")]).cpu()
    at = {int(place): number for number, place in enumerate(places)}
    return any(
        float(off[at[wrong_query.place], -1 if wrong_query.head is None else wrong_query.head])
        > wrong_query.bound * float(size[wrong_query.place, -1 if wrong_query.head is None else wrong_query.head])
        for wrong_query in result.wrong_queries
    )


def _shares(result: CallResult) -> Iterator[Tensor | None]:
    """Yield the queries to compare at a time, as places among those of the cells, spread over the call; None for all of them."""
    count = result.cells.of_row.numel()
    if count * result.call.k.shape[0] * result.call.q.shape[1] <= _SMALL_SCORES:
        yield None
        return
    places = torch.arange(count, device=result.cells.of_row.device)
    before = torch.zeros_like(places, dtype=torch.bool)
    for step in SHARES:
        now = places % step == 0
        yield (now & ~before).nonzero().flatten()
        before = now


def _ruled_out(some: Tensor, result: CallResult) -> bool:
    """Return True if the distance over all queries exceeds a failing cell's bounds, judging from some of the queries.

    Let d be the difference over some queries, D that over all, and S the size of what is expected. S is at most |out| + D and D at
    least d, so D / S is at least d / (|out| + d).
    """
    difference = some[..., SUMS.index("difference")]
    least = difference / (result.size + difference).clamp(min=torch.finfo(torch.float64).tiny)
    beyond = (least > result.fit_bounds) | (some[..., SUMS.index("nonfinite")] > 0)
    return bool(beyond[result.failing].any())
