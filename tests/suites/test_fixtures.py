"""The flags of ``pytest suites``."""

from __future__ import annotations

from typing import Any, cast

import pytest

from assay.harness.config import GATE_FLAGS, RUN_FLAGS, flag
from assay.suites.fixtures import pytest_addoption


class Options:
    """Takes the place of pytest's parser and keeps the flags that it is given."""

    def __init__(self) -> None:
        self.flags: set[str] = set()

    def getgroup(self, *_: str) -> Options:
        return self

    def addoption(self, name: str, **_: Any) -> None:
        self.flags.add(name)


def test_the_flags_are_those_of_a_run_and_none_that_would_be_ignored() -> None:
    options = Options()
    pytest_addoption(cast(pytest.Parser, options))
    assert {flag(name) for name in RUN_FLAGS} == options.flags - {"--out"}
    assert not options.flags & {flag(name) for name in GATE_FLAGS}
