"""Triton's interpreter, for kernels on a machine without a GPU. Imports torch only when asked."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from assay.harness.attention.interpreter_bfloat16 import BFLOAT16_BROKEN as BFLOAT16_BROKEN
from assay.harness.attention.interpreter_bfloat16 import refuse_broken_bfloat16
from assay.harness.attention.interpreter_bounds import check_bounds
from assay.harness.attention.interpreter_rounding import round_to_nearest
from assay.harness.attention.interpreter_speed import speed_up_interpreter

_MODULE = "triton.runtime.interpreter"


def interpret_without_gpu() -> None:
    """Have Triton kernels interpreted where there is no GPU. Call it before a kernel is imported: Triton decides then."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        for change in (round_to_nearest, speed_up_interpreter, check_bounds, refuse_broken_bfloat16):
            if _MODULE in sys.modules:
                _change(change, sys.modules[_MODULE])
            elif not any(isinstance(finder, _Finder) and finder.change is change for finder in sys.meta_path):
                sys.meta_path.insert(0, _Finder(change))


def _change(change: Callable[[Any], None], interpreter: ModuleType) -> None:
    """Change the interpreter's module, once."""
    done = vars(interpreter).setdefault("assay_changes", [])
    if change not in done:
        done.append(change)
        change(interpreter)


class _Finder(MetaPathFinder):
    """Finds the interpreter as usual, and changes it once it is imported."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        self.change = change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module: ModuleType) -> None:
                load(module)
                _change(self.change, module)

            spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec
