"""Paged K and V as one packed call: the tensor work between an engine's block table and the kernel contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall

STALE = float("nan")
"""The contents of unused slots of a pool, like unwritten memory: a weight of 0 does not remove it. INT8 has no such number."""
_STALE_INT8 = 127


def slots_of(table: Tensor, requests: Sequence[int], lens: Sequence[int]) -> Tensor:
    """Return the slots of the KV pool that hold a batch's tokens, sequence after sequence, int64 [sum(lens)].

    Args:
        table: block table, one slot per token, int [requests, longest sequence].
        requests: row of the table for each sequence.
        lens: tokens of each sequence, cached prefix included.
    """
    return torch.cat([table[request, :length] for request, length in zip(requests, lens, strict=True)]).long()


def shuffled_pages(lens: Sequence[int], page: int, pages: int, generator: torch.Generator) -> list[Tensor]:
    """Draw the pages of each sequence from a pool, int64: no sequence has its pages in order, and some pages may be unused.

    Args:
        lens: tokens of each sequence, cached prefix included.
        page: tokens per page.
        pages: pages of the pool.
        generator: the random generator of the order.
    """
    counts = [-(-length // page) for length in lens]
    drawn = torch.randperm(pages, generator=generator)[: sum(counts)]
    return list(drawn.tensor_split(list(accumulate(counts))[:-1]))


def slots_in(pages: Tensor, page: int, length: int) -> Tensor:
    """Return the slots of a sequence's tokens in its pages, int64 [length]."""
    return (pages[:, None] * page + torch.arange(page)).flatten()[:length]


@dataclass(frozen=True)
class PagedKV:
    """K and V of a call in an adversarial paged pool: pages are shuffled, and slots outside of the call are stale.

    Attributes:
        k: [pages, page, num_kv_heads, head_dim].
        v: [pages, page, num_kv_heads, head_dim_v].
        pages: pages of each sequence, int64.
        slots: slot of each token, int64 [total_k].
        stale: an unused page.
    """

    k: Tensor
    v: Tensor
    pages: list[Tensor]
    slots: Tensor
    stale: int

    @property
    def block_table(self) -> Tensor:
        """int32 [batch, most pages of a sequence], on the pool's device; after its sequence, a row names a stale page."""
        table = torch.full((len(self.pages), max(len(own) for own in self.pages)), self.stale, dtype=torch.int32)
        for row, own in zip(table, self.pages, strict=True):
            row[: len(own)] = own
        return table.to(self.k.device)


def paged(call: AttentionCall, page: int) -> PagedKV:
    """Lay K and V of a call out in a paged pool: the stored values, if the call has any.

    Args:
        call: a packed call.
        page: tokens per page.
    """
    used = sum(-(-length // page) for length in call.lens_k)
    pages = shuffled_pages(call.lens_k, page, used + 1, torch.Generator().manual_seed(0))
    [stale] = set(range(used + 1)) - set(torch.cat(pages).tolist())
    slots = torch.cat([slots_in(own, page, length) for own, length in zip(pages, call.lens_k, strict=True)])
    slots = slots.to(call.k.device)

    def scattered(packed: Tensor) -> Tensor:
        stale = STALE if packed.is_floating_point() else _STALE_INT8
        pool = torch.full(((used + 1) * page, *packed.shape[1:]), stale, device=packed.device).to(packed.dtype)
        as_bytes = torch.uint8 if packed.dtype.itemsize == 1 else packed.dtype  # FP8 cannot be indexed
        pool.view(as_bytes)[slots] = packed.view(as_bytes)
        return pool.view(-1, page, *packed.shape[1:])

    given = call.stored or call
    return PagedKV(scattered(given.k), scattered(given.v), pages, slots, stale)
