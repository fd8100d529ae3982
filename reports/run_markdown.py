"""``report.md``: a pull request comment or a step summary, at most 60 lines."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.judge.report import Check, Finding, Report
from assay.harness.text import visible
from assay.reports.document import CHECK_SIGNS
from assay.reports.markdown import SIGNS, code, escape, fenced
from assay.reports.operator_picture import text as picture_text
from assay.reports.summary import (
    VERDICTS,
    envelope_lines,
    failure_lines,
    latency_lines,
    layer_diff_lines,
    main_finding,
    suite_line,
    unmet,
)
from assay.reports.terminal import PLAIN_WIDTH, explaining

_REASONS, _SUITES, _CHECKS, _FINDINGS, _LAYERS, _COMMAND_LINES = 5, 7, 5, 2, 3, 3
"""Most rows of each part; a run has at most seven suites."""
_FINDINGS_BESIDE_LATENCY = 1
_COMMAND_CHARACTERS = 2_000
_LOG_LINES, _LOG_CHARACTERS = 16, 300
LINES = 60
"""Most lines of a comment."""


def to_markdown(report: Report) -> str:
    """Verdict, cause and suites, and below a fold the unmet checks, further findings and what was compared, as GitHub Markdown."""
    mark = VERDICTS[report.verdict]
    candidate, reference = code(report.candidate.backend), code(report.reference.backend)
    lines = [f"### {SIGNS[report.verdict]} {mark.word}: {candidate} against {reference}", ""]
    lines += [f"**{escape(report.headline, 400)}**", ""]
    cause = main_finding(report)
    lines += _cause(cause) if cause else []
    after_cause = len(lines)
    said = cause.sentence if cause else ""
    lines += _list([escape(reason, 300) for reason in report.reasons if reason != said], _REASONS)
    lines += _failure(report)
    lines += _suite_table(report)
    where = f"{escape(report.environment.device)}, model {code(report.environment.model)}, run {code(report.run_id)}"
    foot = f"<sub>assay · exit code {report.exit_code} · {escape(report.candidate.engine)} · {where}</sub>"
    end = ["</details>", "", *_command(report.reproduce), foot]
    lines += ["<details><summary>Checks, layers, and what the verdict covers</summary>", ""]
    further = [finding for finding in report.findings if finding is not cause]
    most = _FINDINGS if report.latency is None else _FINDINGS_BESIDE_LATENCY
    # The picture of the cause says more than a further finding, which is in report.html as well.
    by_count = [_folded(report, further, count) for count in range(most, -1, -1)]
    pictures = [_picture(cause, LINES - len(lines) - len(end) - len(folded)) for folded in by_count]
    chosen = next((at for at, drawn in enumerate(pictures) if drawn), 0)
    return "\n".join([*lines[:after_cause], *pictures[chosen], *lines[after_cause:], *by_count[chosen], *end]) + "\n"


def _cause(cause: Finding) -> list[str]:
    """What is wrong and how to reproduce it, in the first lines."""
    observed = f" Observed: {escape(cause.observed, 400)}" if cause.observed else ""
    explained = "".join(f" (explained by {_span(command)})" for command in explaining(cause))
    lines = [f"**Cause**: {escape(cause.sentence, 500)}{observed}{explained}"]
    return [*lines, "", *([f"Reproduce: {_span(cause.reproduce)}", ""] if cause.reproduce else [])]


def _folded(report: Report, further: Sequence[Finding], most: int) -> list[str]:
    """What a reader looks up, with at most so many further findings."""
    lines = [*_checks(unmet(report)), *_findings(further, most)]
    if report.layers:
        lines += [
            "**Layer diff**",
            "",
            *_list([escape(line, 400) for line in layer_diff_lines(report.layers)], _LAYERS),
        ]
    if report.envelope:
        lines += [f"**Envelope**: {' '.join(escape(line, 800) for line in envelope_lines(report))}", ""]
    if report.latency:
        lines += [f"**Latency**: {' '.join(escape(line, 400) for line in latency_lines(report.latency))}", ""]
    return lines


def _suite_table(report: Report) -> list[str]:
    if not report.suites:
        return []
    lines = [
        "| Suite | Verdict | Reference | Candidate | Differences | Measured (interval) | Bound |",
        "| --- | --- | ---: | ---: | --- | --- | --- |",
    ]
    for suite in report.suites[:_SUITES]:
        row = suite_line(suite)
        bound = f"{row.bound}, set by {row.policy}" if row.policy else row.bound
        cells = (row.suite, row.reference, row.candidate, row.differences, row.measured, bound)
        name, *rest = (escape(cell) for cell in cells)
        lines.append(f"| {name} | {SIGNS[row.verdict]} {row.verdict} | {' | '.join(rest)} |")
    if len(report.suites) > _SUITES:
        lines.append(f"| and {len(report.suites) - _SUITES} more, in report.html | | | | | | |")
    return [*lines, ""]


def _checks(checks: Sequence[Check]) -> list[str]:
    if not checks:
        return []
    rows = []
    for check in checks:
        settles = f" To resolve: {escape(check.settles)}" if check.settles else ""
        rows.append(
            f"{CHECK_SIGNS[check.status]} {check.status}: **{escape(check.title)}**: {escape(check.found)}.{settles}"
        )
    return ["**Checks that are not ok**", "", *_list(rows, _CHECKS)]


def _findings(findings: Sequence[Finding], most: int) -> list[str]:
    if not findings:
        return []
    rows = []
    for finding in findings:
        parts = [f"**{escape(finding.title)}**: {escape(finding.sentence, 500)}"]
        if finding.observed:
            parts[0] += f" Observed: {escape(finding.observed, 400)}"
        parts[0] += "".join(f" (explained by {_span(command)})" for command in explaining(finding))
        if finding.evidence:
            parts.append("; ".join(escape(line, 160) for line in finding.evidence[:3]))
        if finding.reproduce:
            parts.append(_span(finding.reproduce))
        rows.append("\n  - ".join(parts))
    return ["**Further findings**", "", *"\n".join(_list(rows, most)).split("\n")]


def _failure(report: Report) -> list[str]:
    """The log of what failed, folded."""
    rows = failure_lines(report, _LOG_LINES)
    if not rows:
        return []
    log = fenced("\n".join(row[:_LOG_CHARACTERS] for row in rows))
    return ["<details><summary>Its log</summary>", "", *log, "</details>", ""]


def _picture(cause: Finding | None, room: int) -> list[str]:
    """The picture of the cause, if it fits into so many lines. In characters: a comment cannot show SVG."""
    if cause is None or cause.picture is None:
        return []
    rows = picture_text(cause.picture, PLAIN_WIDTH).plain.split("\n")
    if len(rows) + 3 > room:
        return []
    return fenced("\n".join(rows))


def _span(command: str) -> str:
    joined = command.replace("\\\n", " ").strip()
    if "\n" in joined or len(joined) > _COMMAND_CHARACTERS:
        return "the command that reproduces it is in report.html"
    return code(joined, _COMMAND_CHARACTERS)


def _list(rows: Sequence[str], most: int) -> list[str]:
    if not rows:
        return []
    more = [f"- and {len(rows) - most} more, in report.html"] if len(rows) > most else []
    return [*(f"- {row}" for row in rows[:most]), *more, ""]


def _command(command: str) -> list[str]:
    if not command:
        return []
    lines = visible(command).split("\n")
    if len(lines) > _COMMAND_LINES or len(command) > _COMMAND_CHARACTERS:
        return ["The command that repeats this run is in report.html.", ""]
    return ["**Repeat this run**", "", *fenced(command, "sh")]
