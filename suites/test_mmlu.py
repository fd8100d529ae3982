"""Claims on multiple-choice questions."""

from __future__ import annotations

from assay.harness.collect.plan import Plan
from assay.harness.judge.report import Report
from assay.suites import claims


def test_every_question_was_answered_by_both(report: Report, plan: Plan) -> None:
    """An engine that stops early proves nothing."""
    claims.needs(plan, "mmlu", "greedy")
    claims.check(report, "all-answered")


def test_a_cached_prefix_was_met(report: Report) -> None:
    """The condition under which the seed case's backend was wrong."""
    claims.check(report, "cached-prefix")


def test_accuracy_is_not_inferior(report: Report, plan: Plan) -> None:
    """Paired, within the stated margin."""
    claims.needs(plan, "mmlu")
    claims.suite(report, "mmlu")
