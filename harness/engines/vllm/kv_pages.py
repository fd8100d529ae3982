"""K and V of whole sequences from vLLM's pages, as one packed call needs them.

On a GPU a page has K and V of a token side by side. vLLM's CPU backend stores them in an order that depends on the instruction set,
the dtype and the page size. It is not coded here: vLLM's own operator, given numbers to store, shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from assay.harness.attention.call import KernelRefused, StoredKV

# Dtypes of pages of 8 bits, by vLLM's ``--kv-cache-dtype``.
_STORED = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Digits up to 7 are exact in all dtypes of K and V, also in those of 8 bits.
_BASE = 8

Store = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Stores K and V, [page, 1, head_dim], in the two halves of a page, [1, 1, page, head_dim]."""


def places_in(
    store: Store, page: int, dim: int, dtype: torch.dtype, stored: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Find the place of each number of K and of V in its half of a page, by storing the digits of its index.

    Args:
        store: stores K and V in a page.
        page: tokens per page.
        dim: numbers per token and head.
        dtype: dtype of K and V.
        stored: dtype of the page's numbers if they have fewer bits, or None.

    Returns:
        For K and V: flat index into the half, int64 [page, dim].

    Raises:
        KernelRefused: the page does not hold each number once.
    """
    count = page * dim
    halves = torch.zeros(1, 1, 2 * page, dim, dtype=torch.uint8 if stored else dtype).chunk(2, dim=2)
    index, weight = torch.arange(count).view(page, 1, dim), 1
    seen = [torch.zeros(count, dtype=torch.int64) for _ in halves]
    while weight < count:
        digits = (index // weight % _BASE).to(dtype)
        store(digits, digits.clone(), *halves)
        for total, half in zip(seen, halves, strict=True):
            total += (half.view(stored) if stored else half).float().reshape(count).long() * weight
        weight *= _BASE
    for total in seen:
        if total.sort().values.ne(torch.arange(count)).any():
            raise KernelRefused(f"vLLM's pages of {page} tokens with {dim} numbers each do not hold K and V as given")
    k, v = (total.argsort().view(page, dim) for total in seen)
    return k, v


@cache
def _cpu_places(
    isa: str, page: int, dim: int, dtype: torch.dtype, stored: torch.dtype | None, name: str
) -> tuple[Tensor, Tensor]:
    """Find the places of `places_in` for vLLM's operator on a CPU, as its backend calls it."""
    from vllm import _custom_ops as ops

    def store(k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(
            k, v, keys, values, torch.arange(page), isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=name
        )

    return places_in(store, page, dim, dtype, stored)


def located(
    table: Tensor, first: Sequence[int], lens: Sequence[int], page: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the page, and the place in it, of some keys of each sequence, int64 [sum(lens)] each.

    Args:
        table: pages of each sequence, int [batch, pages].
        first: the first key of each, counted from 0.
        lens: keys of each.
        page: tokens per page.
        device: torch device of the pages.
    """
    where = [torch.arange(start, start + length) for start, length in zip(first, lens, strict=True)]
    pages = torch.cat([row.cpu()[at // page] for row, at in zip(table, where, strict=True)]).long()
    return pages.to(device), (torch.cat(where) % page).to(device)


@dataclass(frozen=True)
class Pages:
    """The pages of a layer.

    Attributes:
        cache: [pages, kv heads, page, 2 * head_dim], of any strides; uint8 if it stores FP8.
        places: K's and V's place of each number in its half of a page and head, or None if both lie side by side in the last axis.
        stored: dtype of the numbers if they have fewer bits than q, or None.
        scales: factors of stored K and V.
    """

    cache: Tensor
    places: tuple[Tensor, Tensor] | None
    stored: torch.dtype | None = None
    scales: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def of(cls, layer: Any, cache: Tensor, dtype: torch.dtype) -> Pages:
        """Return the pages of a vLLM layer.

        Args:
            layer: vLLM's layer.
            cache: its KV cache.
            dtype: dtype of q.

        Raises:
            KernelRefused: their layout is not known.
        """
        name = str(getattr(layer.impl, "kv_cache_dtype", "auto"))
        stored = _STORED.get(name)
        if cache.dim() != 4 or cache.shape[-1] % 2 or (stored is None and cache.dtype != dtype):
            raise KernelRefused(
                f"the KV cache is {cache.dtype} {list(cache.shape)} ({name}), and q is {dtype}; expected pages with K and V in the "
                "last axis"
            )
        scales = (float(getattr(layer, "_k_scale_float", 1.0)), float(getattr(layer, "_v_scale_float", 1.0)))
        places = None
        if cache.device.type == "cpu":
            places = _cpu_places(layer.isa, cache.shape[2], cache.shape[3] // 2, dtype, stored, name)
        return cls(cache, places, stored, scales if stored else (1.0, 1.0))

    def gathered(
        self, table: Tensor, first: Sequence[int], lens: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, StoredKV | None]:
        """Copy K and V of some keys of each sequence, one sequence after the other.

        Args:
            table: pages of each sequence, int [batch, pages].
            first: the first key of each, counted from 0.
            lens: keys of each.
            dtype: dtype of q, in which stored numbers are returned too.

        Returns:
            K and V, [sum(lens), kv heads, head_dim], and their stored form if it has fewer bits.
        """
        k, v = self._numbers(*located(table, first, lens, self.cache.shape[2], self.cache.device))
        if self.stored is None:
            return k, v, None
        k, v = k.view(self.stored), v.view(self.stored)
        scales = [torch.full((1, 1, 1), scale, device=k.device) for scale in self.scales]
        read = partial(_read, dtype=dtype)
        return read(k, scales[0]), read(v, scales[1]), StoredKV(k, v, *scales)

    def _numbers(self, pages: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the numbers of tokens in their pages, [tokens, kv heads, head_dim] each."""
        count, heads, page, both = self.cache.shape
        if self.places is None:
            k, v = self.cache[pages, :, offsets].chunk(2, dim=-1)
            return k.contiguous(), v.contiguous()
        halves = self.cache.view(count, heads, 2, page * both // 2)
        at, head = pages[:, None, None], torch.arange(heads)[None, :, None]
        k, v = (halves[at, head, half, place[offsets][:, None]] for half, place in enumerate(self.places))
        return k, v


def _read(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (stored.float() * scale).to(dtype)
