"""Claims of the layer diff: every layer was compared, and none is wrong by itself."""

from __future__ import annotations

from assay.harness.config import RunSpec
from assay.harness.judge.report import Report
from assay.suites import claims


def test_every_layer_was_compared(report: Report) -> None:
    """On the same inputs, in one server."""
    claims.check(report, "layers-compared")


def test_no_layer_is_wrong_by_itself(report: Report, spec: RunSpec) -> None:
    """The candidate's own error is within what noise explains."""
    claims.needs(spec, "layers")
    claims.suite(report, "layers")
