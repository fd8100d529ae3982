"""Claims about greedy text."""

from __future__ import annotations

import pytest

from assay.harness.config import RunSpec
from assay.harness.judge.report import Report
from assay.suites import claims


def test_greedy_texts_do_not_diverge(report: Report, spec: RunSpec) -> None:
    """Except at ties and among near-equal tokens."""
    claims.needs(spec, "greedy")
    if spec.greedy_prompts == 0:
        pytest.skip("--greedy-prompts 0 skips the greedy comparison")
    claims.suite(report, "greedy")
