"""The modules of the benchmarks, as fixtures: they are scripts that import one another, and no package."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def benchmark_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
        yield


@pytest.fixture(scope="session")
def drawn_faults(benchmark_path: None) -> ModuleType:
    return importlib.import_module("drawn_faults")


@pytest.fixture(scope="session")
def drawn_bugs(benchmark_path: None) -> ModuleType:
    return importlib.import_module("drawn_bugs")
