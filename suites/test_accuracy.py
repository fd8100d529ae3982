"""Claims about multiple-choice questions."""

from __future__ import annotations

from assay.harness.judge.report import Report
from assay.harness.workload import Workload
from assay.suites import claims


def test_every_question_was_answered_by_both(report: Report, workload: Workload) -> None:
    """Check that both answered: an engine that stops early proves nothing."""
    claims.needs(workload, "accuracy", "greedy")
    claims.check(report, "all-answered")


def test_prefixes_were_cached(report: Report) -> None:
    """Check that prefixes were cached: SageAttention as shipped is wrong only behind one."""
    claims.check(report, "cached-prefix")


def test_accuracy_is_not_inferior(report: Report, workload: Workload) -> None:
    """Test the paired accuracy within the stated margin."""
    claims.needs(workload, "accuracy")
    claims.suite(report, "accuracy")
