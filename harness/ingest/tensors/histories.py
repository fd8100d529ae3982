"""The contents of the KV cache: k and v of a cached prefix, put together from the passes that computed it.

A prefix belongs to the same request, or, where a radix cache served it, to an earlier one that began with the same tokens. Which
one cannot be read from a dump, but it can be checked: only the right k and v give the output that was dumped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from assay.harness.ingest.tensors.forward_passes import DumpedPass, LayerCall, SequencePart

_MAX_DONORS = 32
"""Distinct prefixes that are tried for one sequence, the latest first."""


@dataclass(frozen=True)
class CachedRows:
    """Rows of one pass."""

    layers: dict[int, LayerCall]
    ids: Tensor | None
    rows: slice

    @property
    def length(self) -> int:
        """Tokens."""
        return int(self.rows.stop - self.rows.start)


@dataclass
class RequestHistory:
    """All tokens of one request so far, as pieces of passes."""

    request: str
    pieces: list[CachedRows] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens."""
        return sum(piece.length for piece in self.pieces)

    def first(self, tokens: int) -> list[CachedRows]:
        """List the pieces of its first tokens."""
        found: list[CachedRows] = []
        for piece in self.pieces:
            if tokens <= 0:
                break
            take = min(piece.length, tokens)
            found.append(CachedRows(piece.layers, piece.ids, slice(piece.rows.start, piece.rows.start + take)))
            tokens -= take
        return found


class Histories:
    """Every request that a dump has shown so far."""

    def __init__(self) -> None:
        self._all: list[RequestHistory] = []

    def prefixes(self, part: SequencePart) -> Iterator[list[CachedRows]]:
        """Yield the possible cached prefixes of a sequence, distinct, the likeliest first: its own request, then others."""
        if not part.prefix:
            yield []
            return
        own = [history for history in self._all if part.request and history.request == part.request]
        exact = [history for history in reversed(self._all) if history.length == part.prefix and not part.request]
        seen: set[bytes] = set()
        for history in (*own, *exact, *reversed(self._all)):
            if history.length < part.prefix:
                continue
            pieces = history.first(part.prefix)
            told = _fingerprint(pieces)
            if told not in seen:
                seen.add(told)
                yield pieces
            if len(seen) == _MAX_DONORS:
                return

    def add(self, part: SequencePart, prefix: list[CachedRows], computed: DumpedPass) -> None:
        """Remember a sequence's new tokens after its prefix."""
        pieces = [*prefix, CachedRows(computed.layers, computed.ids, part.rows)]
        if part.request:
            self._all = [
                history
                for history in self._all
                if history.request != part.request or history.length > part.prefix + part.new
            ]
        self._all.append(RequestHistory(part.request, pieces))


def _fingerprint(pieces: list[CachedRows]) -> bytes:
    """Hash tokens, equal for equal ones: their ids, or, without them, the first layer's k, which no earlier token changes."""
    told = hashlib.sha256()
    for piece in pieces:
        layer = piece.layers[min(piece.layers)]
        data = piece.ids[piece.rows] if piece.ids is not None else layer.k[piece.rows]
        told.update(data.contiguous().view(torch.uint8).numpy().tobytes())
    return told.digest()


def keys_values(pieces: list[CachedRows], layer: int) -> tuple[list[Tensor], list[Tensor]] | None:
    """Return k and v of some pieces in one layer; None if a pass did not dump that layer."""
    if any(layer not in piece.layers for piece in pieces):
        return None
    parts = [(piece.layers[layer].k[piece.rows], piece.layers[layer].v[piece.rows]) for piece in pieces]
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
    right = [one for one, good in zip(tried, verdicts, strict=True) if good]
    if not right:
        return None, f"none of the {len(tried)} prefixes in the dump gives the output that was dumped"
    return right[0], ""
