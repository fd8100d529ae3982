"""Sets of lengths, as ranges: which lengths calls had, which they stand for, and which are missing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from assay.evals.envelope_load import BORDER
from assay.harness.text import listed

Ranges = tuple[tuple[int, int], ...]
"""Disjoint ranges of whole numbers, ascending; both ends belong to a range, and between two ranges a number is missing."""


def ranges_of(lengths: Iterable[int]) -> Ranges:
    """Group the lengths into ranges."""
    ordered = sorted(set(lengths))
    if not ordered:
        return ()
    ends = [(length, following) for length, following in pairwise(ordered) if following != length + 1]
    return tuple(zip([ordered[0], *(b for _, b in ends)], [*(a for a, _ in ends), ordered[-1]], strict=True))


def in_all(sets: Sequence[Ranges]) -> Ranges:
    """Intersect the sets of lengths; none of no set."""
    common = [_lengths(lengths) for lengths in sets]
    return ranges_of(set.intersection(*common)) if common else ()


def stood_for(met: Ranges, wanted: Sequence[int]) -> Ranges:
    """Return the lengths that were met, and those that they stand for.

    A block of `BORDER` lengths was met where all its `wanted` ones were; between two wanted lengths of one block lies no border.

    Args:
        met: lengths of calls.
        wanted: the border points of the lengths that calls should have, ascending.
    """
    known = _lengths(met)
    covered = set(known)
    for block in {(length - 1) // BORDER for length in wanted}:
        points = [length for length in wanted if (length - 1) // BORDER == block]
        if known.issuperset(points):
            covered.update(range(max(block * BORDER + 1, wanted[0]), min((block + 1) * BORDER, wanted[-1]) + 1))
    return ranges_of(covered)


def gaps(met: Ranges, wanted: Sequence[int]) -> Ranges:
    """Find the lengths between the first and the last wanted one for which no length that was met stands."""
    if not wanted:
        return ()
    return ranges_of(set(range(wanted[0], wanted[-1] + 1)) - _lengths(stood_for(met, wanted)))


def in_words(ranges: Ranges, most: int = 6) -> str:
    """Describe ranges, for example "1 to 200 and 577 to 584"; "none" if there is none. Of more than `most` the last are counted."""
    words = [f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in ranges]
    if len(words) > most:
        words = [*words[: most - 1], f"{len(words) - most + 1} more ranges to {ranges[-1][1]:,}"]
    return listed(words) or "none"


def _lengths(ranges: Ranges) -> set[int]:
    return {length for first, last in ranges for length in range(first, last + 1)}
