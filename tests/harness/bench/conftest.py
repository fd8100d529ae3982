"""Made-up benches, as a fixture: test folders are no packages, so tests cannot import one another."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.bench.evidence import BenchFolder

MakeBench = Callable[..., BenchFolder]


@pytest.fixture
def make_bench(tmp_path: Path) -> MakeBench:
    """A function that writes a bench's folder; its arguments say what is wrong in it."""
    spec = importlib.util.spec_from_file_location("tests_bench_made_up", Path(__file__).parent / "made_up.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)

    def make(**wrong: Any) -> BenchFolder:
        folder: BenchFolder = module.write_bench(tmp_path / f"bench-{len(list(tmp_path.iterdir()))}", **wrong)
        return folder

    return make
