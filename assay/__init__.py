"""assay compares attention backends of LLM serving engines. This module is its whole public API.

Kernels, tests, notebooks and pipelines can import the most common names from here::

    from assay import AttentionCall, KernelRefused, check, declares

A name is imported when it is first used, so ``import assay`` itself takes milliseconds and does not import torch. These names
change only as ``CHANGELOG.md`` says. Rarer names are imported from their modules (`assay.harness` and its neighbours), which may
change with any version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from assay.harness.attention.call import AttentionCall as AttentionCall
    from assay.harness.attention.call import KernelRefused as KernelRefused
    from assay.harness.attention.call import Mask as Mask
    from assay.harness.attention.call import Outputs as Outputs
    from assay.harness.attention.declaration import declares as declares
    from assay.harness.attention.oracle import oracle as oracle
    from assay.harness.checks.check import assert_correct as assert_correct
    from assay.harness.checks.jobs import check as check
    from assay.harness.checks.jobs import replay as replay
    from assay.harness.config import RunSpec as RunSpec
    from assay.harness.errors import AssayError as AssayError
    from assay.harness.evidence.kernel_result import KernelResult as KernelResult
    from assay.harness.extras import Extra
    from assay.harness.ingest.recognise import compare as compare
    from assay.harness.ingest.recognise import ingest as ingest
    from assay.harness.judge.report import Report as Report
    from assay.harness.run.run import run as run
    from assay.harness.verdict import Finding as Finding

# In the order of docs/api.md.
_HOME = {
    "AttentionCall": "assay.harness.attention.call",
    "Mask": "assay.harness.attention.call",
    "Outputs": "assay.harness.attention.call",
    "KernelRefused": "assay.harness.attention.call",
    "declares": "assay.harness.attention.declaration",
    "oracle": "assay.harness.attention.oracle",
    "check": "assay.harness.checks.jobs",
    "assert_correct": "assay.harness.checks.check",
    "replay": "assay.harness.checks.jobs",
    "KernelResult": "assay.harness.evidence.kernel_result",
    "run": "assay.harness.run.run",
    "RunSpec": "assay.harness.config",
    "Report": "assay.harness.judge.report",
    "Finding": "assay.harness.verdict",
    "compare": "assay.harness.ingest.recognise",
    "ingest": "assay.harness.ingest.recognise",
    "AssayError": "assay.harness.errors",
}

_EXTRA: dict[str, Extra] = {"run": "serve"}

__all__ = ["__version__", *_HOME]


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in _EXTRA:
            from assay.harness.extras import missing_packages, require

            if missing_packages(_EXTRA[name]):
                # Raise only when it is called, because `hasattr`, `inspect` and `import *` also access the name.
                return lambda *_, **__: require(_EXTRA[name], f"assay.{name}")
        loaded = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = loaded
        return loaded


def __dir__() -> list[str]:
    return sorted(__all__)
