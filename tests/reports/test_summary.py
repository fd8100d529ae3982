from __future__ import annotations

from types import ModuleType

import pytest

from assay.harness.judge.report import Metric, SuiteResult
from assay.reports import summary


@pytest.mark.parametrize(("title", "synthetic", "shown"), [("MMLU", False, "MMLU"), ("MMLU", True, "MMLU (synthetic)")])
def test_a_synthetic_suite_is_marked(examples: ModuleType, title: str, synthetic: bool, shown: str) -> None:
    suite = examples.passing().suites[0].model_copy(update={"title": title, "synthetic": synthetic})
    assert summary.suite_title(suite) == shown


def test_a_share_of_nothing_is_not_zero() -> None:
    assert summary.share(0, 0) == summary.NOTHING
    assert summary.share(0, 5) == "0.000"


@pytest.mark.parametrize(("value", "shown"), [(None, "–"), (0.0, "0"), (-0.0512, "-0.0512"), (89.44, "89.4"), (12_345.6, "12,346")])
def test_number(value: float | None, shown: str) -> None:
    assert summary.number(value) == shown


@pytest.mark.parametrize(
    ("decided_by", "measured"), [("growth", "3 times"), ("loss", "1 point"), ("", "1 point"), (None, "1 point")]
)
def test_a_suite_is_shown_with_the_metric_that_decided(decided_by: str | None, measured: str) -> None:
    loss = Metric(id="loss", title="loss", value=1.0, text="1 point", bound=5.0)
    growth = Metric(id="growth", title="growth", value=3.0, text="3 times", bound=1.5)
    accuracy = Metric(id="accuracy", title="accuracy", value=0.9, text="0.9")
    suite = SuiteResult(
        id="s", title="S", verdict="regression", why="w", synthetic=False, metrics=(accuracy, loss, growth), decided_by=decided_by
    )  # fmt: skip
    assert summary.deciding(suite)[0] == measured


def test_unmet_puts_what_forbids_a_pass_first(examples: ModuleType) -> None:
    report = examples.inconclusive()
    assert [check.status for check in summary.unmet(report)] == ["missing", "not checked"]
    assert summary.unmet(report.model_copy(update={"checks": report.checks[:1]})) == []
