"""Aligns two sequences: the shortest edit script, by Myers (1986), "An O(ND) difference algorithm and its variations"."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

MAX_EDITS = 500
"""Most insertions and deletions that are looked for: time grows with them times the length, memory with their square."""

Tag = Literal["equal", "delete", "insert", "replace"]


class Block(NamedTuple):
    """A run of equal items, or what stands in its place: a[a1:a2] and b[b1:b2]."""

    tag: Tag
    a1: int
    a2: int
    b1: int
    b2: int


def align(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Block] | None:
    """The blocks that turn `a` into `b`, in order.

    Returns:
        None if more than `MAX_EDITS` items would have to be inserted or deleted.
    """
    start = _common(a, b, 0, 0, 1)
    end = min(_common(a, b, len(a) - 1, len(b) - 1, -1), len(a) - start, len(b) - start)
    pairs = _matches(a[start : len(a) - end], b[start : len(b) - end])
    if pairs is None:
        return None
    matches = [(i, i) for i in range(start)]
    matches += [(start + i, start + j) for i, j in pairs]
    matches += [(len(a) - end + i, len(b) - end + i) for i in range(end)]
    return _together(_blocks(matches, len(a), len(b)), a, b)


def _common(a: Sequence[Hashable], b: Sequence[Hashable], i: int, j: int, step: int) -> int:
    """Count the items that are equal from here on, forwards or backwards."""
    length = 0
    while 0 <= i < len(a) and 0 <= j < len(b) and a[i] == b[j]:
        i, j, length = i + step, j + step, length + 1
    return length


def _matches(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]] | None:
    """Indices of the items that a shortest edit script keeps."""
    furthest, history = {1: 0}, []
    for edits in range(min(len(a) + len(b), MAX_EDITS) + 1):
        history.append(dict(furthest))
        for k in range(-edits, edits + 1, 2):
            down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
            x = furthest[k + 1] if down else furthest[k - 1] + 1
            while x < len(a) and x - k < len(b) and a[x] == b[x - k]:
                x += 1
            furthest[k] = x
            if x >= len(a) and x - k >= len(b):
                return _backtrack(history, len(a), len(b))
    return None


def _backtrack(history: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    """Follow the script back from its end."""
    kept = []
    for edits in range(len(history) - 1, -1, -1):
        furthest, k = history[edits], x - y
        down = k == -edits or (k != edits and furthest[k - 1] < furthest[k + 1])
        before = k + 1 if down else k - 1
        begin = furthest[before] if edits else 0
        after = begin if down else begin + 1
        while x > after:
            x, y = x - 1, y - 1
            kept.append((x, y))
        x, y = begin, begin - before
    return kept[::-1]


def _blocks(matches: list[tuple[int, int]], rows: int, columns: int) -> list[Block]:
    blocks: list[Block] = []
    i = j = at = 0
    while at < len(matches) or i < rows or j < columns:
        if at < len(matches) and matches[at] == (i, j):
            a1, b1 = i, j
            while at < len(matches) and matches[at] == (i, j):
                i, j, at = i + 1, j + 1, at + 1
            blocks.append(Block("equal", a1, i, b1, j))
            continue
        to_i, to_j = matches[at] if at < len(matches) else (rows, columns)
        blocks.append(_block(i, to_i, j, to_j))
        i, j = to_i, to_j
    return blocks


def _together(blocks: list[Block], a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Block]:
    """Bring an insertion and a later deletion together, or the reverse, where what is between them repeats.

    Of ``xxxx`` and ``xyx``, one shortest script inserts y after the first x and deletes two of the last; a reader sees y
    in place of an x. What stands between them is equal either way, since it has the period of what is moved.
    """
    done: list[Block] = []
    for block in blocks:
        done.append(block)
        while len(done) >= 3 and (moved := _moved(done[-3], done[-2], done[-1], a, b)):
            done[-3:] = moved
            if len(done) < 3 or done[-1].tag != "equal":
                break
    return done


def _moved(first: Block, equal: Block, last: Block, a: Sequence[Hashable], b: Sequence[Hashable]) -> list[Block] | None:
    """The three blocks with the surplus of the last one moved into the first one; None if there is nothing to move."""
    if first.tag == "equal" or equal.tag != "equal" or last.tag == "equal":
        return None
    surplus = (last.a2 - last.a1) - (last.b2 - last.b1)
    deficit = (first.b2 - first.b1) - (first.a2 - first.a1)
    if surplus * deficit <= 0:
        return None
    size = min(abs(surplus), abs(deficit))
    items, start, end = (a, equal.a1, equal.a2) if surplus > 0 else (b, equal.b1, equal.b2)
    if items[start:end] != items[start + size : end + size]:
        return None
    da, db = (size, 0) if surplus > 0 else (0, size)
    parts = [
        _block(first.a1, first.a2 + da, first.b1, first.b2 + db),
        Block("equal", equal.a1 + da, equal.a2 + da, equal.b1 + db, equal.b2 + db),
        _block(last.a1 + da, last.a2, last.b1 + db, last.b2),
    ]
    return [part for part in parts if part.a2 > part.a1 or part.b2 > part.b1]


def _block(a1: int, a2: int, b1: int, b2: int) -> Block:
    return Block("insert" if a1 == a2 else "delete" if b1 == b2 else "replace", a1, a2, b1, b2)
