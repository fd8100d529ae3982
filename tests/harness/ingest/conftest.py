from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "data/sglang_log"


@pytest.fixture
def seed_log() -> Path:
    """The seed run's log, without most lines of autotuning and most server arguments."""
    return DATA / "seed.log"


@pytest.fixture
def server_log() -> Path:
    """Parts of the log of an SGLang 0.5.23 server on a CPU."""
    return DATA / "server_0.5.23.log"
