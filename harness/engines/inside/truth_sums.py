"""Compares the candidate's and the reference's output with the truth, and with honest implementations, on the device.

Only sampled queries are compared (`sampled_rows`). Sums are kept by cell; nothing as large as an output is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.harness.attention.call import AttentionCall, KernelRefused, Mask
from assay.harness.attention.honest import here, honest_outputs
from assay.harness.attention.noise import FORMATS, NoiseFamily, family
from assay.harness.attention.oracle import feature_effects, oracle
from assay.harness.conditions import POSITION
from assay.harness.evidence.error_table import (
    QUERY,
    SUMS,
    ErrorTable,
    Floats,
    RoleErrors,
    cell_index,
    elements,
    excess,
    joined,
)
from assay.harness.evidence.shadow_errors import Known
from assay.harness.stats.error_sums import query_sums
from assay.harness.stats.noise_bound import MODEL_FACTOR
from assay.harness.stats.query_bounds import (
    QUERY_SHARE,
    dropping_cost,
    least_error,
    query_bounds,
    with_all_heads,
    with_rare_draws,
)

MAX_ROWS = 128
"""Most queries of a call that are compared with the truth, unless its sequences alone need more."""
# Kernels compute in blocks of a multiple of this many queries or keys; an error at a border shows there.
_BLOCK = 64
_BORDER_SHARE = 1 / 4


def sampled_rows(new: Sequence[int], prefix: Sequence[int], random: np.random.Generator) -> NDArray[np.int64]:
    """Choose the rows of a call that are compared with the truth, ascending.

    All rows if there are at most `MAX_ROWS`. Otherwise of each sequence the first and the last query and one of each position
    bucket; then queries at block borders, counted from the first new token and from the first token of the prefix; then any.

    Args:
        random: draws the rows that are not certain to be chosen.
    """
    total = sum(new)
    if total <= MAX_ROWS:
        return np.arange(total)
    starts = np.concatenate([[0], np.cumsum(new)[:-1]])
    certain = [row for start, length in zip(starts, new, strict=True) for row in _certain(int(start), length, random)]
    position = np.concatenate([np.arange(length) for length in new])
    borders = np.flatnonzero(_at_border(position) | _at_border(position + np.repeat(prefix, new)))
    room = max(0, MAX_ROWS - len(set(certain)))
    at_borders = random.choice(borders, min(len(borders), int(_BORDER_SHARE * room)), replace=False)
    chosen = np.union1d(certain, at_borders)
    others = np.setdiff1d(np.arange(total), chosen)
    anywhere = random.choice(others, min(len(others), max(0, MAX_ROWS - len(chosen))), replace=False)
    return np.union1d(chosen, anywhere).astype(np.int64)


def _certain(start: int, length: int, random: np.random.Generator) -> list[int]:
    """Return the first and the last query of a sequence, and one of each position bucket; `start` is the row of its first query."""
    edges = [edge for edge in POSITION.starts if edge < length] + [length]
    drawn = [int(random.integers(low, high)) for low, high in pairwise(edges)]
    return sorted({start, start + length - 1, *(start + position for position in drawn)})


def _at_border(position: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.isin(position % _BLOCK, (0, _BLOCK - 1))


_DIFFERENCE, _NONFINITE, _ALONG = (SUMS.index(name) for name in ("difference", "nonfinite", "along"))
# How many times as near a query's output must be to attention with another window. Noise alone does not come so near, because it
# points in no direction over the elements of a query.
_NEARER = 1.25
# How much farther than by one rounding a stored number may be from the exact quotient: the quotient is rounded too.
_DIVIDED = 1.1


class TruthSums:
    """The sums of one layer and phase, by condition and head.

    Args:
        candidate_noise: name of the candidate's noise family.
        reference_noise: name of the reference's noise family.
        reads_given: whether the candidate also has K and V as they were given, and may read either.

    Attributes:
        heads: q heads that this process computes.
        dtype: dtype of the calls, such as "float16", or empty before the first.
        accumulation: arithmetic of the candidate's family on the calls' device.
        known: known computations by either that are not exactly the call; see `Known` and `_as_asked`.
        felt: whether each feature that a call asked for changed the output of a query by more than the query's bound. A kernel
            that ignores a feature that no query feels looks right.

    Raises:
        ValueError: the family does not exist.
    """

    def __init__(self, heads: int, candidate_noise: str, reference_noise: str, reads_given: bool = False) -> None:
        self.heads, self._reads_given = heads, reads_given
        self._families = [family(name) for name in dict.fromkeys((candidate_noise, reference_noise))]
        self._reference_family = 0 if candidate_noise == reference_noise else 1
        self._members: list[int] = []
        self.dtype = self.accumulation = ""
        self.known: set[Known] = set()
        self.felt: dict[str, bool] = {}
        self._sums: dict[int, Tensor] = {}  # condition -> [outputs, heads, 7]
        self._queries = _WorstQueries()

    def add(
        self, call: AttentionCall, outputs: tuple[Tensor, Tensor], rows: NDArray[np.int64], conditions: NDArray[np.int64],
        seed: int, also: Sequence[int] = (), prefixes: Sequence[int] | None = None, given: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Add a call.

        Args:
            call: the call, as the candidate received it.
            outputs: the candidate's and the reference's, each [total_q, num_q_heads, head_dim_v].
            rows: the queries to compare, by row.
            conditions: condition of each query of the call, [total_q].
            seed: seed of the honest implementations' draws, different for each call, because the roundings of one call say nothing
                about those of the next.
            also: rows that are also compared one by one. They were chosen for the candidate's output, so they are left out of the
                sums.
            prefixes: cached prefix of each sequence, if the call has only the last keys of some; by default the call's own.
            given: K and V of the new tokens before they were stored in fewer bits, or None if they were not. A backend may read
                either: triton reads the given ones in prefill, FlashAttention the stored ones.
        """
        candidate, reference = outputs
        sampled = len(rows)
        # `also` joins the rows that are compared one by one, but not `summed`, the places of the sampled ones among them: sums over
        # rows that were chosen because they differ would describe a worse kernel.
        rows = np.concatenate([rows, np.setdiff1d(np.asarray(also, dtype=np.int64), rows)])
        order = np.argsort(rows)
        rows, summed = rows[order], torch.from_numpy(np.flatnonzero(order < sampled)).to(call.q.device)
        at = torch.from_numpy(rows).to(call.q.device)
        right = oracle(call, at)  # [rows, heads, head_dim_v], like every output below
        defined = right.isfinite()
        right = torch.where(defined, right, 0.0)
        self.dtype = str(call.q.dtype).removeprefix("torch.")
        self.accumulation = here(self._families[0], call).accumulation
        # One family if both roles declare the same, each [members, rows, heads, head_dim_v].
        honest = [honest_outputs(call, family, at, seed=seed) for family in self._families]
        self._members = [len(members) for members in honest]
        unstored = [_with_given(call, *given)] if given is not None else []
        moved, seen = _as_asked(call, at, reference[at].double(), right, _windows(call), unstored)
        own, of_candidate = _as_asked(
            call, at, candidate[at].double(), right, [], unstored if self._reads_given else []
        )
        self.known |= seen | of_candidate
        compared, truth = torch.stack([own, moved]), right.masked_fill(~defined, torch.nan)
        # [outputs, rows, heads, 7]: the candidate, the reference, then the members of each family.
        by_row = torch.cat([query_sums(some, truth) for some in (compared, *honest)])
        # Each role's possible loss from leaving out keys of tiny weight, as two more outputs, before the others.
        dropped = by_row[:2].clone()
        for role, at_family in enumerate((0, self._reference_family)):
            cost = dropping_cost(call, self._families[at_family], at, right)
            dropped[role, ..., _DIFFERENCE], dropped[role, ..., _ALONG] = cost, cost * right.abs().amax(-1)
            dropped[role, ..., _NONFINITE] = 0.0
        roles = [(self._families[n], honest[n]) for n in (0, self._reference_family)]
        limits = self._queries.add(
            call, compared, roles, right, defined, rows, conditions[rows], prefixes or call.prefixes
        )
        done = [name for name, felt in self.felt.items() if felt]
        for feature, effect in feature_effects(call, at, right, done).items():
            self.felt[feature] = bool((with_all_heads(effect.abs().sum(-1)).cpu().numpy() > limits).any())
        # [2 + outputs, sampled rows, heads, 7] -> [2 + outputs, conditions, heads, 7]
        by_row, rows = torch.cat([dropped, by_row])[:, summed], rows[summed.cpu().numpy()]
        numbers, place = np.unique(conditions[rows], return_inverse=True)
        where = torch.from_numpy(place.ravel()).to(at.device)
        sums = by_row.new_zeros(len(by_row), len(numbers), *by_row.shape[2:]).index_add_(1, where, by_row)
        for number, condition in enumerate(numbers.tolist()):
            known = self._sums.get(condition)
            self._sums[condition] = sums[:, number] if known is None else known + sums[:, number]

    def cells(self, layer: int, first_head: int) -> ErrorTable:
        """Return the cells with their layer and heads."""
        worst = self._queries.cells(layer, first_head)
        if not self._sums:
            return worst
        index = cell_index(layer, range(first_head, first_head + self.heads), list(self._sums))
        # [conditions, outputs, heads, 7] -> [cells, outputs, 7]
        by_output = torch.stack(list(self._sums.values())).transpose(1, 2).flatten(0, 1).cpu().numpy()
        honest = np.split(by_output[:, 4:], np.cumsum(self._members)[:-1], axis=1)
        candidate, reference = (
            replace(
                RoleErrors.none(len(by_output)),
                own=by_output[:, 2 + role],
                dropped=by_output[:, role],
                honest=honest[n],
            )
            for role, n in enumerate((0, self._reference_family))
        )
        cells = ErrorTable.of(index.reshape(-1, index.shape[-1]), candidate=candidate, reference=reference)
        return joined([cells.chosen(elements(candidate.own) > 0), worst])


