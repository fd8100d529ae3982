"""Claims about latency, if the run includes it."""

from __future__ import annotations

from assay.harness.judge.report import Report
from assay.harness.workload import Workload
from assay.suites import claims


def test_the_candidate_is_no_slower(report: Report, workload: Workload) -> None:
    """Check that the times are within the policy's bound, in every load, by every metric."""
    claims.needs(workload, "latency")
    claims.suite(report, "latency")
