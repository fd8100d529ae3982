from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from assay.harness.errors import ExitCode
from assay.harness.evidence.cause import ReplayResult
from assay.harness.offline.replay import exit_code
from assay.harness.verdict import Finding, Severity
from assay.reports.replay_terminal import render_replay


def finding(severity: Severity) -> Finding:
    return Finding(
        id="k", title="k", severity=severity, where="extend", diagnosis="d", evidence=("e",), reproduce="assay replay P"
    )


@pytest.mark.parametrize(
    ("with_prefix", "findings", "code"),
    [
        (4, (), ExitCode.PASS),
        (4, (finding("info"),), ExitCode.PASS),
        (4, (finding("serious"),), ExitCode.REGRESSION),
        (0, (finding("serious"),), ExitCode.REGRESSION),
        (0, (), ExitCode.NO_VERDICT),
    ],
)
def test_a_replay_without_a_cached_prefix_is_no_pass(
    with_prefix: int, findings: tuple[Finding, ...], code: ExitCode
) -> None:
    out = StringIO()
    replay = ReplayResult(
        candidate="mine", noise="", calls=8, recorded=8, with_prefix=with_prefix, worst=0.5, bounds=(), findings=findings,
        seconds=1.0,
    )  # fmt: skip
    assert exit_code(replay) == code
    render_replay(replay, code, Console(file=out))
    assert ("No verdict" in out.getvalue()) == (code == ExitCode.NO_VERDICT)
    assert f"{with_prefix} with a cached prefix" in out.getvalue()
