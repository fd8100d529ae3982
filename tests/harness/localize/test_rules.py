from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from assay.harness.evidence.kernel_result import Property
from assay.harness.localize.features import Known, words
from assay.harness.localize.rules import Points, holds, necessary, rules

LENGTHS = [(new, prefix) for new in (1, 5, 64, 96, 97, 98, 128, 200) for prefix in (0, 1, 8, 15, 16, 17, 20, 31, 32, 48, 64, 129)]


def points(wrong: Callable[[Known], bool]) -> Points:
    made = Points()
    for number, (new, prefix) in enumerate(LENGTHS):
        known = {
            "new": new,
            "prefix": prefix,
            "dtype": ("float32", "bfloat16")[number % 2],
            "before_new": np.nan if number % 3 else 7 if number % 9 else 3,
        }
        made.add(known, wrong(known))
    return made


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda known: known["prefix"] >= 17, "cached prefix >= 17"),
        (lambda known: known["new"] >= 97 and known["prefix"] % 16 != 0, "new tokens >= 97 and cached prefix % 16 != 0"),
        (lambda known: known["dtype"] == "bfloat16", "dtype is bfloat16"),
        (lambda known: 16 <= known["prefix"] <= 48, "16 <= cached prefix <= 48"),
        (lambda known: known["before_new"] == 7, "new tokens of the sequence before it >= 7"),
    ],
)
def test_the_simplest_rule_that_agrees_with_everything_comes_first(wrong: Callable[[Known], bool], said: str) -> None:
    made = points(wrong)
    found = rules(made)
    assert words(found[0]) == said
    assert all([holds(rule, known) for known in made.known] == made.wrong for rule in found)


def test_there_is_no_rule_where_nothing_is_wrong_or_none_fits() -> None:
    assert rules(points(lambda known: True)) == [()]
    assert rules(points(lambda known: False)) == []
    assert rules(points(lambda known: (known["new"] * 7 + known["prefix"] * 5) % 11 < 4)) == []


def test_a_missing_number_has_no_property() -> None:
    for kind in (">=", "<=", "!=", "no residue", "no power of two"):
        assert not holds((Property(feature="x", kind=kind, values=(2.0, 0.0)),), {"x": np.nan})


def test_differences_and_questions_are_said_as_such() -> None:
    rule = (
        Property(feature="length-first", kind=">=", values=(1.0,)),
        Property(feature="longest-length", kind=">=", values=(1.0,)),
        Property(feature="head_dim", kind="in", values=(80.0, 96.0, 192.0)),
        Property(feature="new", kind="power of two"),
    )
    assert words(rule, {"phase": "decode"}) == (
        "decode, length > length of the first sequence, another sequence of the batch is longer, head_dim is 80, 96 or 192 and "
        "new tokens is a power of two"
    )


def test_what_every_number_has_is_no_rule() -> None:
    """The sequence before one has at least no new tokens whenever it exists."""
    made = Points()
    for index in range(40):
        made.add({"index": float(index > 4), "before_new": float(index % 7) if index > 4 else np.nan}, index > 4)
    assert [words(rule) for rule in rules(made)] == ["the sequence is not the first of its batch"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda of, chance: of["length"] >= 67 and chance, "length >= 65"),
        (lambda of, chance: of["asks: a window"] == "True" and chance, "the call asks for a window"),
        (lambda of, chance: of["dtype"] == "float16" and of["length"] >= 90 and chance, "dtype is float16 and length >= 65"),
        (lambda of, chance: of["dtype"] == "float32" and chance, ""),  # rounding may hide it in others
        (lambda of, chance: of["length"] <= 40 and chance, ""),  # and in long sequences
        (lambda of, chance: of["length"] >= 67 and of["row"] < of["length"] - 80 and chance, ""),  # grows with it
        (lambda of, chance: chance, ""),
    ],
)
def test_what_all_wrong_sequences_have_is_said_where_chance_decides_the_rest(
    wrong: Callable[[Known, bool], bool], said: str
) -> None:
    made, draw = Points(), np.random.default_rng(0)
    for _ in range(900):
        known: Known = {
            "length": int(draw.integers(1, 200)), "dtype": ("float32", "bfloat16", "float16")[int(draw.integers(3))],
            "asks: a window": str(bool(draw.integers(2))), "row": int(draw.integers(1, 200)),
        }  # fmt: skip
        made.add(known, bool(wrong(known, draw.random() < 0.3)))
    rule = necessary(made)
    assert (words(rule) if rule else "") == said
