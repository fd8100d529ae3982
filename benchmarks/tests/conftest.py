"""The benchmarks are scripts that import one another, and no package: their folder and this one are put on the path."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def drawn_faults() -> ModuleType:
    return importlib.import_module("drawn_faults")


@pytest.fixture(scope="session")
def drawn_bugs() -> ModuleType:
    return importlib.import_module("drawn_bugs")
