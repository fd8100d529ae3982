"""Claims on the two servers: what ran is what was meant to run."""

from __future__ import annotations

from assay.harness.collect.plan import Plan
from assay.harness.judge.report import Report
from assay.suites import claims


def test_only_the_backend_differs(report: Report, plan: Plan) -> None:
    """Same weights, tokenizer and flags."""
    claims.needs(plan, "mmlu", "greedy")
    claims.check(report, "same-servers")


def test_the_candidates_own_kernel_ran(report: Report, plan: Plan) -> None:
    """In every phase that it claims, in every layer, and nothing else in its place."""
    claims.needs(plan, "mmlu", "greedy")
    claims.check(report, "kernel-ran")