class _WorstQueries:
    """The worst queries of one layer and phase, by condition and head, and over all heads together."""

    def __init__(self) -> None:
        self._worst: dict[int, Floats] = {}  # condition -> [roles, heads + 1, columns]

    def add(
        self, call: AttentionCall, outputs: Tensor, honest: Sequence[tuple[NoiseFamily, Tensor]], right: Tensor,
        defined: Tensor, rows: NDArray[np.int64], conditions: NDArray[np.int64], prefixes: Sequence[int],
    ) -> Floats:  # fmt: skip
        """Add queries of a call, and return the candidate's bounds, [rows, heads + 1].

        Args:
            outputs: outputs of the candidate and of the reference, float64 [2, rows, heads, head_dim].
            honest: by role, its noise family, and the outputs of that family's implementations, float64 [members, rows, heads,
                head_dim].
            right: the truth, float64 [rows, heads, head_dim], 0 where it is not defined.
            defined: where the truth is defined.
            rows: these queries, packed rows in increasing order, [rows].
            conditions: the condition of each, [rows].
            prefixes: cached prefix of each sequence; the call may have only its last keys.
        """
        at = torch.from_numpy(rows).to(right.device)
        size = with_all_heads(right.abs().sum(-1)).cpu().numpy()
        position, prefix = _positions(call, rows, prefixes)
        numbers, cell = np.unique(conditions, return_inverse=True)
        by_output = []
        for output, (of_role, members) in zip(outputs, honest, strict=True):
            off = torch.where(defined & ~output.isfinite(), torch.inf, torch.where(defined, output - right, 0.0))
            own = with_all_heads(off.abs().sum(-1)).cpu()
            noise = torch.where(defined & members.isfinite(), members - right, 0.0)
            bound = with_rare_draws(*query_bounds(noise), own, call, of_role, at, right)
            bound += with_all_heads(dropping_cost(call, of_role, at, right)).cpu()
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
        limits: Floats = by_role[0, ..., QUERY.index("bound")]
        return limits

    def cells(self, layer: int, first_head: int) -> ErrorTable:
        """Return the cells with their layer and heads."""
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
    """Compute each query's position in its sequence, including the cached prefix, and its cached prefix."""
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


