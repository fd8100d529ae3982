"""Synthetic kernel repositories, as a fixture: test folders are not packages, so tests cannot import from benchmarks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def histories() -> ModuleType:
    path = Path(__file__).parents[4] / "benchmarks" / "kernel_histories.py"
    spec = importlib.util.spec_from_file_location("tests_kernel_histories", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
