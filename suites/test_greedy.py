"""Claims about greedy text."""

from __future__ import annotations

from assay.harness.judge.report import Report
from assay.harness.workload import Workload
from assay.suites import claims


def test_greedy_texts_do_not_diverge(report: Report, workload: Workload) -> None:
    """Check that greedy texts agree except at ties and among near-equal tokens."""
    claims.needs(workload, "greedy")
    claims.suite(report, "greedy")
