"""No check that is not met is printed as if it had held, and every requirement of the table is asked for somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from assay import harness
from assay.harness.statement import state
from assay.harness.verdict import CheckStatus, Requirement
from assay.reports.wording.requirements import _TITLES, said_check


@pytest.mark.parametrize("id_", [*_TITLES, "of-a-later-assay"])
def test_a_check_says_how_it_came_out_and_never_that_it_held_where_it_did_not(id_: str) -> None:
    requirement = Requirement(id_).of("decode")
    ok, *others = (said_check(requirement.check(status, state("found"))).title for status in get_args(CheckStatus))
    assert ok.endswith(": decode")
    assert not any(words.startswith(ok.removesuffix(": decode")) for words in others)


def test_every_requirement_has_a_title_and_every_title_a_requirement() -> None:
    code = "".join(path.read_text() for path in Path(next(iter(harness.__path__))).rglob("*.py"))
    assert set(re.findall(r'(?:Requirement|met)\(\s*"([a-z-]+)"', code)) == set(_TITLES)
