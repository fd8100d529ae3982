"""No check of the judge that is not met is printed as if it had held, and the code uses every requirement of the table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from assay.harness import judge
from assay.harness.judge.requirements import REQUIRED
from assay.harness.verdict import CheckStatus, Requirement


@pytest.mark.parametrize("requirement", [*REQUIRED.values(), Requirement("c", "it held")], ids=lambda each: each.id)
def test_a_check_says_how_it_came_out_and_never_that_it_held_where_it_did_not(requirement: Requirement) -> None:
    ok, *others = (requirement.of("decode").check(status, "f").title for status in get_args(CheckStatus))
    assert ok.endswith(": decode")
    assert not any(words.startswith(ok.removesuffix(": decode")) for words in others)


def test_every_requirement_is_used() -> None:
    code = "".join(path.read_text() for path in Path(next(iter(judge.__path__))).glob("*.py"))
    assert set(re.findall(r'REQUIRED\["([a-z-]+)"\]', code)) == set(REQUIRED)


def test_titles_name_the_sides() -> None:
    lengths = Requirement("c", "{candidate} is as long as {reference}", sides=("A", "B"))
    assert lengths.check("missing", "f").title == "it is not shown that B is as long as A"
