"""Annotations of a GitHub Actions run: workflow commands on standard output."""

from __future__ import annotations

from assay.harness.judge.report import Report
from assay.harness.text import one_line

MOST = 8
"""GitHub shows at most ten annotations of a kind for each step."""


def workflow_commands(report: Report) -> str:
    """A line for the verdict and one for each finding and unmet condition, as GitHub's workflow commands.

    A regression is an error, what forbids a pass otherwise a warning, a pass a notice.
    """
    level = {"pass": "notice", "regression": "error"}.get(report.verdict, "warning")
    lines = [_command(level, f"assay: {report.verdict}", report.headline)]
    for finding in report.findings[:MOST]:
        kind = "error" if finding.severity == "serious" else "warning"
        lines.append(
            _command(
                kind, f"assay: {finding.where}", f"{finding.diagnosis.rstrip('.')}. Show it again: {finding.reproduce}"
            )
        )
    for check in [check for check in report.checks if check.status in ("failed", "missing")][:MOST]:
        lines.append(_command("warning", f"assay: {check.title}", f"{check.found}. To settle it: {check.settles}"))
    return "".join(f"{line}\n" for line in lines)


def _command(level: str, title: str, message: str) -> str:
    # The escapes of actions/toolkit, packages/core/src/command.ts: in properties also what ends them.
    text = one_line(message, 1_000).replace("%", "%25")
    name = one_line(title, 200).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={name}::{text}"
