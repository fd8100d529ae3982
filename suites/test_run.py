"""The claims of a run: what ran is what was meant to run, every question was answered, and each suite is a pass."""

from __future__ import annotations

import pytest

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


def test_every_question_was_answered_by_both(report: Report, workload: Workload) -> None:
    """Check that both answered: an engine that stops early proves nothing."""
    claims.needs(workload, "accuracy", "greedy")
    claims.check(report, "all-answered")


def test_prefixes_were_cached(report: Report) -> None:
    """Check that prefixes were cached: SageAttention as shipped is wrong only behind one."""
    claims.check(report, "cached-prefix")


def test_every_layer_was_compared(report: Report) -> None:
    """Check that every layer was compared on the same inputs, in one server."""
    claims.check(report, "layers-compared")


@pytest.mark.parametrize("suite", ["accuracy", "greedy", "logits", "layers", "latency"])
def test_the_suite_is_a_pass(suite: str, report: Report, workload: Workload) -> None:
    """Check what each suite claims: accuracy is not inferior, texts and distributions agree, layers and times are within bounds."""
    claims.needs(workload, suite)
    claims.suite(report, suite)
