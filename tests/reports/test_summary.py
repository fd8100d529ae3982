from __future__ import annotations

import pytest

from assay.harness.judge.judgement import measure
from assay.harness.judge.report import SuiteResult
from assay.reports import summary


@pytest.mark.parametrize(("value", "shown"), [(None, "–"), (0.0, "0"), (-0.0512, "-0.0512"), (89.44, "89.4"), (12_345.6, "12,346")])
def test_number(value: float | None, shown: str) -> None:
    assert summary.number(value) == shown


@pytest.mark.parametrize(
    ("decided_by", "measured"), [("worst", "3"), ("loss-of-accuracy", "1 point"), ("", "1 point"), (None, "1 point")]
)
def test_a_suite_is_shown_with_the_metric_that_decided(decided_by: str | None, measured: str) -> None:
    loss = measure("loss-of-accuracy", 1.0, bound=5.0, questions=8, level=0.9)
    growth = measure("worst", 3.0, bound=1.5)
    flips = measure("flip-floor", 0.9, flips=9, questions=10)
    suite = SuiteResult(
        id="s", verdict="regression", why=(), synthetic=False, metrics=(flips, loss, growth), decided_by=decided_by
    )  # fmt: skip
    assert summary.deciding(suite)[0] == measured
