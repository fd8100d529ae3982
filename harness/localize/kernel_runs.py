"""The results of a kernel on calls: its own error by cell, and the share that noise explains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall, Outputs
from assay.harness.attention.honest import sample_rows
from assay.harness.attention.kernels import output_fault
from assay.harness.attention.oracle import log_sum_exp, oracle
from assay.harness.errors import AssayError
from assay.harness.evidence.error_table import SUMS, ratio
from assay.harness.localize.bounds import CallNoise, bounds_of_queries
from assay.harness.localize.cells import (
    CallCells,
    all_finite,
    cells_of,
    row_deviation,
    size_of,
)
from assay.harness.localize.lse import LseErrors, lse_errors
from assay.harness.stats.error_sums import distance, relative_l1, slope
from assay.harness.stats.query_bounds import QUERY_SHARE, least_error, with_all_heads

# A hypothesis explains an output that is up to this many eps away. Cells within rounding are not simulated, and their own bounds
# would be tighter.
_FIT_ROUNDINGS = 3.0
# Most queries of a call to simulate one by one: those with the largest errors.
_MAX_QUERIES = 64
_MAX_SCORES, _MAX_ROWS = 2**27, 1024
"""A call with more scores (queries x keys x heads) is compared on this many of its queries; see `sample_rows`."""


_SIZE = SUMS.index("size")


@dataclass(frozen=True)
class _QueryError:
    """The error of a query that stands out from its cell: relative L1 against the oracle, and its bound from noise.

    `place` is its index among the compared rows, `row` its packed query row; `head` is None for all heads together.
    """

    place: int
    row: int
    head: int | None
    own: float
    bound: float

    @property
    def excess(self) -> float:
        """Own error as a multiple of its bound."""
        return self.own / self.bound


@dataclass(frozen=True)
class CallResult:
    """A kernel's output on one call, with its own error.

    Attributes:
        call: the call as it was before the kernel ran.
        out: the kernel's output, [total_q, num_q_heads, head_dim_v].
        cells: the cells of the call.
        off: sums of its errors against the oracle's output, float64 [cells, num_q_heads, 7], on the CPU: the columns of `SUMS`.
        by_row: the same by query, float64 [rows, num_q_heads, 7].
        limits: the errors that noise explains on this call.
        repeat: largest relative L1, over cells and heads, between two more runs in a row; 0 without repeats.
        late: the same between this output and one computed after all other calls.
        repeats_differ: whether any bit differed between the two runs in a row.
        late_differs: whether any bit differed in the late run.
        mutated: names of the inputs that the kernel wrote to.
        outside: where it wrote outside of its tensors, phrased to follow "the kernel", or an empty string.
        lse: log-sum-exps, float32 [total_q, num_q_heads], or None if the kernel does not declare them.
        clearly: own error above which a cell is wrong for any noise; infinite unless experiments determined it.
    """

    call: AttentionCall
    out: Tensor
    cells: CallCells
    off: Tensor
    by_row: Tensor
    limits: CallNoise
    repeat: float = 0.0
    late: float = 0.0
    repeats_differ: bool = False
    late_differs: bool = False
    mutated: tuple[str, ...] = ()
    outside: str = ""
    lse: Tensor | None = None
    clearly: float = math.inf

    def updated(self, **changes: Any) -> CallResult:
        """Return a copy with changes to fields that do not affect its error; simulations are kept."""
        names = {field.name for field in fields(self)}
        _ = self.lse_errors, self.explained  # so that both share these
        changed = replace(self, **changes)
        vars(changed).update({name: value for name, value in vars(self).items() if name not in names})
        return changed

    @cached_property
    def own(self) -> Tensor:
        """Own error: relative L1 against the oracle, float64 [cells, num_q_heads], on the CPU."""
        return relative_l1(self.off)

    @cached_property
    def slopes(self) -> Tensor:
        """Slope of the output on the truth by head, float64 [num_q_heads]; NaN if either is not finite, or the truth is zero."""
        return slope(self.off.sum(0))

    @cached_property
    def explained(self) -> dict[str, Tensor | None]:
        """Hypothesis -> the result of `assay.harness.localize.causes.explaining`, for each that was compared with the output."""
        return {}

    @cached_property
    def lse_errors(self) -> LseErrors | None:
        """The errors of the log-sum-exps, or None for a kernel that does not declare them."""
        if self.lse is None:
            return None
        return lse_errors(self.call, self.lse, self.limits.family, self.cells.rows)

    @cached_property
    def size(self) -> Tensor:
        """Sum of the output's finite |numbers|, float64 [cells, num_q_heads], on the CPU."""
        return size_of(self.out, self.cells)

    @property
    def noise(self) -> str:
        """Noise family that the kernel declares, or an empty string for the exact one."""
        return self.limits.family.name

    @cached_property
    def bounds(self) -> Tensor:
        """Largest own error that noise explains, float64 [cells, num_q_heads]; simulated only for cells that need it."""
        return self.limits.bounds_where(self.own)

    @cached_property
    def fit_bounds(self) -> Tensor:
        """Largest distance at which a hypothesis still explains an output, float64 [cells, num_q_heads].

        A bug changes which keys a query sees, and with them the cost of quantisation: under a top-left mask, a query with a long
        prefix sees a few keys and has their noise. With a declared quantisation, every cell therefore gets the bound of the
        call's noisiest cell.
        """
        bounds = self.bounds.amax().expand_as(self.bounds) if self.noise else self.bounds
        return bounds.clamp(min=_FIT_ROUNDINGS * torch.finfo(self.call.q.dtype).eps)

    @cached_property
    def failing(self) -> Tensor:
        """Cells and heads that are out of bounds, or have a query that is, bool [cells, num_q_heads]."""
        failing = self.own > self.bounds
        for wrong_query in self.wrong_queries:
            failing[
                self.cells.of_row[wrong_query.place], slice(None) if wrong_query.head is None else wrong_query.head
            ] = True
        return failing

    @cached_property
    def queries(self) -> tuple[_QueryError, ...]:
        """Queries with a suspiciously large own error in cells within bounds, worst first, by head and over all heads."""
        # Two thresholds: `QUERY_SHARE` of the cell's allowance per query, which is free to compute, and the error of honest
        # implementations on that very query. Only queries beyond the first are simulated for the second. A cell of 100 queries
        # with a bound of 1 % may hide one query that is wrong by 90 %: it exceeds the first, and its own noise of 1 % exposes it.
        of_row = self.cells.of_row.cpu()
        queries = torch.bincount(of_row, minlength=len(self.own))[:, None]
        limit = with_all_heads(QUERY_SHARE * self.bounds.cpu() * self.off[..., _SIZE] / queries)
        own = with_all_heads(distance(self.by_row)).cpu()
        wrong = (self.own > self.bounds).cpu()
        seen = torch.cat([wrong, wrong.any(1, keepdim=True)], 1) | (queries == 1)  # the cell says it already
        excess = torch.where(seen[of_row] | (own == 0), 0.0, own / limit[of_row])
        suspects = (excess > 1).any(1).nonzero().flatten()
        if not len(suspects):
            return ()
        worst = excess[suspects].amax(1).argsort(descending=True)[:_MAX_QUERIES]
        suspects = suspects[worst].sort()[0]
        rows = suspects if self.cells.rows is None else self.cells.rows.cpu()[suspects]
        own, heads = own[suspects], self.own.shape[1]
        bounds = bounds_of_queries(self.call, self.limits.family, rows.to(self.call.q.device), own)
        bounds = torch.maximum(bounds, limit[of_row[suspects]])
        size = with_all_heads(self.by_row[..., _SIZE]).cpu()[suspects].clamp(min=torch.finfo(torch.float64).tiny)
        near = (own > limit[of_row[suspects]]) & ~seen[of_row[suspects]]
        errors = [
            _QueryError(
                place=int(suspects[at]),
                row=int(rows[at]),
                head=head if head < heads else None,
                own=float(own[at, head] / size[at, head]),
                bound=float(bounds[at, head] / size[at, head]),
            )
            for at, head in near.nonzero().tolist()
        ]
        return tuple(sorted(errors, key=lambda query: -query.excess))

    @property
    def fails(self) -> bool:
        """True if any cell is out of bounds."""
        return bool((self.own > self.clearly).any() or self.failing.any())

    @property
    def judged_cell(self) -> tuple[float, float]:
        """`worst_cell` as it was judged: if the call is within its bounds, the bound may be a lower limit."""
        if self.fails:
            return self.worst_cell
        cell, head = divmod(int((self.own / self.bounds).argmax()), self.own.shape[1])
        return float(self.own[cell, head]), float(self.bounds[cell, head])

    @cached_property
    def worst_cell(self) -> tuple[float, float]:
        """Own error and bound of the cell and head, or the query, with the largest own error relative to its bound."""
        cell, head = divmod(int((self.own / self.bounds).argmax()), self.own.shape[1])
        own = float(self.own[cell, head])
        bound = float(torch.maximum(self.bounds[cell, head], self.limits.bounds_of([cell])[0, head]))
        if self.queries and self.queries[0].excess > own / bound:
            return self.queries[0].own, self.queries[0].bound
        return own, bound

    @property
    def wrong_queries(self) -> tuple[_QueryError, ...]:
        """Queries out of bounds in cells within bounds, worst first; all heads together only where no single head is."""
        wrong = [query for query in self.queries if query.excess > 1]
        by_head = {query.place for query in wrong if query.head is not None}
        return tuple(query for query in wrong if query.head is not None or query.place not in by_head)

    @property
    def worst(self) -> float:
        """Largest own error over cells, queries and heads, as a multiple of its bound; above 1 it is out of bounds."""
        own, bound = self.worst_cell
        return own / bound

    @property
    def most(self) -> float:
        """An upper limit of `worst` that needs no further simulation."""
        if "failing" in vars(self):  # already simulated
            return max(float((self.own / self.bounds).max()), self.queries[0].excess if self.queries else 0.0)
        of_row = self.cells.of_row.cpu()
        per_query = self.off[..., _SIZE] / torch.bincount(of_row, minlength=len(self.own))[:, None]
        by_query = ratio(distance(self.by_row).cpu(), QUERY_SHARE * per_query[of_row])
        return max(float(self.own.max()), float(by_query.max())) / least_error(self.call.q.dtype)

    @property
    def nonfinite_share(self) -> float:
        """Share of the output's elements that are infinite or not a number."""
        return 1 - float(self.out[: self.call.rows].isfinite().double().mean())


