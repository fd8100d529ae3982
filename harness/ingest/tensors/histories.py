"""The contents of the KV cache: k and v of a cached prefix, put together from the passes that computed it.

A prefix belongs to the same request, or, where a radix cache served it, to an earlier one that began with the same tokens. Which
one cannot be read from a dump, but it can be checked: only the right k and v give the output that was dumped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from assay.harness.ingest.tensors.forward_passes import DumpedPass, SequencePart

_MAX_DONORS = 32
"""Distinct prefixes that are tried for one sequence, the latest first."""


CachedRows = tuple[DumpedPass, slice]
"""Rows of one pass."""


class Histories:
    """Every request that a dump has shown so far: its id, and all of its tokens as rows of passes."""

    def __init__(self) -> None:
        self._all: list[tuple[str, list[CachedRows]]] = []

    def prefixes(self, part: SequencePart) -> Iterator[list[CachedRows]]:
        """Yield the possible cached prefixes of a sequence, distinct, the likeliest first: its own request, then others."""
        if not part.prefix:
            yield []
            return
        own = [pieces for request, pieces in self._all if part.request and request == part.request]
        every = [pieces for _, pieces in reversed(self._all)]
        exact = [pieces for pieces in every if _length(pieces) == part.prefix and not part.request]
        seen: set[bytes] = set()
        for pieces in (*own, *exact, *every):
            if _length(pieces) < part.prefix:
                continue
            prefix = _first(pieces, part.prefix)
            told = _fingerprint(prefix)
            if told not in seen:
                seen.add(told)
                yield prefix
            if len(seen) == _MAX_DONORS:
                return

    def add(self, part: SequencePart, prefix: list[CachedRows], computed: DumpedPass) -> None:
        """Remember a sequence's new tokens after its prefix."""
        if part.request:
            self._all = [
                (request, pieces)
                for request, pieces in self._all
                if request != part.request or _length(pieces) > part.prefix + part.new
            ]
        self._all.append((part.request, [*prefix, (computed, part.rows)]))


def _length(pieces: list[CachedRows]) -> int:
    return sum(rows.stop - rows.start for _, rows in pieces)


def _first(pieces: list[CachedRows], tokens: int) -> list[CachedRows]:
    """List the pieces of the first tokens."""
    leading: list[CachedRows] = []
    for computed, rows in pieces:
        if tokens <= 0:
            break
        taken = slice(rows.start, min(rows.stop, rows.start + tokens))
        leading.append((computed, taken))
        tokens -= taken.stop - taken.start
    return leading


def _fingerprint(pieces: list[CachedRows]) -> bytes:
    """Hash tokens, equal for equal ones: their ids, or, without them, the first layer's k, which no earlier token changes."""
    told = hashlib.sha256()
    for computed, rows in pieces:
        layer = computed.layers[min(computed.layers)]
        data = computed.ids[rows] if computed.ids is not None else layer.k[rows]
        told.update(data.contiguous().view(torch.uint8).numpy().tobytes())
    return told.digest()


def keys_values(pieces: list[CachedRows], layer: int) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return k and v of some pieces in one layer; None if a pass did not dump that layer."""
    if any(layer not in computed.layers for computed, _ in pieces):
        return None
    parts = [(computed.layers[layer].k[rows], computed.layers[layer].v[rows]) for computed, rows in pieces]
    return [k for k, _ in parts], [v for _, v in parts]


def choose(
    candidates: Iterator[list[CachedRows]], fits: Callable[[list[CachedRows]], bool | None]
) -> tuple[list[CachedRows] | None, str]:
    """Choose the prefix that a sequence had.

    Args:
        candidates: what it may have been.
        fits: whether a prefix gives the dumped output; None if no output was dumped.

    Returns:
        The prefix, or None and why not.
    """
    tried = list(candidates)
    if not tried:
        return None, "k and v of its cached prefix are not in the dump"
    if not tried[0]:  # no cached prefix: nothing to choose
        return [], ""
    if len(tried) == 1 and fits(tried[0]) is not False:
        return tried[0], ""
    verdicts = [fits(history) for history in tried]
    if None in verdicts:
        return (
            None,
            f"{len(tried)} earlier requests could have left its cached prefix, and no output was dumped that shows which",
        )
    right = [history for history, good in zip(tried, verdicts, strict=True) if good]
    if not right:
        return None, f"none of the {len(tried)} prefixes in the dump gives the output that was dumped"
    return right[0], ""
