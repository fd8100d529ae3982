"""Every check of the judge has a title for each way in which it can come out, and none is printed as if it had held."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

from assay.harness import judge
from assay.harness.judge.requirements import REQUIRED
from assay.harness.verdict import CheckStatus, Requirement

STATUSES = get_args(CheckStatus)
SIDES = ("A", "B")


def titles(requirement: Requirement) -> dict[CheckStatus, str]:
    """The titles of all outcomes that a check of the requirement can have."""
    found = {}
    for status in STATUSES:
        try:
            found[status] = requirement.between(*SIDES).of("part").check(status, "f").title
        except ValueError:
            continue
    return found


@pytest.mark.parametrize("id_", REQUIRED)
def test_a_check_says_how_it_came_out_and_never_that_it_held_where_it_did_not(id_: str) -> None:
    said = titles(REQUIRED[id_])
    assert "ok" in said
    assert len(said) > 1, "a requirement that can only be met requires nothing"
    assert len(set(said.values())) == len(said)
    assert not any(words.startswith(said["ok"].removesuffix(": part")) for status, words in said.items() if status != "ok")


def ids_in(node: ast.AST) -> list[str]:
    """The ids by which code takes requirements from the table."""
    return [
        str(each.slice.value)
        for each in ast.walk(node)
        if isinstance(each, ast.Subscript) and isinstance(each.value, ast.Name) and each.value.id == "REQUIRED"
        if isinstance(each.slice, ast.Constant)
    ]


def test_every_outcome_in_the_code_has_a_title() -> None:
    """What the judge calls with a literal status, or as met or missing, by the id of the requirement."""
    used: set[str] = set()
    for path in Path(next(iter(judge.__path__))).glob("*.py"):
        tree = ast.parse(path.read_text())
        used |= {*ids_in(tree)}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if isinstance(call.func, ast.Attribute) and (ids := ids_in(call.func)):
                literal = call.func.attr == "check" and isinstance(call.args[0], ast.Constant)
                wanted = {"ok", "missing"} if call.func.attr == "met" else {call.args[0].value} if literal else set()
                assert wanted <= set(titles(REQUIRED[ids[0]])), f"{path.name}: {ids[0]}"
    assert used == set(REQUIRED)


def test_a_requirement_without_words_for_an_outcome_cannot_have_it() -> None:
    with pytest.raises(ValueError, match="no title for a check that is 'failed'"):
        Requirement("c", "it held").check("failed", "f")
    assert Requirement("c", "it held", "it broke").of("decode").check("failed", "f").title == "it broke: decode"
