"""Finds questions that are likely to be answered alike, from one template or with nearly the same text, to draw them as one unit.

Two texts are alike if they share at least half of their shingles (Jaccard, Broder 1997). A shingle is four consecutive words in
lower case, with every number replaced by the same word, because templates differ in names and numbers. MinHash with banding finds
the pairs (Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, chapter 3), so the time grows with the number of texts, not of
pairs. Paraphrases in other words are not found.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

# Words in a shingle. Questions on one subject share three words by chance; few templates with a name in each clause share five.
_SHINGLE = 4
# Shorter texts are never alike, since half of so few shingles can match by chance.
_LEAST_WORDS = 8
# Smallest share of common shingles for two texts to be alike.
_ALIKE = 0.5
# A pair at the threshold shares a band with a probability of 0.986, one of 0.1 with 0.03; pairs are then compared exactly.
_BANDS, _ROWS = 32, 3
_PRIME = (1 << 61) - 1
_WORD = re.compile(r"\d+(?:[.,]\d+)+|[^\W_]+")


def alike(texts: Sequence[str]) -> list[int]:
    """Return, for each text, the index of the first text that it is like, directly or through others, or its own index."""
    sets = [_shingles(text) for text in texts]
    root = list(range(len(texts)))

    def find(at: int) -> int:
        while root[at] != at:
            root[at] = root[root[at]]
            at = root[at]
        return at

    for first, second in _candidates(sets):
        a, b = find(first), find(second)
        if a != b and len(sets[first] & sets[second]) >= _ALIKE * len(sets[first] | sets[second]):
            root[max(a, b)] = min(a, b)
    return [find(at) for at in range(len(texts))]


def _shingles(text: str) -> frozenset[int]:
    words = [
        "0" if word.replace(".", "").replace(",", "").isdigit() else word for word in _WORD.findall(text.casefold())
    ]
    if len(words) < _LEAST_WORDS:
        return frozenset()
    parts = (" ".join(words[at : at + _SHINGLE]) for at in range(len(words) - _SHINGLE + 1))
    return frozenset(int.from_bytes(hashlib.blake2b(part.encode(), digest_size=4).digest()) for part in parts)


def _candidates(sets: Sequence[frozenset[int]]) -> Iterator[tuple[int, int]]:
    """Yield pairs that share a band of their signatures: each text with the one before it, so a bucket costs its size."""
    buckets: dict[tuple[int, bytes], int] = {}
    factors, offsets = np.random.default_rng(0).integers(1, _PRIME, (2, _BANDS * _ROWS), dtype=np.uint64)
    for index, shingles in enumerate(sets):
        if not shingles:
            continue
        signature = _signature(shingles, factors, offsets)
        for band in range(_BANDS):
            key = band, signature[band * _ROWS : (band + 1) * _ROWS].tobytes()
            if key in buckets:
                yield buckets[key], index
            buckets[key] = index


def _signature(
    shingles: frozenset[int], factors: NDArray[np.uint64], offsets: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Compute each hash function's minimum over the shingles, [bands x rows]."""
    values = np.fromiter(shingles, np.uint64, len(shingles))
    # Multiplication modulo 2^64 by an odd factor. Only the upper bits are good hashes.
    hashes = ((factors | np.uint64(1))[:, None] * values + offsets[:, None]) >> np.uint64(32)
    return np.asarray(hashes.min(1), np.uint64)
