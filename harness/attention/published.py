"""The names of kernels. Imports neither torch nor any kernel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

GROUP = "assay.kernels"
# Engine -> the function, as `module:function`, that makes a kernel of one of the engine's own attention backends.
_NATIVE_KERNELS = {engine: f"assay.harness.engines.{engine}.native_kernel:kernel" for engine in ("sglang", "vllm")}


def published() -> dict[str, str]:
    """List the published kernels: name -> ``module:function``."""
    return {point.name: point.value for point in entry_points(group=GROUP)}


def is_path(name: str) -> bool:
    """Return True if a name is a ``module:function`` path, not a published name or a URL."""
    return ":" in name and "/" not in name


def adapter_and_path(name: str) -> tuple[str, str]:
    """Split a kernel's name into signature and path, as in "flash_attn@mine:function"; the signature may be empty."""
    adapter, at, path = name.partition("@")
    return (adapter, path) if at and ":" not in adapter else ("", name)


def module_of(name: str) -> str:
    """Return the module of a ``module:function`` path, with or without a signature."""
    return adapter_and_path(name)[1].partition(":")[0]


def native_backend(name: str) -> tuple[str, str] | None:
    """Resolve the name of an engine's own attention backend, such as "sglang:triton".

    Returns:
        The function that makes a kernel of it, as ``module:function``, and the backend's name, or None for any other name.
    """
    engine, colon, backend = name.partition(":")
    return (_NATIVE_KERNELS[engine], backend) if colon and engine in _NATIVE_KERNELS else None


@contextmanager
def working_folder_searched(module: str) -> Iterator[None]:
    """Search the working folder too, last, while a kernel's module is imported or its source is located.

    Afterwards the folder is on Python's path only if the module was imported from there, so that imports during the kernel's
    calls work as in a server. assay's other imports never come from the current folder.

    Args:
        module: the kernel's module.
    """
    here = Path.cwd()
    if str(here) in sys.path:  # by PYTHONPATH, or as Python itself was called
        yield
        return
    sys.path.append(str(here))
    try:
        yield
    finally:
        top = module.partition(".")[0]
        place = getattr(sys.modules.get(module), "__file__", None)
        from_here = place and (Path(place).parent == here or Path(place).is_relative_to(here / top))
        if not from_here and str(here) in sys.path:
            sys.path.remove(str(here))
