from __future__ import annotations

from itertools import combinations, product

from assay.harness.attention.covering import AxisPart, covering

AXES = {"a": (1, 2, 3, 4), "b": ("x", "y", "z"), "c": (0, 5, 7), "d": (False, True)}
PAIRS = [*combinations(map(AxisPart, AXES), 2)]


def test_all_pairs_need_few_rows() -> None:
    rows = covering(AXES, PAIRS)
    for a, b in combinations(AXES, 2):
        assert {(row[a], row[b]) for row in rows} == set(product(AXES[a], AXES[b]))
    assert 12 <= len(rows) <= 15


def test_strength_may_differ_and_a_value_may_count_as_a_coarser_word() -> None:
    some = AxisPart("c", bool)
    rows = covering(AXES, [*PAIRS, (AxisPart("a"), AxisPart("b"), some)])
    assert {(row["a"], row["b"], bool(row["c"])) for row in rows} == set(product(AXES["a"], AXES["b"], (False, True)))
    assert 24 <= len(rows) <= 26


def test_what_is_covered_already_is_not_wanted_again() -> None:
    rows = covering(AXES, PAIRS)
    assert covering(AXES, PAIRS, covered=rows) == []
    assert len(covering(AXES, PAIRS, covered=rows[:6])) <= len(rows) - 4


def test_an_axis_with_one_value_is_part_of_every_row() -> None:
    assert [row["e"] for row in covering({"e": (9,), "a": (1, 2)}, [(AxisPart("a"), AxisPart("e"))])] == [9, 9]


def test_a_seed_determines_the_rows() -> None:
    assert covering(AXES, PAIRS, 3) == covering(AXES, PAIRS, 3)
    assert covering(AXES, PAIRS, 3) != covering(AXES, PAIRS, 4)
