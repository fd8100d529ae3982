"""Claims about logits."""

from __future__ import annotations

from assay.harness.judge.report import Report
from assay.harness.workload import Workload
from assay.suites import claims


def test_distributions_are_as_near_as_the_declared_noise_explains(report: Report, workload: Workload) -> None:
    """Compare distributions over the reference's own tokens, cold and behind a cached prefix."""
    claims.needs(workload, "logits")
    claims.suite(report, "logits")
