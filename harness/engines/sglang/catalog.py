"""The attention backends that a server can run: SGLang's own, read from its source, and kernels."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from assay.harness.attention.noise import BESIDE_FP8, family
from assay.harness.backend import Backend
from assay.harness.engines.registry import checked_name
from assay.harness.engines.sglang.profile import PROFILE
from assay.harness.errors import UsageError
from assay.harness.extras import meets

# SGLang's own backends that compute prefill separately on cached and on new keys, and merge both in the model's dtype.
_MERGE_THE_PREFIX = ("flashinfer",)
MIN_SGLANG = PROFILE.oldest
# Where SGLang keeps its list: from 0.5.18 on, and before.
_SOURCES = ("srt/arg_groups/choices.py", "srt/server_args.py")


def check_version() -> str:
    """Return the installed version of SGLang, or an empty string for a checkout on the path, which has none.

    Raises:
        UsageError: it is too old.
    """
    try:
        here = version("sglang")
    except PackageNotFoundError:
        return ""
    if not meets(here, f">={MIN_SGLANG}"):
        raise UsageError(
            f"SGLang {here} is too old.", f"SGLang {MIN_SGLANG} or newer", f"install SGLang {MIN_SGLANG} or newer"
        )
    return here


def native_noise(names: Collection[str], phase: str, stored: bool) -> str:
    """Return the noise family of SGLang's own backends, beyond the rounding of the call's dtype, or an empty string.

    Any of the named backends may have computed the call; `stored` says whether the KV cache stores fewer bits than it has.
    """
    merged = phase == "extend" and any(name in _MERGE_THE_PREFIX for name in names)
    return replace(family(BESIDE_FP8 if stored else ""), merged=merged).name


@cache
def backends() -> tuple[str, ...]:
    """List SGLang's own attention backends, read from its source because importing it takes seconds.

    Raises:
        UsageError: SGLang is not installed, or its list cannot be found.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            "SGLang is not installed.",
            f"the package sglang, {MIN_SGLANG} or newer",
            "pip install sglang; without a GPU, make the environment with nox -s accuracy in a clone of assay",
        )
    root = Path(next(iter(spec.submodule_search_locations)))
    for source in _SOURCES:
        for node in ast.walk(ast.parse((root / source).read_text())) if (root / source).exists() else ():
            if isinstance(node, ast.Assign) and any(
                getattr(t, "id", "") == "ATTENTION_BACKEND_CHOICES" for t in node.targets
            ):
                return tuple(ast.literal_eval(node.value))
    raise UsageError(
        f"No list of attention backends was found in {root}.",
        f"SGLang {MIN_SGLANG} or newer",
        "install a version that the README names",
    )


def checked_backend(flag: str, name: str) -> Backend:
    """Check that a server can run a backend of this name, which `flag` gave; see `assay.harness.engines.registry.checked_name`."""
    return checked_name("sglang", flag, name)
