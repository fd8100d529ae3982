"""What all tests share."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from hypothesis import settings

# Triton decides at import whether kernels are interpreted, so this must stand before any test imports one. Where there is a GPU,
# what is tested on it must be compiled.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Threads of several small tensors' work spin on each other's cores: the tests take a third of the time with one.
torch.set_num_threads(1)

# CI must be the same twice; a machine that is busy must not fail a test by being slow.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU, leave out what needs one; where kernels are compiled, what needs the interpreter."""
    left_out = {
        "cuda": None if torch.cuda.is_available() else "needs a GPU",
        "interpreter": None if os.environ.get("TRITON_INTERPRET") == "1" else "needs TRITON_INTERPRET=1",
    }
    for item in items:
        for marker, reason in left_out.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Take torch and the like out of the garbage collector's sight: statsmodels' Holm correction collects at every call."""
    gc.collect()
    gc.freeze()
