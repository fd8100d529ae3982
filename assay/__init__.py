"""assay compares attention backends of LLM serving engines. This module is its whole public API.

Everything that a kernel, a test, a notebook or a pipeline needs is imported from here::

    from assay import AttentionCall, KernelRefused, check, declares

A name is imported when it is first used, so ``import assay`` itself takes milliseconds and imports no torch. Everything else
(`assay.harness` and its neighbours) may change with any version; these names change only as ``CHANGELOG.md`` says.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from assay.harness.attention.call import AttentionCall as AttentionCall
    from assay.harness.attention.call import CallSpec as CallSpec
    from assay.harness.attention.call import Kernel as Kernel
    from assay.harness.attention.call import KernelRefused as KernelRefused
    from assay.harness.attention.call import Mask as Mask
    from assay.harness.attention.call import Outputs as Outputs
    from assay.harness.attention.kernels import declares as declares
    from assay.harness.attention.matrix import Case as Case
    from assay.harness.attention.matrix import cases as cases
    from assay.harness.attention.noise import NoiseFamily as NoiseFamily
    from assay.harness.attention.noise import Quantised as Quantised
    from assay.harness.attention.oracle import oracle as oracle
    from assay.harness.attention.sample_calls import call_of as call_of
    from assay.harness.checks.check import assert_correct as assert_correct
    from assay.harness.checks.jobs import check as check
    from assay.harness.checks.jobs import replay as replay
    from assay.harness.checks.kernel_matrix import MatrixOptions as MatrixOptions
    from assay.harness.conditions import PHASES as PHASES
    from assay.harness.config import RunSpec as RunSpec
    from assay.harness.errors import AssayError as AssayError
    from assay.harness.errors import EngineError as EngineError
    from assay.harness.errors import EvidenceError as EvidenceError
    from assay.harness.errors import ExitCode as ExitCode
    from assay.harness.errors import UsageError as UsageError
    from assay.harness.evidence.kernel_result import KernelResult as KernelResult
    from assay.harness.extras import Extra
    from assay.harness.judge.report import Report as Report
    from assay.harness.policy import Policy as Policy
    from assay.harness.run.run import run as run
    from assay.harness.sides import Side as Side
    from assay.harness.verdict import Check as Check
    from assay.harness.verdict import Finding as Finding
    from assay.harness.verdict import Verdict as Verdict
    from assay.harness.workload import Workload as Workload
    from assay.reports.write import write_reports as write_reports

# In the order of docs/api.md.
_HOME = {
    "AttentionCall": "assay.harness.attention.call",
    "CallSpec": "assay.harness.attention.call",
    "Mask": "assay.harness.attention.call",
    "Kernel": "assay.harness.attention.call",
    "Outputs": "assay.harness.attention.call",
    "KernelRefused": "assay.harness.attention.call",
    "PHASES": "assay.harness.conditions",
    "declares": "assay.harness.attention.kernels",
    "NoiseFamily": "assay.harness.attention.noise",
    "Quantised": "assay.harness.attention.noise",
    "oracle": "assay.harness.attention.oracle",
    "check": "assay.harness.checks.jobs",
    "MatrixOptions": "assay.harness.checks.kernel_matrix",
    "KernelResult": "assay.harness.evidence.kernel_result",
    "assert_correct": "assay.harness.checks.check",
    "cases": "assay.harness.attention.matrix",
    "Case": "assay.harness.attention.matrix",
    "call_of": "assay.harness.attention.sample_calls",
    "replay": "assay.harness.checks.jobs",
    "run": "assay.harness.run.run",
    "RunSpec": "assay.harness.config",
    "Side": "assay.harness.sides",
    "Workload": "assay.harness.workload",
    "Policy": "assay.harness.policy",
    "Report": "assay.harness.judge.report",
    "write_reports": "assay.reports.write",
    "Verdict": "assay.harness.verdict",
    "Check": "assay.harness.verdict",
    "Finding": "assay.harness.verdict",
    "ExitCode": "assay.harness.errors",
    "AssayError": "assay.harness.errors",
    "UsageError": "assay.harness.errors",
    "EngineError": "assay.harness.errors",
    "EvidenceError": "assay.harness.errors",
}

_EXTRA: dict[str, Extra] = {"run": "serve", "write_reports": "reports"}

__all__ = ["__version__", *_HOME]


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in _EXTRA:
            from assay.harness.extras import missing_packages, require

            if missing_packages(_EXTRA[name]):
                # Calling it is the error, not the name, which `hasattr`, `inspect` and `import *` meet too.
                return lambda *_, **__: require(_EXTRA[name], f"assay.{name}")
        loaded = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = loaded
        return loaded


def __dir__() -> list[str]:
    return sorted(__all__)
