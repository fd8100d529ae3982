"""Questions that are likely to be answered alike: of one template, or nearly the same text. They are drawn together, as one unit.

Two texts are alike if at least half of their shingles are the same (Jaccard, Broder 1997); a shingle is four words in a row, in
lower case, with every number as one word: a template is filled in with names and numbers. Pairs are found by MinHash with banding
(Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, chapter 3): the time grows with the number of texts, not of pairs.
Paraphrases in other words are not found.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

# Words of a shingle: three are shared by chance in questions of one subject, five by few templates with a name in each clause.
_SHINGLE = 4
# A shorter text is alike to none: half of so few shingles are shared by chance.
_LEAST_WORDS = 8
# Share of shingles from which on two texts are alike.
_ALIKE = 0.5
# A pair at the threshold shares a band with a probability of 0.986, one of 0.1 with 0.03; pairs are then compared exactly.
_BANDS, _ROWS = 32, 3
_PRIME = (1 << 61) - 1
_WORD = re.compile(r"\d+(?:[.,]\d+)+|[^\W_]+")


def alike(texts: Sequence[str]) -> list[int]:
    """Return each text's index of the first text that it is alike to, directly or through others; its own if there is none."""
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
    """Yield pairs that share a band of their signatures: each text with the last one before it, so a bucket costs its size."""
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
    """Compute the least of each hash function over the shingles, [bands x rows]."""
    values = np.fromiter(shingles, np.uint64, len(shingles))
    # Multiplication modulo 2^64 with an odd factor, of which the upper bits count.
    hashes = ((factors | np.uint64(1))[:, None] * values + offsets[:, None]) >> np.uint64(32)
    return np.asarray(hashes.min(1), np.uint64)
