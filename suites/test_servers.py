"""Claims about the two servers: what ran is what was meant to run."""

from __future__ import annotations

from assay.harness.judge.report import Report
from assay.harness.workload import Workload
from assay.suites import claims


def test_only_the_backend_differs(report: Report, workload: Workload) -> None:
    """Check that weights, tokenizer and flags are the same."""
    claims.needs(workload, "accuracy", "greedy")
    claims.check(report, "same-servers")


def test_the_candidates_own_kernel_ran(report: Report, workload: Workload) -> None:
    """Check that it ran in every phase that it claims, in every layer, and nothing else in its place."""
    claims.needs(workload, "accuracy", "greedy")
    phases = report.candidate.claimed_phases
    claims.check(report, *([f"kernel-ran-{phase}" for phase in phases] or ["kernel-ran"]))
