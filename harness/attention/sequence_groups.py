"""Groups a call's sequences by similar lengths: the sequences of a group are padded, and computed like heads of one sequence.

Computed one by one, the twenty sequences of a decode batch take twenty times the operations, and launches on a GPU.
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

# Lengths up to these share a group: padding to them costs less than another group.
_FEWEST_KEYS, _FEWEST_ROWS = 128, 8


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences of a call, and their queries whose output is wanted.

    "Heads" are the kv heads of all its sequences, one sequence after the other.

    Attributes:
        q: all queries [heads, q heads per kv head, len_q, head_dim], 0 after the end of a sequence.
        k: [heads, len_k, head_dim], 0 after the end of a sequence.
        v: [heads, len_k, head_dim_v], 0 after the end of a sequence.
        lens_q: new tokens of each head's sequence, int64 [heads].
        lens_k: all tokens of each head's sequence, int64 [heads].
        first: position of the first query of each sequence, int64 [sequences].
        rows: int64 [sequences, rows], the wanted queries, by index in the sequence.
        stop: int64 [sequences, rows], on the CPU: one past the last key that each of them sees.
        spec: the call's request.
        asked: int64 [asked], indices into ``rows.flatten()`` of the wanted queries; the others are padding.
        places: int64 [asked], their indices among all wanted queries of the call.
        start: the first of the places if they are consecutive, or else None.
        whole: whether all queries of its sequences are wanted.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lens_q: Tensor
    lens_k: Tensor
    first: Tensor
    rows: Tensor
    stop: NDArray[np.int64]
    spec: CallSpec
    asked: Tensor
    places: Tensor
    start: int | None
    whole: bool

    @property
    def sequences(self) -> int:
        """Sequences of the group."""
        return len(self.rows)

    def blocks(self, numbers: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some of the rows at a time, int64 [sequences, r], with the keys that they see, bool [sequences, 1, 1, r, keys].

        Keys beyond the last visible one are left out: in a call without a cached prefix, that saves nearly half of the work.

        Args:
            numbers: most scores of one head group that a block may have.
        """
        heads, group, _, _ = self.q.shape
        at_once = max(1, numbers // max(1, heads * group * self.k.shape[1]))
        for start in range(0, self.rows.shape[1], at_once):
            rows, per = self.rows[:, start : start + at_once], heads // self.sequences
            keys = torch.arange(int(self.stop[:, start : start + at_once].max(initial=0)), device=self.k.device)
            seen = self.spec.mask.visible(rows, self.lens_q[::per, None], self.lens_k[::per, None], keys)
            yield rows, seen[:, None, None]

    def modified(self, products: Tensor, seen: Tensor, some: Tensor) -> Tensor:
        """Cap, temper and hide scaled products [..., heads, group * r, keys] of `some` of the rows as the call asks for."""
        heads, group = len(self.q) // self.sequences, self.q.shape[1]
        split = products.view(*products.shape[:-3], self.sequences, heads, group, *seen.shape[-2:])
        factor = None
        if self.spec.temperature:
            factor = tempering(self.spec.temperature, (some + self.first[:, None])[:, None, None])
        return modified(split, seen, self.spec.softcap, factor).view(products.shape)

    def of_heads(self, numbers: Sequence[float], some: Tensor) -> Tensor | None:
        """Lay out one number per q head for `some` of the rows: float64 [heads, group * r], or None without numbers."""
        if not numbers:
            return None
        of_groups = torch.tensor(numbers, dtype=torch.float64, device=self.q.device).view(-1, self.q.shape[1])
        return of_groups.repeat_interleave(some.shape[1], 1).repeat(self.sequences, 1)

    def queries(self, q: Tensor, some: Tensor) -> Tensor:
        """Take `some` of `q` [..., heads, group, len_q, head_dim] -> [..., heads, group * r, head_dim]: group heads are rows."""
        if self.whole and some.shape[1] == q.shape[-2]:
            return q.flatten(-3, -2)
        if self.sequences == 1:
            return q[..., some[0], :].flatten(-3, -2)
        at = some.repeat_interleave(q.shape[-4] // self.sequences, 0)[:, None, :, None]
        return q.gather(-2, at.expand(*q.shape[:-2], at.shape[2], q.shape[-1])).flatten(-3, -2)

    def rows_first(self, out: Tensor) -> Tensor:
        """Reorder [..., heads, group * r, head_dim_v] -> [..., sequences, r, heads of a sequence, group, head_dim_v]."""
        heads, group = len(self.q) // self.sequences, self.q.shape[1]
        split = out.reshape(*out.shape[:-3], self.sequences, heads, group, out.shape[-2] // group, out.shape[-1])
        return split.movedim(-2, -4)

    def put(self, blocks: Sequence[Tensor], into: Tensor) -> None:
        """Put the blocks' results, as `rows_first` orders them, into [..., rows, num_q_heads, head_dim_v]."""
        rows = blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), -4)
        sequences, count, heads, group = rows.shape[-5:-1]
        if self.start is not None and len(self.asked) == sequences * count:
            place = into.narrow(-3, self.start, len(self.asked))
            place.view(*place.shape[:-3], sequences, count, heads, group, place.shape[-1]).copy_(rows)
            return
        rows = rows.flatten(-3, -2).flatten(-4, -3).index_select(-3, self.asked)
        into.index_copy_(into.dim() - 3, self.places, rows.to(into.dtype))


def modified(products: Tensor, visible: Tensor, softcap: float = 0.0, factor: Tensor | None = None) -> Tensor:
    """Cap and multiply scaled products [..., heads, rows, keys] as the call asks for, and hide keys that are not seen.

    Args:
        products: scale * q k^T.
        visible: bool, broadcasting to `products`.
        softcap: the call's soft cap.
        factor: the result of `tempering`, broadcasting to [heads, rows, 1].
    """
    if softcap:
        products = products.div_(softcap).tanh_().mul_(softcap)
    if factor is not None:
        products = products * factor.to(products.dtype)
    return products.masked_fill_(~visible, float("-inf"))


def tempering(temperature: int, positions: Tensor) -> Tensor:
    """Compute the factor of a temperature on the scores of queries, [..., rows, 1].

    Args:
        temperature: `CallSpec.temperature`, not 0.
        positions: positions of the queries in their sequences, int64 [..., rows].
    """
    return (positions.clamp(min=temperature).double().log() / math.log(temperature))[..., None]


def sequence_groups(call: AttentionCall, rows: Tensor | None, numbers: int) -> list[SequenceGroup]:
    """List the groups of a call's sequences with a wanted query.

    Args:
        call: the call.
        rows: packed query rows, int64 [rows], in increasing order, by default all.
        numbers: most numbers in the padded keys of a group, unless a single sequence has more.
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
    first = lens_k - lens_q
    _, stop = call.spec.mask.span(rows, lens_q[:, None], lens_k[:, None])
    q = _padded(call.q, starts_q[members], lens_q)
    into = places[is_asked]
    return SequenceGroup(
        q=q.reshape(*q.shape[:2], kv_heads, call.heads.group, q.shape[3]).permute(0, 2, 3, 1, 4).flatten(0, 1),
        k=_padded(call.k, starts_k[members], lens_k).transpose(1, 2).flatten(0, 1),
        v=_padded(call.v, starts_k[members], lens_k).transpose(1, 2).flatten(0, 1),
        lens_q=here(lens_q.repeat(kv_heads)),
        lens_k=here(lens_k.repeat(kv_heads)),
        first=here(first),
        rows=here(rows),
        stop=stop,
        spec=call.spec,
        asked=here(np.flatnonzero(is_asked)),
        places=here(into),
        start=int(into[0]) if int(into[-1] - into[0]) == len(into) - 1 else None,  # they increase
        whole=bool((counts == lens_q).all()),
    )


def _padded(packed: Tensor, starts: NDArray[np.int64], lens: NDArray[np.int64]) -> Tensor:
    """Pad packed rows [rows, heads, dim] to [sequences, longest, heads, dim], 0 after the end of a sequence."""
    if len(starts) == 1:
        return packed[None, starts[0] : starts[0] + lens[0]]
    token = np.arange(lens.max())
    inside = token < lens[:, None]
    at = torch.from_numpy(np.where(inside, starts[:, None] + token, 0)).to(packed.device)
    behind = torch.from_numpy(~inside).to(packed.device)
    rows = packed.index_select(0, at.flatten()).view(*at.shape, *packed.shape[1:])  # faster than packed[at]
    return rows.masked_fill_(behind[..., None, None], 0)


def _up(count: int, fewest: int) -> int:
    """Round up to a power of two, at least `fewest`; 0 stays 0."""
    return max(fewest, 1 << (count - 1).bit_length()) if count else 0
