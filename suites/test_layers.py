"""Claims on what is inside: every layer was compared, and none is wrong by itself."""

from __future__ import annotations

from assay.harness.collect.plan import Plan
from assay.harness.judge.report import Report
from assay.suites import claims


def test_every_layer_was_compared(report: Report) -> None:
    """On the same inputs, in one server."""
    claims.check(report, "layers-compared")


def test_no_layer_is_wrong_by_itself(report: Report, plan: Plan) -> None:
    """The candidate's own error is within what noise explains."""
    claims.needs(plan, "layers")
    claims.suite(report, "layers")