# Most results whose bounds are simulated only to rank the worst.
_SIMULATED = 12


@dataclass(frozen=True)
class KernelRun:
    """A kernel's results on several calls.

    Attributes:
        results: one for each call that it computed.
        delegated: calls of phases that it does not declare; they were not run.
        refused: calls that it refused, with its reasons.
        failed_repeats: calls that it computed once and then failed to compute again, and why.
        drawn: results of experiments. Findings hold on them too, but do not count them.
        points: the features of all sequences of experiments, and whether each was wrong. Findings hold on these too.
        made: all calls except drawn ones, in the order in which they were made.
    """

    results: tuple[CallResult, ...]
    delegated: tuple[AttentionCall, ...] = ()
    refused: tuple[tuple[AttentionCall, str], ...] = ()
    failed_repeats: tuple[tuple[AttentionCall, str], ...] = ()
    drawn: tuple[CallResult, ...] = ()
    points: Sequence[tuple[Mapping[str, object], bool]] = ()
    made: Sequence[AttentionCall] = ()

    def require_results(self) -> None:
        """Raise an AssayError unless a call was computed: nothing computed is never a pass."""
        if not self.results:
            refused, delegated = len(self.refused), len(self.delegated)
            raise AssayError(
                f"The kernel computed none of {refused + delegated} calls ({delegated} delegated, {refused} refused).",
                "at least one call of a phase that the kernel declares",
                self.refused[0][1] if self.refused else "add calls of the phases that it declares",
            )


