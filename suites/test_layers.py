"""Claims about the layer diff: every layer was compared, and every own error is within bounds."""

from __future__ import annotations

from assay.harness.judge.report import Report
from assay.harness.workload import Workload
from assay.suites import claims


def test_every_layer_was_compared(report: Report) -> None:
    """Check that every layer was compared on the same inputs, in one server."""
    claims.check(report, "layers-compared")


def test_every_own_error_is_within_bounds(report: Report, workload: Workload) -> None:
    """Check that noise explains the candidate's own error in every layer."""
    claims.needs(workload, "layers")
    claims.suite(report, "layers")
