"""The queries of a call that are compared with the truth: all of a small call, and a stratified sample of a large one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from assay.harness.conditions import POSITION

MAX_ROWS = 128
"""Most queries of a call that are compared with the truth, unless its sequences alone need more."""
BLOCK = 64
"""Kernels compute in blocks of a multiple of this many queries or keys; what is wrong at a border is wrong there."""
_BORDER_SHARE = 1 / 4


def sampled_rows(new: Sequence[int], prefix: Sequence[int], random: np.random.Generator) -> NDArray[np.int64]:
    """Choose the rows of a call that are compared with the truth, ascending.

    All rows if there are at most `MAX_ROWS`. Otherwise of each sequence the first and the last query and one of each position
    bucket; then queries at block borders, counted from the first new token and from the first token of the prefix; then any.

    Args:
        new: new tokens per sequence.
        prefix: cached prefix per sequence.
        random: draws what is not certain to be chosen.
    """
    total = sum(new)
    if total <= MAX_ROWS:
        return np.arange(total)
    starts = np.concatenate([[0], np.cumsum(new)[:-1]])
    certain = [row for start, length in zip(starts, new, strict=True) for row in _certain(int(start), length, random)]
    position = np.concatenate([np.arange(length) for length in new])
    borders = np.flatnonzero(_at_border(position) | _at_border(position + np.repeat(prefix, new)))
    room = max(0, MAX_ROWS - len(set(certain)))
    at_borders = random.choice(borders, min(len(borders), int(_BORDER_SHARE * room)), replace=False)
    chosen = np.union1d(certain, at_borders)
    others = np.setdiff1d(np.arange(total), chosen)
    anywhere = random.choice(others, min(len(others), max(0, MAX_ROWS - len(chosen))), replace=False)
    return np.union1d(chosen, anywhere).astype(np.int64)


def _certain(start: int, length: int, random: np.random.Generator) -> list[int]:
    """Return the first and the last query of a sequence, and one of each position bucket; `start` is the row of its first query."""
    edges = [edge for edge in POSITION.starts if edge < length] + [length]
    drawn = [int(random.integers(low, high)) for low, high in pairwise(edges)]
    return sorted({start, start + length - 1, *(start + position for position in drawn)})


def _at_border(position: NDArray[np.int64]) -> NDArray[np.bool_]:
    return np.isin(position % BLOCK, (0, BLOCK - 1))
