"""Paged K and V as one packed call: the tensor work between an engine's block table and the kernel contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall


def slots_of(table: Tensor, requests: Sequence[int], lens: Sequence[int]) -> Tensor:
    """Return the slots of the KV pool that hold a batch's tokens, sequence after sequence, int64 [sum(lens)].

    Args:
        table: block table, one slot per token, int [requests, longest sequence].
        requests: row of the table for each sequence.
        lens: tokens of each sequence, cached prefix included.
    """
    return torch.cat([table[request, :length] for request, length in zip(requests, lens, strict=True)]).long()


def through_pages(call: AttentionCall, page: int, seed: int = 0) -> AttentionCall:
    """Scatter K and V of a call over a paged pool, and gather them again as a server does.

    The pool is adversarial: the pages of a sequence and the rows of the block table are shuffled, and unwritten slots are NaN.

    Args:
        call: a packed call.
        page: tokens per page.
        seed: of the two orders.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // page) for length in call.lens_k]
    pages = torch.randperm(sum(counts), generator=generator).tensor_split(list(accumulate(counts))[:-1])
    requests = torch.randperm(len(counts), generator=generator).tolist()
    table = torch.zeros(len(counts), max(call.lens_k), dtype=torch.int32)
    written: list[Tensor] = []
    for request, own, length in zip(requests, pages, call.lens_k, strict=True):
        written.append((own[:, None] * page + torch.arange(page)).flatten()[:length])
        table[request, :length] = written[-1].int()
    slots = slots_of(table.to(call.k.device), requests, call.lens_k)

    def gathered(packed: Tensor) -> Tensor:
        pool = packed.new_full((sum(counts) * page, *packed.shape[1:]), float("nan"))
        pool[torch.cat(written).to(packed.device)] = packed
        return pool[slots]

    return replace(call, k=gathered(call.k), v=gathered(call.v))