def check_stored(call: AttentionCall, k: Tensor, v: Tensor) -> None:
    """Check that a cache of fewer bits has K and V of the new tokens, divided by their scales and rounded once or to its largest.

    Args:
        call: the call, with the stored K and V.
        k: K of the new tokens as it was given.
        v: V, likewise.

    Raises:
        KernelRefused: it has something else.
    """
    rows = _new_rows(call)
    for name, given in (("k", k), ("v", v)):
        stored, scale = call.tensors[f"stored_{name}"], call.tensors[f"{name}_scale"]
        form = next(form for form in FORMATS.values() if form.largest == torch.finfo(stored.dtype).max)
        assert form.mantissa is not None
        asked = given.reshape(-1, *stored.shape[1:]).float() / scale
        off = (_rows_of(stored, rows).float() - asked.clamp(-form.largest, form.largest)).abs()
        allowed = (asked.abs() * 2.0 ** -(form.mantissa + 1)).clamp(min=2.0 ** (form.least - form.mantissa - 1))
        if not bool((off <= _DIVIDED * allowed).all()):
            raise KernelRefused(
                f"what the reference stored as {name.upper()} is not {name.upper()} divided by its scale, which is "
                f"{scale.flatten()[0].item():.3g}, and rounded"
            )


def _rows_of(stored: Tensor, rows: Tensor) -> Tensor:
    """Take rows of a tensor of 8 bits, which PyTorch does not index."""
    return stored.view(torch.uint8)[rows].view(stored.dtype)


