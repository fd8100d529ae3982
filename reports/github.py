"""Annotations of a GitHub Actions run: workflow commands on standard output."""

from __future__ import annotations

from assay.harness.judge.report import Report
from assay.harness.text import one_line

_MAX_ANNOTATIONS = 8
"""GitHub shows at most ten annotations of each level per step."""
_MAX_TITLE = 200
"""GitHub shows at most 255 characters of a title."""


def workflow_commands(report: Report) -> str:
    """One workflow command for the verdict, one per finding, and one per unmet check.

    A regression and a serious finding are errors, a pass is a notice, everything else is a warning. Titles of findings and checks
    begin with their stable ids.
    """
    level = {"pass": "notice", "regression": "error"}.get(report.verdict, "warning")
    todo = f" {report.reasons[0]}" if report.failure and report.reasons else ""
    lines = [_command(level, f"assay: {report.verdict}", f"{report.headline.rstrip('.')}.{todo}")]
    for finding in report.findings[:_MAX_ANNOTATIONS]:
        kind = "error" if finding.severity == "serious" else "warning"
        lines.append(
            _command(
                kind,
                f"assay {finding.id}: {finding.where}",
                f"{finding.sentence} To reproduce: {finding.reproduce}",
            )
        )
    for check in [check for check in report.checks if check.status in ("failed", "missing")][:_MAX_ANNOTATIONS]:
        title = f"assay {check.id}: {check.title}"
        lines.append(_command("warning", title, f"{check.found}. To resolve: {check.settles}"))
    return "".join(f"{line}\n" for line in lines)


def _command(level: str, title: str, message: str) -> str:
    # Escaped as in actions/toolkit, packages/core/src/command.ts; properties also escape their delimiters.
    text = one_line(message, 1_000).replace("%", "%25")
    name = one_line(title, _MAX_TITLE).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={name}::{text}"
