"""Batches of the op-level matrix: the sequences of a call, including one with the lengths from the axes.

For each value, some kernel was wrong in this batch and correct in the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

_Lens = list[tuple[int, int]]
_Batch = Callable[[int, int, int], _Lens]
"""(new tokens, cached prefix, cached prefix of a long neighbour) -> (new tokens, cached prefix) of each sequence."""

CROWD = "in a crowd"
"""Many sequences in no order, one of them with many keys, and in extend another with many new tokens."""
_QUERY_TILES = (48, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 256)


def _prefill_crowd(new: int, prefix: int, long: int) -> _Lens:
    """Mix prefill and decode: 17 to 32 sequences, one of whose new tokens just fill a tile of queries of any size, or nearly do."""
    drawn = random.Random(4099 * new + prefix)
    tile = drawn.choice(_QUERY_TILES)
    rows = tile * -(-129 // tile) + drawn.choice((-1, 0, 0, 1))
    lens = [(new, prefix), (rows, 16), (70, 12), (1, long), (16, 60), (8, 33), (2, 0)]
    lens += [(1, cached) for cached in drawn.sample(range(1, 48), 6)]
    lens += [(drawn.randrange(1, 9), drawn.randrange(24)) for _ in range(drawn.randrange(5, 19))]
    return _behind_eight(lens, (3, 2 * long + drawn.randrange(45, 180)), drawn)


def _behind_eight(lens: _Lens, longest: tuple[int, int], drawn: random.Random) -> _Lens:
    """Shuffle sequences, with the longest beyond a vector of eight lengths."""
    drawn.shuffle(lens)
    lens.insert(drawn.randrange(8, len(lens) + 1), longest)
    return lens


def _decode_crowd(new: int, prefix: int, long: int) -> _Lens:
    """Decode 17 to 40 sequences."""
    drawn = random.Random(prefix)
    lens = [(1, keys) for keys in (prefix, long // 2, 127, 77, 16, 1)]
    lens += [(1, drawn.randrange(2, 40)) for _ in range(drawn.randrange(10, 33))]
    return _behind_eight(lens, (1, long + drawn.randrange(1530, 1660)), drawn)


# The core of the matrix: alone, first, last and in the middle; after a sequence without a prefix, whose length a kernel may keep;
# and in a crowd.
CORE: dict[str, dict[str, _Batch]] = {
    "extend": {
        "one": lambda new, prefix, long: [(new, prefix)],
        "one token last": lambda new, prefix, long: [(new, prefix), (1, 33)],
        "after no prefix": lambda new, prefix, long: [(7, 0), (new, prefix)],
        CROWD: _prefill_crowd,
        "between others": lambda new, prefix, long: [(2, 0), (new, prefix), (5, 16)],
    },
    "decode": {
        "one": lambda new, prefix, long: [(1, prefix)],
        "after a short one": lambda new, prefix, long: [(1, 1), (1, prefix)],
        CROWD: _decode_crowd,
        "between others": lambda new, prefix, long: [(1, 16), (1, prefix), (1, 77)],
    },
}  # fmt: skip
WITHOUT_PREFIX = ("one", "after no prefix")
_BORDERS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129)
# Keys of sequences that just fill their last tile, where tiles have 80, 96, 112, 128, 160, 176, 192, 224, 240, 256 or 384 keys.
_TILES = (112, 160, 176, 192, 224, 240, 336, 352, 384, 480, 528, 768)
_FEWER = (0, 61, 40, 57, 4, 29, 65, 68, 50, 62, 67, 33, 59, 64, 66)
_MORE = (0, -201, 301, -31, -190, 214, -286, 5, 230, -99, -250, 17, -120, -12, -64)
SIZES, MORE = range(4, 10), range(10, 16)
"""Sizes of batches below and around a vector of eight lengths, and sizes that some calls draw from."""
GRAPHS = (16, 24, 32, 40)
"""Sizes for which engines capture graphs, the last one beyond the lanes of a warp."""


def _short(number: int, new: int, prefix: int, long: int) -> _Lens:
    """Make sequences of a few tokens; one sequence has 128 more new ones, unless all have one."""
    return [(1 + (new - 1) * (n % 2 == 0) + 128 * (n == 5 and new > 1), prefix + n) for n in range(number)]


def _as_many_new(number: int, new: int, prefix: int, long: int) -> _Lens:
    """Make sequences with equally many new tokens after different prefixes; one of the last two has several partitions."""
    return [*((new, 9 * n) for n in range(number - 2)), (new, prefix), (new, prefix + 861)]


def _of_every_remainder(new: int, prefix: int, long: int) -> _Lens:
    """Make 33 sequences whose keys leave every remainder of 16, those of up to 600 keys first, then the longer ones."""
    keys = [*(prefix - 973 + 21 * n for n in range(17)), *(prefix + 61 * n for n in range(16))]
    return [(new, count - new) for count in keys]


BATCHES: dict[str, _Batch] = {
    # Lengths that just fill a page or block, or nearly do.
    "nine at borders": lambda new, prefix, long: [
        (new, prefix), (63, 0), (127, 16), (128, 0), (16, 48), (2, 200), (31, 33), (128, 128), (5, 59)
    ],
    "seventeen at borders": lambda new, prefix, long: [(1, prefix), *((1, border) for border in _BORDERS)],
    # Sequences of several partitions: in one that follows another, where lengths differ, and in the last one.
    "two long ones": lambda new, prefix, long: [(new, prefix), (new, prefix + 861)],
    "three long ones": lambda new, prefix, long: [(new, prefix), (new, prefix + 191), (1, prefix + 264)],
    "nine long ones": lambda new, prefix, long: [
        (1, keys) for keys in (prefix, 1790, 300, 5, 700, prefix + 69, 17, 530, 901)
    ],
    "33 long ones": _of_every_remainder,
    "a chunk among long ones": lambda new, prefix, long: [(1, 1300), (new, prefix), (9, 700)],
    "among long ones": lambda new, prefix, long: [(min(new, 7), 16), (new, prefix), (min(new, 3), long)],
    # Several blocks of queries in a sequence that is not the first.
    "three chunks": lambda new, prefix, long: [(new, 0), (new, prefix), (192, 0)],
    # Keys that just fill the last tile, of any size in use: what a loop over tiles counts once too often.
    "full tiles": lambda new, prefix, long: [(new, keys - new) for keys in (new + prefix, *_TILES)],
    # As many tokens as in "powers of two", so that one can be made in the other's buffers.
    "cached powers of two": lambda new, prefix, long: [(new, prefix), (new, 512), (new, 1024), (new, 128 - 4 * new)],
    "powers of two": lambda new, prefix, long: [(new, prefix), (new, 512 - new), (new, 1024 - new), (new, 128 - new)],
    # The same two sequences, and one call in the other's buffers.
    "a shorter one first": lambda new, prefix, long: [(new, prefix), (5 * new - 4, prefix + 50)],
    "a longer one first": lambda new, prefix, long: [(5 * new - 4, prefix + 50), (new, prefix)],
    # Plans that are kept by the queries' lengths, the total of the keys and the longest sequence.
    "a short prefix first": lambda new, prefix, long: [(new, prefix), (new, prefix + 50)],
    "a long prefix first": lambda new, prefix, long: [(new, prefix + 50), (new, prefix)],
    # Rows of the block table without queries, which shift the rows of others.
    "some without new tokens": lambda new, prefix, long: [(0, 20), (3, 5), (0, 90), (0, 70), (new, prefix), (0, 9)],
    "an empty one first": lambda new, prefix, long: [(0, prefix), (new, prefix)],
    "an empty one last": lambda new, prefix, long: [(new, prefix), (new, prefix + 50), (0, prefix)],
    "no keys first": lambda new, prefix, long: [(0, 0), (new, prefix), (new, 3)],
    "no keys last": lambda new, prefix, long: [(new, prefix), (0, 0)],
    "each of another length": lambda new, prefix, long: [
        (new + (new > 1) * 13 * n, prefix + 29 * n) for n in (2, 0, 3, 1, 4)
    ],
    "parts without keys": lambda new, prefix, long: [(new, prefix), (1, -1), (new, 40), (min(new, 9), -min(new, 9))],
    "fewer keys than queries": lambda new, prefix, long: [(9, 55), (40, -39), (new, prefix), (70, -6)],
    "a single key first": lambda new, prefix, long: [(1, 0), (new, prefix)],  # as a padded row of a captured graph
    # Batches of captured graphs, beyond the lanes of a warp; and of a few sequences, which are alike, unlike or prompts alone.
    **{f"{n} short ones": partial(_short, n) for n in GRAPHS},
    **{f"{n} alike": partial(lambda n, new, prefix, long: [(new, prefix)] * n, n) for n in (*SIZES, *MORE)},
    **{f"{n} unlike": partial(lambda n, new, prefix, long: [(new, prefix + m) for m in _MORE[:n]], n) for n in (*SIZES, *MORE)},
    **{f"{n} prompts": partial(lambda n, new, prefix, long: [(new - m, prefix) for m in _FEWER[:n]], n) for n in (*SIZES, *MORE)},
    **{f"{n} with as many new tokens": partial(_as_many_new, n) for n in (*SIZES, *MORE)},
}  # fmt: skip
"""Batches of the calls beyond the core."""