def _new_rows(call: AttentionCall) -> Tensor:
    """Return the rows of k and v that are new tokens."""
    ends, new = call.cu_seqlens_k[1:].tolist(), call.lens_q
    return torch.cat([torch.arange(end - n, end) for end, n in zip(ends, new, strict=True)]).to(call.k.device)


def _with_given(call: AttentionCall, k: Tensor, v: Tensor) -> AttentionCall:
    """Return a call of a cache of fewer bits with K and V of the new tokens as they were given, before they were stored."""
    rows = _new_rows(call)
    k, v = (
        tensor.index_copy(0, rows, given.reshape(-1, *tensor.shape[1:]).to(tensor.dtype))
        for tensor, given in ((call.k, k), (call.v, v))
    )
    return replace(call, k=k, v=v, stored=None)


def _windows(call: AttentionCall) -> list[Mask]:
    """Return the windows that are off by one key."""
    window = call.spec.mask.window
    return [Mask(window=other) for other in sorted({window - 1, window + 1} - {0})] if window else []


def _as_asked(
    call: AttentionCall, rows: Tensor, output: Tensor, right: Tensor, windows: Sequence[Mask], unstored: Sequence[AttentionCall]
) -> tuple[Tensor, set[Known]]:  # fmt: skip
    """Move outputs of a known computation that is not exactly the call to what the call asks for, and keep their noise.

    Engines count a window's keys in two ways. If a backend confuses the two, as SGLang's triton does in decode, its computation is
    still known, so its noise can be separated. The candidate's error remains the distance from what the layer asks for.
    If a cache stores fewer bits, a backend may read new K and V before or after they are stored, and neither is wrong.

    Args:
        rows: packed rows of the queries, int64 [rows].
        output: the output of these, float64 [rows, heads, head_dim_v].
        right: the truth, likewise, 0 where it is not defined.
        windows: masks that a backend may use instead of the call's.
        unstored: calls with K and V that may be read instead of the call's.

    Returns:
        The outputs, and the earlier results for some.
    """
    moved, errors = output, (output - right).abs().sum((1, 2)) / _NEARER
    read = [(asked, mask) for asked in (call, *unstored) for mask in (call.spec.mask, *windows)]
    # Which of `read` each query is nearest to.
    nearest = torch.zeros_like(errors, dtype=torch.int64)
    for number, (other, mask) in enumerate(read[1:], 1):
        truth = oracle(other.with_spec(mask=mask), rows).nan_to_num()
        error = (output - truth).abs().sum((1, 2))
        nearer = error < errors
        moved = torch.where(nearer[:, None, None], output - truth + right, moved)
        errors = torch.where(nearer, error, errors)
        nearest = torch.where(nearer, number, nearest)
    known: set[Known] = set()
    for other, mask in (read[number] for number in set(nearest.tolist())):
        if mask != call.spec.mask:
            known.add("window")
        if other is not call:
            known.add("given")
    return moved, known
