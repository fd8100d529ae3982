"""Claims about latency, if the run includes it."""

from __future__ import annotations

from assay.harness.config import RunSpec
from assay.harness.judge.report import Report
from assay.suites import claims


def test_the_candidate_is_no_slower(report: Report, spec: RunSpec) -> None:
    """Check that the times are within the policy's bound, in every load, by every metric."""
    claims.needs(spec, "latency")
    claims.suite(report, "latency")
