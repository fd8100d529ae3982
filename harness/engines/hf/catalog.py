"""The one backend of transformers as an engine: eager attention, in float32."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

from assay.harness.backend import Backend
from assay.harness.engines.hf.profile import PROFILE
from assay.harness.errors import UsageError
from assay.harness.extras import meets


def backends() -> tuple[str, ...]:
    """List the attention backends."""
    return PROFILE.cpu_backends


def check_version() -> str:
    """Return the version of transformers in this environment. Raises UsageError if it is too old, or not installed."""
    try:
        here = version("transformers")
    except PackageNotFoundError:
        here = ""
    if meets(here, f">={PROFILE.oldest}"):
        return here
    raise UsageError(
        f"transformers {here or 'is not installed in the environment that runs assay'}{' is too old' if here else ''}.",
        f"transformers {PROFILE.oldest} or newer",
        "install it, or name the Python of another environment with --reference-python",
    )


def native_noise(names: Collection[str], phase: str, stored: bool) -> str:
    """Return the noise family of the backend, which has none."""
    return ""


def checked_backend(flag: str, name: str) -> Backend:
    """Check that `flag` names the one backend. Raises UsageError if it does not."""
    if name in backends():
        return Backend.parse(name)
    raise UsageError(
        f"{flag}: transformers has no attention backend {name!r}.",
        "hf: eager attention, in float32",
        f"give {flag}=hf, or the engine that has {name}",
    )
