"""What the tests of sweeps share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.harness.sweep.executor import Workplace

STAND_IN = Path(__file__).parents[2] / "stand_ins" / "cells"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have cells run the stand-in of ``assay``, which lies in their working folder."""
    monkeypatch.chdir(STAND_IN)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


@pytest.fixture
def place(tmp_path: Path) -> Callable[..., Workplace]:
    """Make a place for a cell."""

    def make(attempt: int = 1, cancelled: threading.Event | None = None) -> Workplace:
        folder = tmp_path / "cell"
        folder.mkdir(exist_ok=True)
        return Workplace(folder, {}, "here", attempt, {}, lambda line: None, cancelled or threading.Event())

    return make
