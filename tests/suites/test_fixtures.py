"""``pytest suites``: its flags, and what it refuses before it starts anything."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from assay.harness.config import _GATE_FLAGS, RUN_FLAGS, flag
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
    assert not options.flags & {flag(name) for name in _GATE_FLAGS}


def test_servers_in_turn_are_refused_since_the_tests_use_both(
    python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    root = Path(__file__).parents[2]
    flags = ["--servers=in-turn", "--candidate=torch_native", "--startup-timeout=1", f"--out={tmp_path / 'run'}"]
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(root / "suites"), *flags, cwd=root)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "--servers" in done.stdout
    assert not (tmp_path / "run").exists()
