"""Claims about multiple-choice questions."""

from __future__ import annotations

from assay.harness.config import RunSpec
from assay.harness.judge.report import Report
from assay.suites import claims


def test_every_question_was_answered_by_both(report: Report, spec: RunSpec) -> None:
    """An engine that stops early proves nothing."""
    claims.needs(spec, "mmlu", "greedy")
    claims.check(report, "all-answered")


def test_prefixes_were_cached(report: Report) -> None:
    """SageAttention as shipped is wrong only behind a cached prefix."""
    claims.check(report, "cached-prefix")


def test_accuracy_is_not_inferior(report: Report, spec: RunSpec) -> None:
    """Paired, within the stated margin."""
    claims.needs(spec, "mmlu")
    claims.suite(report, "mmlu")