def worst_of(results: Sequence[CallResult]) -> CallResult | None:
    """Return the result with the largest own error relative to its bound, or None if there are no results.

    Simulating a bound costs more than the call, so it is done only where the result can still be the worst, and for at most
    `_SIMULATED` results. Beyond these, another result may be a little worse, but it is within a lower limit of its bound.
    """
    worst = None
    for number, result in enumerate(sorted(results, key=lambda result: result.most, reverse=True)):
        if worst is not None and (result.most <= worst.worst or (number >= _SIMULATED and result.most <= 1)):
            break
        if worst is None or result.worst > worst.worst:
            worst = result
    return worst


def measure(call: AttentionCall, outputs: Tensor | Outputs, noise: str = "") -> CallResult:
    """Compare an output, computed here or recorded, with the oracle.

    Args:
        call: the call.
        outputs: [total_q, num_q_heads, head_dim_v], alone or with the log-sum-exps of a kernel that declares them.
        noise: noise family that the kernel declares, as `Declaration.noise`.

    Raises:
        AssayError: the output breaks the contract.
        ValueError: the call holds no query, or its oracle output is not finite for a query that sees a key.
    """
    out, lse = (outputs.out, outputs.lse) if isinstance(outputs, Outputs) else (outputs, None)
    _require_contract(call, out)
    if not out.numel():
        raise ValueError("nothing to compare: the call holds no query; expected at least one")
    rows = _compared(call)
    cells, right = cells_of(call, rows), truth(call)
    if not (all_finite(right) or all_finite(right[~log_sum_exp(call, rows).isneginf().all(1)])):
        raise ValueError(
            "the oracle's output is not finite, so nothing can be compared with it; check the call's inputs"
        )
    by_row = row_deviation(out, right, cells)
    return CallResult(call, out, cells, cells.sums(by_row).cpu(), by_row, CallNoise(call, noise, cells), lse=lse)


def truth(call: AttentionCall) -> Tensor:
    """Compute the oracle's output for the compared queries, float64 [rows, num_q_heads, head_dim_v]."""
    return oracle(call, _compared(call))


def _compared(call: AttentionCall) -> Tensor | None:
    """Return the packed query rows of a call to compare, or None for all of q."""
    if call.rows * call.q.shape[1] * call.k.shape[0] > _MAX_SCORES:
        return sample_rows(call, _MAX_ROWS)
    return torch.arange(call.rows, device=call.q.device) if call.spec.padded_rows else None


def _require_contract(call: AttentionCall, out: object) -> None:
    if fault := output_fault(call, out):
        raise AssayError(
            f"The kernel returned {fault}.",
            "[total_q, num_q_heads, head_dim_v] in the dtype and on the device of q",
            "fix the kernel's output",
        )
