"""The alignment against the longest common subsequence by dynamic programming, which is slow and plain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from assay.harness.ingest.trace import align as module
from assay.harness.ingest.trace.align import align

WORDS = st.text("abc", max_size=12)


def longest_common(a: str, b: str) -> int:
    rows = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            rows[i + 1][j + 1] = rows[i][j] + 1 if x == y else max(rows[i][j + 1], rows[i + 1][j])
    return rows[-1][-1]


@given(WORDS, WORDS)
def test_blocks_are_a_shortest_script(a: str, b: str) -> None:
    blocks = align(a, b)
    assert blocks is not None
    i = j = kept = 0
    for block in blocks:
        assert (block.a1, block.b1) == (i, j)
        i, j = block.a2, block.b2
        if block.tag == "equal":
            assert a[block.a1 : i] == b[block.b1 : j]
            kept += i - block.a1
        else:
            assert block.tag == ("insert" if block.a1 == i else "delete" if block.b1 == j else "replace")
    assert (i, j) == (len(a), len(b))
    assert kept == longest_common(a, b)


def test_an_insertion_and_a_deletion_in_what_repeats_become_a_replacement() -> None:
    assert align("xxxxxxxz", "xyxxxxw") == [
        ("equal", 0, 1, 0, 1),
        ("replace", 1, 2, 1, 2),
        ("equal", 2, 6, 2, 6),
        ("replace", 6, 8, 6, 7),
    ]
    assert align("xyxxxxw", "xxxxxxxz") == [
        ("equal", 0, 1, 0, 1),
        ("replace", 1, 2, 1, 2),
        ("equal", 2, 6, 2, 6),
        ("replace", 6, 7, 6, 8),
    ]


def test_more_edits_than_are_looked_for() -> None:
    many = module.MAX_EDITS
    assert align(range(many), range(many, 2 * many)) is None
    assert align(range(100 * many), range(1, 100 * many)) is not None
