"""Import-only stand-in for ``torchvision``, whose published build does not load with a CPU build of torch.

SGLang imports ``torchvision.transforms`` for image models at start-up. Submodules of any name can be imported; any of their
names is a class, because some are used as base classes and in annotations; instantiating one raises.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.0.0+assay.stand.in"


class _InterpolationMode(enum.Enum):
    """A real enumeration: its members are default values of arguments, evaluated at import."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Missing:
    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"torchvision's {type(self).__name__} was used, but this server runs with assay's import-only stand-in"
        )


class _Submodule(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _InterpolationMode if name == "InterpolationMode" else type(name, (_Missing,), {})
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
