"""Import-only stand-in for ``sgl_kernel``, which has no build for CPUs without AMX.

It registers no ``torch.ops.sgl_kernel``, so SGLang finds no AMX support and takes the ``forward_native`` path of each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0+assay.stand.in"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):  # the import system asks for __path__ and the like: those are really missing
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called, but this server runs with assay's import-only stand-in"
        )

    return missing
