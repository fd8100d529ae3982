"""The sequences of a call in groups of similar lengths: those of a group are padded, and computed as further heads of one sequence.

Computed one by one, the twenty sequences of a decode batch cost twenty times the operations, and a GPU the time of launching them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from assay.harness.attention.call import AttentionCall, CallSpec

_FEWEST_KEYS, _FEWEST_ROWS = 128, 8
"""Lengths up to these share a group: padding to them costs less than another group."""


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences of a call, and those of their queries that are asked for.

    "Heads" are the kv heads of all its sequences, one sequence after the other.

    Attributes:
        q: all queries [heads, q heads per kv head, len_q, head_dim], 0 behind the end of a sequence.
        k: [heads, len_k, head_dim], 0 behind the end of a sequence.
        v: [heads, len_k, head_dim_v], likewise.
        lens_q: new tokens of each head's sequence, int64 [heads].
        lens_k: all tokens of each head's sequence, int64 [heads].
        first: position of the first query of each sequence, int64 [sequences].
        behind: how far that is behind the first key, int64 [sequences].
        partial: whether the call has positions: a query may then be behind all keys of its call.
        rows: int64 [sequences, rows], the queries that are asked for, counted within the sequence.
        stop: int64 [sequences, rows], on the CPU: one past the last key that each of them sees.
        spec: what the call asks for.
        custom: the custom masks of the sequences, bool [sequences, len_q, len_q]; None for none.
        asked: int64 [asked], which of ``rows.flatten()`` are asked for; the others are padding.
        places: int64 [asked], their places among all queries of the call that are asked for.
        start: the first of the places if they follow one another, else None.
        factor: `AttentionCall.score_factor` of its queries, [1 or sequences, 1 or len_q, num_q_heads]; None for none.
        score_bias: `AttentionCall.score_bias` likewise, with distances.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lens_q: Tensor
    lens_k: Tensor
    first: Tensor
    behind: Tensor
    partial: bool
    rows: Tensor
    stop: NDArray[np.int64]
    spec: CallSpec
    custom: Tensor | None
    asked: Tensor
    places: Tensor
    start: int | None
    factor: Tensor | None
    score_bias: Tensor | None

    @property
    def sequences(self) -> int:
        """Sequences of the group."""
        return len(self.rows)

    def blocks(self, numbers: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some of the rows at a time, int64 [sequences, r], with the keys that they see, bool [1 or heads, group * r, keys].

        Keys beyond the last that one of them sees are left out: in a call without a cached prefix that is nearly half of the work.

        Args:
            numbers: most scores of one head group that a block may have.
        """
        heads, group, _, _ = self.q.shape
        at_once = max(1, numbers // max(1, heads * group * self.k.shape[1]))
        for start in range(0, self.rows.shape[1], at_once):
            rows, per = self.rows[:, start : start + at_once], heads // self.sequences
            keys = torch.arange(int(self.stop[:, start : start + at_once].max(initial=0)), device=self.k.device)
            lens_q, lens = self.lens_q[::per, None], self.lens_k[::per, None]
            if self.partial:
                lens_q = lens - self.behind[:, None]
            seen = self.spec.mask.visible(rows, lens_q, lens, keys, self.custom)
            if self.partial:
                seen = seen & (keys < lens[..., None])
            seen = seen.repeat(1, group, 1)
            yield rows, seen if self.sequences == 1 else seen.repeat_interleave(per, 0)

    def modifiers(self, some: Tensor, keys: int) -> tuple[Tensor | None, Tensor | None]:
        """Return what the scores of `some` of the rows are multiplied by, [1 or heads, group * r, 1], and what is added to them.

        The latter is [heads, group * r, keys].
        """
        factor, bias = (self._of_rows(numbers, some) for numbers in (self.factor, self.score_bias))
        slopes = self.of_heads(self.spec.alibi, some)
        if slopes is not None or bias is not None:
            bias = biases(slopes, bias, self._by_head(some + self.behind[:, None]), keys)
        if factor is not None or self.spec.temperature:
            factor = factors(self.spec, self._by_head(some + self.first[:, None]), factor)
        return factor, bias

    def _of_rows(self, numbers: Tensor | None, some: Tensor) -> Tensor | None:
        """Lay out numbers of each query and head, [1 or sequences, 1 or len_q, num_q_heads, ...] -> [heads, group * r, ...]."""
        if numbers is None:
            return None
        rows = some if numbers.shape[1] > 1 else torch.zeros_like(some)
        sequences = torch.arange(len(rows), device=rows.device)[:, None] if len(numbers) > 1 else 0
        chosen = numbers[sequences, rows]
        group = self.q.shape[1]
        by_row = chosen.view(*chosen.shape[:2], chosen.shape[2] // group, group, *chosen.shape[3:])
        return by_row.movedim(1, 3).flatten(2, 3).flatten(0, 1)

    def _by_head(self, by_row: Tensor) -> Tensor:
        """Lay out a number of each row, [sequences, r] -> [1 or heads, group * r]."""
        by_row = by_row.repeat(1, self.q.shape[1])
        return by_row if self.sequences == 1 else by_row.repeat_interleave(len(self.q) // self.sequences, 0)

    def of_heads(self, numbers: Sequence[float], some: Tensor) -> Tensor | None:
        """Lay out a number of each q head for `some` of the rows: float64 [heads, group * r]; None without numbers."""
        if not numbers:
            return None
        of_groups = torch.tensor(numbers, dtype=torch.float64, device=self.q.device).view(-1, self.q.shape[1])
        return of_groups.repeat_interleave(some.shape[1], 1).repeat(self.sequences, 1)

    def queries(self, q: Tensor, some: Tensor) -> Tensor:
        """Take `some` of `q` [..., heads, group, len_q, head_dim] -> [..., heads, group * r, head_dim]: group heads are rows."""
        if self.sequences == 1:
            return q[..., some[0], :].flatten(-3, -2)
        at = some.repeat_interleave(q.shape[-4] // self.sequences, 0)[:, None, :, None]
        return q.gather(-2, at.expand(*q.shape[:-2], at.shape[2], q.shape[-1])).flatten(-3, -2)

    def rows_first(self, out: Tensor) -> Tensor:
        """Reorder [..., heads, group * r, head_dim_v] -> [..., sequences, r, num_q_heads, head_dim_v]."""
        heads, group = len(self.q) // self.sequences, self.q.shape[1]
        split = out.reshape(*out.shape[:-3], self.sequences, heads, group, out.shape[-2] // group, out.shape[-1])
        return split.movedim(-2, -4).flatten(-3, -2)

    def put(self, blocks: Sequence[Tensor], into: Tensor) -> None:
        """Put the blocks' results, [..., sequences, r, num_q_heads, head_dim_v], into [..., rows, num_q_heads, head_dim_v]."""
        rows = (blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), -3)).flatten(-4, -3)
        if len(self.asked) < rows.shape[-3]:
            rows = rows.index_select(-3, self.asked)
        if self.start is None:
            into.index_copy_(into.dim() - 3, self.places, rows.to(into.dtype))
        else:
            into.narrow(-3, self.start, len(self.asked)).copy_(rows)


def factors(spec: CallSpec, positions: Tensor, factor: Tensor | None) -> Tensor | None:
    """Compute what scores are multiplied by, [..., rows, 1]; None for nothing.

    Args:
        spec: what the call asks for: a temperature.
        positions: places of the queries in their sequences, int64 [..., rows].
        factor: `AttentionCall.score_factor` of them, broadcasting to [..., rows].
    """
    if spec.temperature:
        longer = positions.clamp(min=spec.temperature).double().log() / math.log(spec.temperature)
        factor = longer if factor is None else longer * factor
    return None if factor is None else factor[..., None]


def biases(slopes: Tensor | None, table: Tensor | None, queries: Tensor, keys: int) -> Tensor | None:
    """Compute what is added to the scores of so many keys, [heads, rows, keys]; None for nothing.

    Args:
        slopes: of ALiBi, broadcasting to [heads, rows]: a score loses slope * |distance|.
        table: `AttentionCall.score_bias` of the queries, [heads, rows or 1, distances].
        queries: how far the queries are behind the first key, int64, broadcasting to [heads, rows].
        keys: their number.
    """
    if slopes is None and table is None:
        return None
    distances = queries[..., None] - torch.arange(keys, device=queries.device)
    bias = None if slopes is None else -slopes[..., None] * distances.abs()
    if table is None:
        return bias
    known = table.shape[-1]
    at = torch.where((distances >= 0) & (distances < known), distances, known)
    shape = (len(table), *distances.shape[-2:])
    added = torch.nn.functional.pad(table, (0, 1)).expand(*shape[:2], -1).gather(-1, at.expand(shape))
    return added if bias is None else bias + added


def sequence_groups(call: AttentionCall, rows: Tensor | None, numbers: int) -> list[SequenceGroup]:
    """List the groups of a call's sequences of which a query is asked for.

    Args:
        call: the call.
        rows: packed query rows, int64 [rows], in increasing order; None for all.
        numbers: most numbers that the padded keys of a group have, unless one sequence alone has more.
    """
    starts_q, starts_k = (
        call.cu_seqlens_q.cpu().numpy().astype(np.int64),
        call.cu_seqlens_k.cpu().numpy().astype(np.int64),
    )
    wanted = np.arange(starts_q[-1]) if rows is None else rows.cpu().numpy()
    bounds = np.searchsorted(wanted, starts_q)
    buckets: dict[tuple[int, int, int], list[int]] = {}
    for sequence, (new, keys, asked) in enumerate(
        zip(np.diff(starts_q), np.diff(starts_k), np.diff(bounds), strict=True)
    ):
        if asked:
            key = _up(int(keys), _FEWEST_KEYS), _up(int(new), _FEWEST_ROWS), _up(int(asked), _FEWEST_ROWS)
            buckets.setdefault(key, []).append(sequence)
    groups = []
    for (keys, _, _), members in buckets.items():
        size = max(1, numbers // max(1, keys * call.k.shape[1] * call.k.shape[2]))
        chunks = [np.array(members[start : start + size]) for start in range(0, len(members), size)]
        groups += [_group(call, chunk, starts_q, starts_k, wanted, bounds) for chunk in chunks]
    return groups


def _group(
    call: AttentionCall,
    members: NDArray[np.int64],
    starts_q: NDArray[np.int64],
    starts_k: NDArray[np.int64],
    wanted: NDArray[np.int64],
    bounds: NDArray[np.int64],
) -> SequenceGroup:
    device, kv_heads = call.q.device, call.k.shape[1]

    def here(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    lens_q, lens_k = (np.diff(starts)[members] for starts in (starts_q, starts_k))
    counts = np.diff(bounds)[members]
    column = np.arange(counts.max())
    is_asked = column < counts[:, None]
    places = np.where(is_asked, bounds[members][:, None] + column, bounds[members][:, None])
    rows = wanted[places] - starts_q[members][:, None]
    first = behind = lens_k - lens_q
    if call.positions is not None:
        first, keys = call.positions.cpu().numpy().astype(np.int64)[members].T
        behind = first - keys
    _, stop = call.spec.mask.span(rows, (lens_k - behind)[:, None], lens_k[:, None])
    if call.positions is not None:
        stop = np.minimum(stop, lens_k[:, None])  # a query may be behind the keys of its call
    custom = call.custom_masks
    if custom is not None:
        stop = np.broadcast_to(lens_k[:, None], rows.shape)  # a query may see keys behind its own
    q = _padded(call.q, starts_q[members], lens_q)
    into = places[is_asked]
    return SequenceGroup(
        q=q.reshape(*q.shape[:2], kv_heads, call.heads.group, q.shape[3]).permute(0, 2, 3, 1, 4).flatten(0, 1),
        k=_padded(call.k, starts_k[members], lens_k).transpose(1, 2).flatten(0, 1),
        v=_padded(call.v, starts_k[members], lens_k).transpose(1, 2).flatten(0, 1),
        lens_q=here(lens_q.repeat(kv_heads)),
        lens_k=here(lens_k.repeat(kv_heads)),
        first=(at := here(first)),
        behind=at if call.positions is None else here(behind),
        partial=call.positions is not None,
        rows=here(rows),
        stop=stop,
        spec=call.spec,
        custom=None if custom is None else _stacked([custom[member] for member in members]),
        asked=here(np.flatnonzero(is_asked)),
        places=here(into),
        start=int(into[0]) if int(into[-1] - into[0]) == len(into) - 1 else None,  # they increase
        factor=_by_sequence(call.score_factor, starts_q[members], lens_q),
        score_bias=_by_sequence(call.score_bias, starts_q[members], lens_q),
    )


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Stack square matrices, padded with zeros to the size of the largest."""
    size = max(len(matrix) for matrix in matrices)
    return torch.stack(
        [torch.nn.functional.pad(matrix, (0, size - len(matrix), 0, size - len(matrix))) for matrix in matrices]
    )


def _by_sequence(numbers: Tensor | None, starts: NDArray[np.int64], lens: NDArray[np.int64]) -> Tensor | None:
    """Pad numbers of each query, as `_padded` does; those that all queries share are [1, 1, ...]."""
    if numbers is None or len(numbers) == 1:
        return None if numbers is None else numbers[None]
    return _padded(numbers, starts, lens) if numbers.dim() > 2 else _padded(numbers[..., None], starts, lens)[..., 0]


def _padded(packed: Tensor, starts: NDArray[np.int64], lens: NDArray[np.int64]) -> Tensor:
    """Pad packed rows [rows, heads, dim] to [sequences, longest, heads, dim], 0 behind the end of a sequence."""
    if len(starts) == 1:
        return packed[None, starts[0] : starts[0] + lens[0]]
    token = np.arange(lens.max())
    inside = token < lens[:, None]
    at = torch.from_numpy(np.where(inside, starts[:, None] + token, 0)).to(packed.device)
    behind = torch.from_numpy(~inside).to(packed.device)
    rows = packed.index_select(0, at.flatten()).view(*at.shape, *packed.shape[1:])  # faster than packed[at]
    return rows.masked_fill_(behind[..., None, None], 0)


def _up(count: int, fewest: int) -> int:
    """Round up to a power of two, at least `fewest`; 0 for 0."""
    return max(fewest, 1 << (count - 1).bit_length()) if count else 0
