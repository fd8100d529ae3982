"""Rules that are mined from tables whose rule is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from assay.harness.readout.mining import (
    _MAX_EXAMPLES,
    ALWAYS,
    Condition,
    Flags,
    Literal,
    Table,
    Term,
    mine,
)

A, B, C = Term("a"), Term("b"), Term("c")


def table(count: int = 400, most: int = 30, names: str = "abc", seed: int = 0) -> dict[str, NDArray[np.int64]]:
    draw = np.random.default_rng(seed)
    return {name: draw.integers(0, most, count) for name in names}


def conditions(examples: Table, positive: Flags, terms: Sequence[Term] = (A, B, C)) -> list[Condition]:
    """What is mined; every condition is exact."""
    found = mine(examples, positive, terms)
    for one in found:
        np.testing.assert_array_equal(one.holds(examples), positive, str(one))
    return found


def test_a_term_counts_in_blocks_before_it_subtracts() -> None:
    examples = {"a": np.array([0, 15, 16, 40]), "b": np.array([0, 1, 31, 64])}
    assert Term("a").of(examples).tolist() == [0, 15, 16, 40]
    assert Term("a", block=16).of(examples).tolist() == [0, 0, 1, 2]
    assert Term("a", "b", block=16).of(examples).tolist() == [0, 0, 0, -2]
    assert Term("a", "b", block=16, modulo=3).of(examples).tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(("op", "holds"), [("==", [0, 1, 0]), ("!=", [1, 0, 1]), (">=", [0, 1, 1]), ("<", [1, 0, 0])])
def test_a_literal_compares(op: str, holds: list[int]) -> None:
    assert Literal(A, op, 5).holds({"a": np.array([4, 5, 6])}).tolist() == holds  # type: ignore[arg-type]


def test_a_condition_without_literals_always_holds() -> None:
    examples = table(5)
    assert ALWAYS.holds(examples).all()
    assert not Condition((), negated=True).holds(examples).any()


@pytest.mark.parametrize("op", ["==", "!=", ">=", "<"])
def test_a_literal_is_found_again(op: str) -> None:
    examples = table()
    term = Term("a", words=True) if op == "!=" else A
    examples["a"] %= 10  # a "!=" is sought only where values are few
    planted = Literal(term, op, 4)  # type: ignore[arg-type]
    found = conditions(examples, planted.holds(examples), (term, B, C))
    assert found[0].literals == (planted,)


@given(st.integers(0, 9), st.integers(1, 29), st.sampled_from(["==", ">=", "<"]))
def test_what_is_found_is_exact_and_never_dearer_than_what_was_planted(seed: int, value: int, op: str) -> None:
    examples = table(60, seed=seed)
    planted = Literal(A, op, value)  # type: ignore[arg-type]
    positive = planted.holds(examples)
    if positive.any():
        found = conditions(examples, positive)
        assert found
        assert found[0].cost <= Condition((planted,)).cost


@pytest.mark.parametrize(
    ("rule", "literals"),
    [
        (lambda t: (t["a"] >= 8) & (t["b"] < 16), 2),
        (lambda t: (t["a"] >= 8) & (t["b"] < 16) & (t["c"] == 4), 3),
        (lambda t: (t["a"] - t["b"] >= 4) & (t["c"] % 4 == 1), 2),
    ],
    ids=["two", "three", "differences and residues"],
)
def test_a_conjunction_of_as_few_literals_as_possible_is_found(rule: Callable[[Table], Flags], literals: int) -> None:
    examples = table(1000)
    terms = (A, B, C, Term("a", "b"), Term("c", modulo=4), Term("a", modulo=2))
    assert {len(one.literals) for one in conditions(examples, rule(examples), terms)} == {literals}


def test_everything_is_always() -> None:
    examples = table(20)
    assert mine(examples, np.ones(20, bool), (A,)) == [ALWAYS]


def test_equal_examples_of_both_kinds_have_no_rule() -> None:
    examples = {"a": np.array([1, 2, 2]), "b": np.array([0, 3, 3])}
    assert mine(examples, np.array([True, True, False]), (A, B)) == []


def test_one_contradiction_among_many_examples_is_enough() -> None:
    positive = np.arange(20 * _MAX_EXAMPLES) % 2 == 1
    examples = {"a": positive.astype(np.int64)}
    assert conditions(examples, positive, (A,))
    examples["a"][0] = 1
    assert mine(examples, positive, (A,)) == []


def test_rivals_are_kept_until_an_example_tells_them_apart() -> None:
    examples = {"a": np.array([0, 0, 1, 1]), "b": np.array([0, 0, 1, 1])}
    positive = np.array([False, False, True, True])
    names = {one.literals[0].term.name for one in conditions(examples, positive, (A, B))}
    assert names == {"a", "b"}
    examples = {"a": np.append(examples["a"], 1), "b": np.append(examples["b"], 0)}
    names = {one.literals[0].term.name for one in conditions(examples, np.append(positive, False), (A, B))}
    assert names == {"b"}


def test_rivals_inside_a_conjunction_are_kept() -> None:
    examples = table(500, most=4)
    examples["d"] = examples["b"].copy()
    positive = (examples["a"] >= 2) & (examples["b"] >= 2)
    second = {
        literal.term.name for one in conditions(examples, positive, (A, B, Term("d"))) for literal in one.literals
    }
    assert second == {"a", "b", "d"}


def test_an_exception_is_a_negation() -> None:
    examples = table()
    found = conditions(examples, ~((examples["a"] >= 16) & (examples["b"] < 8)))
    assert found[0].negated
    assert {(one.term.name, one.op, one.value) for one in found[0].literals} == {("a", ">=", 16), ("b", "<", 8)}


def test_a_plain_exception_comes_before_a_far_fetched_conjunction() -> None:
    examples = table()
    positive = examples["a"] != 16
    examples["d"] = (~positive).astype(np.int64)
    far_fetched = Term("d", cost=3.5)
    found = conditions(examples, positive, (A, B, far_fetched))
    assert found[0] == Condition((Literal(A, "==", 16),), negated=True)
    assert Condition((Literal(far_fetched, "==", 0),)) in found


def test_rare_counterexamples_are_found() -> None:
    count = 20 * _MAX_EXAMPLES
    positive = np.arange(count) < count // 2
    examples = {"a": positive.astype(np.int64), "b": np.ones(count, np.int64)}
    examples["a"][-3:] = 1  # among 15,000 negative examples, three look positive
    examples["b"][-3:] = 0
    found = conditions(examples, positive, (A, B))
    assert {literal.term.name for literal in found[0].literals} == {"a", "b"}


@pytest.mark.parametrize(("below", "above", "best"), [(9, 21, 16), (60, 63, 63), (33, 40, 40), (0, 5, 1)])
def test_of_constants_that_separate_equally_the_plainest_is_taken(below: int, above: int, best: int) -> None:
    examples = {"a": np.array([below - 1, below, above, above + 1])}
    found = conditions(examples, np.array([False, False, True, True]), (A,))
    assert found[0].literals == (Literal(A, ">=", best),)
    edges = {one.literals[0].value for one in found}
    assert {below + 1, above} <= edges  # a call at the edge tells them apart


def test_names_have_no_thresholds_and_numbers_of_calls_no_single_values() -> None:
    examples = {"a": np.array([0, 1, 2, 3])}
    positive = np.array([False, False, False, True])
    assert {one.literals[0].op for one in mine(examples, positive, (Term("a", words=True),))} == {"=="}
    assert {one.literals[0].op for one in mine(examples, positive, (Term("a", single=False),))} == {">="}


def test_the_cheaper_feature_comes_first() -> None:
    examples = {"a": np.array([0, 1]), "b": np.array([0, 1])}
    found = mine(examples, np.array([False, True]), (Term("a", cost=2.0), Term("b", cost=0.1)))
    assert found[0].literals[0].term.name == "b"
    assert [one.cost for one in found] == sorted(one.cost for one in found)


@pytest.mark.parametrize(
    ("term", "values"),
    [
        (Term("j", "prefix", rounding="up", size=16), [-16, -9, 0]),
        (Term("j", "prefix", rounding="down", size=16), [0, -9, 0]),
        (Term("j", "prefix", rounding="mod", size=16), [-1, 7, 16]),
    ],
)
def test_what_a_term_subtracts_may_be_rounded(term: Term, values: list[int]) -> None:
    table = {"j": np.array([0, 7, 16]), "prefix": np.array([1, 16, 16])}
    assert term.of(table).tolist() == values


def coincidence() -> tuple[Table, Flags]:
    """Examples in which a >= 8 and b < 16 where a number happens to end in 3, and nowhere else."""
    draw = np.random.default_rng(0)
    examples = table(60, names="ab")
    positive: Flags = (examples["a"] >= 8) & (examples["b"] < 16)
    examples["r"] = np.where(positive, 3, draw.integers(4, 10, 60)) + 10 * draw.integers(0, 9, 60)
    return examples, positive


def test_two_plain_comparisons_are_preferred_to_a_coincidence_of_residues() -> None:
    examples, positive = coincidence()
    plain, residue = (Term("a", cost=0.3), Term("b", cost=0.3)), Term("r", modulo=10, cost=1.9)
    found = conditions(examples, positive, (*plain, residue))
    assert [(one.term.name, one.op, one.value) for one in found[0].literals] == [("a", ">=", 8), ("b", "<", 16)]
    assert Condition((Literal(residue, "==", 3),)) in found
    cheap = Term("r", modulo=10, cost=0.6)
    found = conditions(examples, positive, (*plain, cheap))
    assert found == [Condition((Literal(cheap, "==", 3),))]  # plain enough not to look for two


def test_a_threshold_may_exclude_the_least_value_alone() -> None:
    """Where b says which calls are wrong, and only the first one is right though, it is a >= 1 and not a >= 6."""
    examples = {"a": np.array([0, 1, 3, 5, 9, 6, 7, 8]), "b": np.array([1, 0, 0, 0, 0, 1, 1, 1])}
    positive = np.array([False] * 5 + [True] * 3)
    terms = (Term("a", single=False), Term("b", words=True))
    found = conditions(examples, positive, terms)
    assert set(found[0].literals) == {Literal(terms[0], ">=", 1), Literal(terms[1], "==", 1)}
    assert {one.value for rule in found for one in rule.literals if one.term.name == "a"} >= {1, 6}
