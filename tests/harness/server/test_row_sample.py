"""Which queries are compared with the truth."""

from __future__ import annotations

import numpy as np
import pytest

from assay.harness.evidence.shadow_errors import condition_numbers
from assay.harness.server.truth_sums import BLOCK, MAX_ROWS, sampled_rows


def draw(new: list[int], prefix: list[int], seed: int = 0) -> list[int]:
    rows = sampled_rows(new, prefix, np.random.default_rng(seed))
    assert sorted(set(rows.tolist())) == rows.tolist()
    assert 0 <= rows[0] <= rows[-1] < sum(new)
    return rows.tolist()


def test_all_queries_of_a_small_call() -> None:
    assert draw([3, 1, 60], [0, 5, 2]) == list(range(64))
    assert len(draw([MAX_ROWS], [0])) == MAX_ROWS


@pytest.mark.parametrize(("new", "prefix"), [([3000], [0]), ([1000, 700, 5], [33, 0, 500]), ([200] * 16, [17] * 16)])
def test_a_sample_of_a_large_call_has_every_condition_and_every_end(new: list[int], prefix: list[int]) -> None:
    rows = draw(new, prefix)
    conditions = condition_numbers("extend", new, prefix)
    assert set(conditions[rows]) == set(conditions)
    ends = np.cumsum(new)
    assert {0, *ends[:-1], *(ends - 1)} <= set(rows)
    assert MAX_ROWS <= len(rows) <= max(MAX_ROWS, 7 * len(new))


def test_block_borders_are_over_represented_and_the_draw_follows_the_seed() -> None:
    rows = draw([3000], [7])
    at_border = [row for row in rows if row % BLOCK in (0, BLOCK - 1) or (row + 7) % BLOCK in (0, BLOCK - 1)]
    assert len(at_border) > 0.2 * len(rows) > 2 * 4 / BLOCK * len(rows)
    assert draw([3000], [7]) == rows != draw([3000], [7], seed=1)


def test_every_sequence_of_a_large_decode_batch() -> None:
    assert draw([1] * 300, [9] * 300) == list(range(300))
