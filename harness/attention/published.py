"""The names of kernels. Imports neither torch nor any kernel."""

from __future__ import annotations

from importlib.metadata import entry_points

GROUP = "assay.kernels"


def published() -> dict[str, str]:
    """Published kernels: name -> ``module:function``."""
    return {point.name: point.value for point in entry_points(group=GROUP)}


def is_path(name: str) -> bool:
    """Whether a name is a ``module:function`` path, not a published name or a URL."""
    return ":" in name and "/" not in name
