"""Kernels that read rows of K and V from elsewhere, page by page or within tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from assay.harness.attention.call import AttentionCall
from assay.harness.attention.oracle import Request, attend, requests
from assay.harness.readout.block_maps import BEYONDS, PAGES, SAME, SIZES, BlockMap, inside, tiles
from assay.harness.readout.readout import read_out

Index = Callable[[Tensor, int], Tensor]
"""(indices of the keys of a sequence, their number) -> those that are read in their place."""


def reading(index: Index, what: str = "kv") -> Callable[[AttentionCall], Tensor]:
    def moved(one: Request) -> Request:
        n = one.k.shape[1]
        rows = index(torch.arange(n), n)
        k = one.k[:, rows] if "k" in what else one.k
        v = one.v[:, rows] if "v" in what else one.v
        return replace(one, k=k, v=v)

    return lambda call: torch.cat([attend(moved(one)).transpose(0, 1) for one in requests(call)]).to(call.q.dtype)


def halved(j: Tensor, n: int) -> Tensor:
    return j // 16 // 2 * 16 + j % 16


def last_twice(j: Tensor, n: int) -> Tensor:
    last = (n - 1) // 16
    return torch.where((j // 16 == last) & (last > 0), j - 16, j)


def reversed_pages(j: Tensor, n: int) -> Tensor:
    whole = n // 8
    return torch.where(j < whole * 8, (whole - 1 - j // 8) * 8 + j % 8, j)


def neighbours(j: Tensor, n: int) -> Tensor:
    to = (j // 16 ^ 1) * 16 + j % 16
    return torch.where(to < n, to, j)


def reversed_in_tile(j: Tensor, n: int) -> Tensor:
    to = j // 32 * 32 + 31 - j % 32
    return torch.where(to < n, to, j)


def transposed(j: Tensor, n: int) -> Tensor:
    o = j % 16
    return torch.where(j < n // 16 * 16, j // 16 * 16 + o % 4 * 4 + o // 4, j)


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "sentence"), [
    (reading(halved), "K and V of page p are read from page p // 2 (pages of 16 keys)"),
    (reading(last_twice), "K and V of the last page are read from the last page but one (pages of 16 keys)"),
    (reading(reversed_pages), "K and V of page p are read from page n - 1 - p (n pages of 8 keys; an incomplete page stays)"),
    (reading(neighbours, "k"), "K of key j is read from key j XOR 16"),
    (reading(reversed_in_tile, "v"),
     "V of key o of each tile of 32 is read from key 31 - o of it (a key stays where that lies beyond its sequence)"),
    (reading(transposed, "v"),
     "V of key o of each tile of 16 is read from key (o mod 4) x 4 + o // 4 of it (an incomplete tile stays)"),
], ids=["halved", "last twice", "reversed", "neighbours", "reversed in a tile", "transposed"])  # fmt: skip
def test_a_map_by_page_or_within_tiles_is_read(kernel: Callable[[AttentionCall], Tensor], sentence: str) -> None:
    found = read_out(kernel)
    assert (found.sentence, found.exact) == (sentence, True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("beyond", [one for one in BEYONDS if one not in ("packed", "zeros")])
def test_maps_lead_nowhere_beyond_a_sequence(size: int, beyond: str) -> None:
    for page, tile in [
        *((page, SAME) for page in PAGES),
        *((SAME, tile) for tile in tiles(size) if beyond != "joined"),
    ]:
        if beyond == "own size" and not (page is SAME and tile.any_size):
            continue
        for length in (1, size - 1, size, size + 1, 3 * size + 2):
            to = BlockMap(size, page, tile, beyond).of_length(length)  # type: ignore[arg-type]
            assert inside(to, length).all(), (page.to, tile.to, length)
