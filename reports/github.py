"""A command's output for GitHub Actions: annotations, which are workflow commands on a stream, and the step's summary."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from assay.harness.text import one_line
from assay.reports import document as doc
from assay.reports.markdown import to_markdown

# GitHub shows at most ten annotations of each level per step.
_MAX_ANNOTATIONS = 8
# GitHub shows at most 255 characters of a title.
_MAX_TITLE = 200


def write_for_actions(document: doc.Document, stream: TextIO) -> None:
    """Write a verdict where GitHub Actions shows it; do nothing elsewhere, or for a document without a verdict."""
    if document.verdict is None:
        return
    if os.environ.get("GITHUB_ACTIONS") == "true":
        stream.write(workflow_commands(document))  # GitHub parses these lines: nothing may wrap or colour them
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(to_markdown(_first_part(document)))


def _first_part(document: doc.Document) -> doc.Document:
    """Return a run's document up to its suites, since a summary is read between others; any other document stays whole."""
    ids = [block.id if isinstance(block, doc.Section) else "" for block in document.body]
    if "suites" not in ids:
        return document
    rest = doc.Line("The page and report.md of the run have the rest.", "quiet")
    return replace(document, body=[*document.body[: ids.index("suites") + 1], rest])


def workflow_commands(document: doc.Document) -> str:
    """Make one workflow command for the verdict, one per finding, and one per unmet check.

    A regression and a serious finding are errors, a pass is a notice, everything else is a warning. Titles of findings and checks
    begin with their stable ids.
    """
    level = {"pass": "notice", "regression": "error"}.get(document.verdict or "", "warning")
    said, lines = f"{document.headline.rstrip('.')}.", []
    if document.remedy:
        said += f" What to do: {document.remedy}"
    for block in doc.blocks_of(document.body):
        match block:
            case doc.Findings():
                for finding in block.findings[:_MAX_ANNOTATIONS]:
                    kind = "error" if finding.severity == "serious" else "warning"
                    says = finding.sentence + (f" To reproduce: {finding.reproduce}" if finding.reproduce else "")
                    lines.append(_command(kind, f"assay {finding.id}: {finding.where}", says))
            case doc.Checks():
                unmet = [check for check in block.checks if check.status in ("failed", "missing")]
                for check in unmet[:_MAX_ANNOTATIONS]:
                    says = f"{check.found}. To resolve: {check.settles}"
                    lines.append(_command("warning", f"assay {check.id}: {check.title}", says))
    return "\n".join([_command(level, f"assay: {document.verdict}", said), *lines, ""])


def _command(level: str, title: str, message: str) -> str:
    # Escaped as in actions/toolkit, packages/core/src/command.ts; properties also escape their delimiters.
    text = one_line(message, 1_000).replace("%", "%25")
    name = one_line(title, _MAX_TITLE).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={name}::{text}"
