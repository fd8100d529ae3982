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


@pytest.fixture
def data() -> Path:
    """Real files, cut to a few documents: written by lm-eval 0.4.13, inspect_ai 0.3.285 and SGLang 0.5.23 (simple-evals), which
    asked the tiny model in two real servers: A torch_native, B sage_attn_as_shipped."""
    return Path(__file__).parents[2] / "data" / "results"
