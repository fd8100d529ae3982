from __future__ import annotations

from itertools import product

from assay.harness.localize.axes import Split, confining, holds

CALLS = [{"prefix": p, "head_dim": d, "data": w} for p, d, w in product(["0", "16", "128"], ["64", "128"], ["normal", "peaky"])]


def split(fails: object) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    assert callable(fails)
    return [c for c in CALLS if fails(c)], [c for c in CALLS if not fails(c)]


def test_one_axis_is_named_where_it_is_enough() -> None:
    assert confining(*split(lambda c: c["head_dim"] == "128")) == [Split("head_dim", ("128",), ("64",))]
    assert confining(*split(lambda c: c["prefix"] != "0")) == [Split("prefix", ("16", "128"), ("0",))]


def test_two_axes_are_named_where_one_is_not_enough() -> None:
    failing, right = split(lambda c: c["head_dim"] == "128" and c["prefix"] == "16")
    found = confining(failing, right)
    assert [(axis.name, axis.inside) for axis in found] == [("prefix", ("16",)), ("head_dim", ("128",))]
    assert [holds(found, c) for c in CALLS] == [c in failing for c in CALLS]


def test_no_condition_is_named_that_does_not_hold() -> None:
    assert confining(*split(lambda c: c["prefix"] == "16" or c["head_dim"] == "128")) == []
    assert confining(CALLS, []) == []
    assert confining([], CALLS) == []
