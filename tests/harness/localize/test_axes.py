from __future__ import annotations

from itertools import product

from assay.harness.localize.axes import by_axis, confining, holds, words

CALLS = [{"prefix": p, "head_dim": d, "data": w} for p, d, w in product(["0", "16", "128"], ["64", "128"], ["normal", "peaky"])]


def split(fails: object) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    assert callable(fails)
    return [c for c in CALLS if fails(c)], [c for c in CALLS if not fails(c)]


def test_one_axis_is_described_by_its_shorter_list() -> None:
    assert words(confining(*split(lambda c: c["head_dim"] == "128"))) == "head_dim is 128"
    assert words(confining(*split(lambda c: c["prefix"] != "0"))) == "prefix is not 0"


def test_two_axes_are_named_where_one_is_not_enough() -> None:
    failing, right = split(lambda c: c["head_dim"] == "128" and c["prefix"] == "16")
    found = confining(failing, right)
    assert words(found) == "prefix is 16 and head_dim is 128"
    assert [holds(found, c) for c in CALLS] == [c in failing for c in CALLS]


def test_no_condition_is_named_that_does_not_hold() -> None:
    assert confining(*split(lambda c: c["prefix"] == "16" or c["head_dim"] == "128")) == []
    assert confining(CALLS, []) == []
    assert confining([], CALLS) == []


def test_nothing_is_said_of_an_axis_of_which_a_value_was_not_tried() -> None:
    failing, right = split(lambda c: c["head_dim"] == "128")
    other = [CALLS[0] | {"head_dim": "256"}]
    assert confining(failing, right, other) == []
    assert confining(failing, right, CALLS) == confining(failing, right)
    assert {axis.name: axis.unknown for axis in by_axis(failing, right, other) if axis.unknown} == {"head_dim": ("256",)}
