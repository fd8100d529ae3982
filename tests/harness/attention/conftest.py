"""The stand-ins for SGLang's objects, as a fixture: test folders are no packages, so tests cannot import one another."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def stand_in() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tests_attention_stand_in", Path(__file__).parent / "stand_in.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
