"""The names of kernels. Imports neither torch nor any kernel."""

from __future__ import annotations

from importlib.metadata import entry_points

GROUP = "assay.kernels"
_NATIVE_KERNELS = {"sglang": "assay.harness.engines.native_kernel:kernel"}
"""Engine -> the function, as ``module:function``, that makes a kernel of one of the engine's own attention backends."""


def published() -> dict[str, str]:
    """Published kernels: name -> ``module:function``."""
    return {point.name: point.value for point in entry_points(group=GROUP)}


def is_path(name: str) -> bool:
    """Whether a name is a ``module:function`` path, not a published name or a URL."""
    return ":" in name and "/" not in name


def native_backend(name: str) -> tuple[str, str] | None:
    """An engine's own attention backend that a name stands for, without a server: "sglang:triton".

    Returns:
        The function that makes a kernel of it, as ``module:function``, and the backend's name; None for any other name.
    """
    engine, colon, backend = name.partition(":")
    return (_NATIVE_KERNELS[engine], backend) if colon and engine in _NATIVE_KERNELS else None
