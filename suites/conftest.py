"""The flags and the exit code of ``pytest suites --reference … --candidate …``. The plugin provides the fixtures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from assay.harness.config import FIELDS, REPEATED, RUN_FLAGS, flag
from assay.suites.fixtures import EXIT_CODE


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flags of ``assay run``, from the fields of `RunSpec`."""
    group = parser.getgroup("assay", "assay: what `pytest suites` compares")
    for name in RUN_FLAGS:
        field = FIELDS[name]
        action: Any = "append" if name in REPEATED else "store"
        group.addoption(flag(name), action=action, default=None, help=field.description, dest=f"assay_{name}")
    group.addoption("--out", type=Path, default=None, help="the run's folder", dest="assay_out")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Exit with the run's code."""
    session.exitstatus = session.config.stash.get(EXIT_CODE, session.exitstatus)
