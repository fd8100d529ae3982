"""SGLang's own attention backends, read from its source."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

from assay.harness.engines.sglang.profile import PROFILE
from assay.harness.errors import UsageError

# Where SGLang keeps its list: from 0.5.18 on, and before.
_SOURCES = ("srt/arg_groups/choices.py", "srt/server_args.py")


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
            f"the package sglang, {PROFILE.oldest} or newer",
            PROFILE.install,
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
        f"SGLang {PROFILE.oldest} or newer",
        "install a version that the README names",
    )
