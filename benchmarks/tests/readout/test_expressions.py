"""Integer expressions, and the search for the cheapest one that gives what was seen."""

from __future__ import annotations

import numpy as np
import pytest

from assay.harness.readout.edges import Amount, Search, Sum, amounts_of

RANDOM = np.random.default_rng(3)
TABLE = {name: RANDOM.integers(1, 300, 60) for name in ("prefix", "new", "i", "seq", "first_total", "most_new")}
TABLE["total"] = TABLE["prefix"] + TABLE["new"]
PLAIN = tuple(Amount(name, cost=0.2) for name in ("prefix", "new", "i", "total", "most_new"))
SEARCH = Search(amounts_of((("prefix", 0.2), ("new", 0.2), ("total", 0.2))), PLAIN, PLAIN)


def up(x: np.ndarray, size: int) -> np.ndarray:
    return -(-x // size) * size


@pytest.mark.parametrize(
    ("amount", "value"),
    [
        (Amount("new"), 21), (Amount("new", "up", 16), 32), (Amount("new", "down", 16), 16), (Amount("new", "mod", 16), 5),
        (Amount("new", "gap", 16), 11), (Amount("new", times="seq"), 63),
    ],
)  # fmt: skip
def test_an_amount_is_rounded_or_multiplied(amount: Amount, value: int) -> None:
    assert amount.of({"new": np.array([21]), "seq": np.array([3])}).tolist() == [value]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (TABLE["prefix"] + 1, "prefix + 1"),
        (TABLE["prefix"] + -TABLE["new"] % 16, "prefix + (-new mod 16)"),
        (TABLE["total"] - up(TABLE["prefix"], 64), "total - (prefix rounded up to 64)"),
        ((TABLE["prefix"] + TABLE["i"] + 1) // 32 * 32 - 1, "((prefix + i + 1) rounded down to 32) - 1"),
        (TABLE["i"] + TABLE["total"] - TABLE["most_new"], "i + total - the largest new of the batch"),
        (TABLE["i"] + TABLE["total"] + TABLE["most_new"], "i + total + the largest new of the batch"),
    ],
    ids=["one", "two", "difference", "rounded sum", "three", "three that are added"],
)
def test_the_sum_that_gives_a_target_is_found(target: np.ndarray, words: str) -> None:
    found = SEARCH(TABLE, target)
    assert words in [one.words for one in found]
    assert all((one.of(TABLE) == target).all() for one in found)
    assert [one.cost for one in found] == sorted(one.cost for one in found)


def test_no_sum_gives_numbers_at_random() -> None:
    assert not SEARCH(TABLE, RANDOM.integers(0, 300, 60))


def test_blocks_count_a_sum() -> None:
    blocks = Sum(((1, Amount("total", "up", 64)), (-1, Amount("prefix", "up", 64))), block=64)
    assert (blocks.of(TABLE) == (up(TABLE["total"], 64) - up(TABLE["prefix"], 64)) // 64).all()
    assert blocks.words == "((total rounded up to 64) - (prefix rounded up to 64)) / 64"


def test_a_stride_is_said_with_the_index_of_the_sequence() -> None:
    assert Sum(((1, Amount("first_total", times="seq")),)).words == "b x (total of the first sequence)"
