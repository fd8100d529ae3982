"""A complete run on the session's pair of real servers."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from assay.harness.judge.build import build
from assay.harness.progress import ProgressDisplay
from assay.harness.run.collect import collect
from assay.reports.wording.verdict import reasons

pytestmark = pytest.mark.server


def test_a_correct_kernel_passes_every_suite_on_servers_that_are_already_running(pair_run: Any) -> None:
    with ProgressDisplay(Console(file=StringIO())) as display:
        collect(pair_run.plan, pair_run.folder, display, ready=pair_run.servers)
    report = build(pair_run.folder)
    assert report.verdict == "pass", reasons(report)
    assert {suite.id: suite.verdict for suite in report.suites} == dict.fromkeys(
        ("accuracy", "greedy", "logits", "layers", "matrix"), "pass"
    )
    assert {check.status for check in report.checks} == {"ok", "not checked"}
    assert report.findings == ()
    phases = {call.phase: call for call in report.candidate.calls}
    assert {call.kernel for call in phases.values()} == {"assay.harness.attention.bugs.faults:rounded_oracle"}
    assert set(phases) == {"extend", "decode"}, "it computes both, and nothing was delegated"
    assert phases["extend"].calls_with_cached_prefix > 0
    assert report.layers is not None
    assert {row.layer for row in report.layers.depth} == {0, 1, 2, 3}
    for server in pair_run.servers:
        server.check()  # collect stops only servers that it started
