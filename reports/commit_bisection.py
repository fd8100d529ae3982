"""The document of a commit bisection."""

from __future__ import annotations

import math

from assay.harness.drivers.bisect.commits.state import BisectResult, BisectState, CommitInfo, Measurement, ProbeOutcome
from assay.harness.text import clip, counted, one_line, percent, some
from assay.reports.document import Block, Cell, Code, Document, Facts, Findings, Items, Line, Section, Table
from assay.reports.page import TEXT_SHOWN

_COLUMNS = ("probe", "for", "commit", "outcome", "error / bound", "where, or why skipped", "seconds")
_STATUS = {"good": "pass", "bad": "regression", "skip": "warning"}
_SUSPECTS = 100


def bisection_document(state: BisectState) -> Document:
    """The commit, what changed in it, and every probe."""
    result = state.result
    assert result is not None
    named, spec = result.outcome == "found", state.spec
    asked = [("kernel", spec.kernel), ("good", spec.good[:12]), ("bad", spec.bad[:12])]
    by = "an assay run" if spec.measure_with == "accuracy" else "own error, compared with the bound of each call"
    probes: list[Block] = [_probes(state), Code(state.command, "Repeat this bisection, in a new folder")]
    return Document(
        command="bisect commits",
        title=one_line(state.spec.kernel, 60),
        verdict="pass" if named else "inconclusive",
        word="Found" if named else "Ambiguous",
        headline=_headline(state, result),
        meaning=result.commit.subject if result.commit else "",
        crumbs=[state.spec.repo],
        body=[
            Facts([*((name, Cell(value, code=True)) for name, value in asked), ("classified by", by)]),
            _named(state, result),
            _changed(result),
            Section("Probes", [Line(_effort(state), "quiet"), Section("", probes, detail=True)], "probes"),
        ],
        foot=f"{state.schema_id}. Next to this file: report.json, the complete state, and probes/, the measurement of each.",
        result=state,
    )


def _named(state: BisectState, result: BisectResult) -> Section:
    """The commit; the suspects where none could be named."""
    if (note := result.commit) is None:
        suspects = [
            (Cell(commit[:12], code=True), f" {one_line(state.history[commit])}")
            for commit in result.suspects[:_SUSPECTS]
        ]
        return Section("Suspects", [Items(suspects, ordered=True)], "suspects")
    blocks: list[Block] = [
        Line(note.subject, "deciding"),
        Line((Cell(note.commit, code=True), f" by {note.author}, {note.date}"), "quiet"),
        *([Code(clip(note.body, TEXT_SHOWN), "Message")] if note.body else []),
        Code(clip(note.diffstat, TEXT_SHOWN), "Changed"),
        Line(f"Checked: {_checked(state, note)}."),
    ]
    return Section("The commit", blocks, "commit")


def _checked(state: BisectState, named: CommitInfo) -> str:
    """Say how the commit and its parents were classified."""
    shown = [(named.commit, "the commit"), *((parent, f"its parent {parent[:12]}") for parent in named.parents)]
    return "; ".join(f"{what} was {', '.join(state.outcomes(commit)) or 'not probed'}" for commit, what in shown)


def _changed(result: BisectResult) -> Section:
    lines: list[Block] = [Line(line) for line in _newly(result)] or [Line("Not measured.", "empty")]
    named = [Findings(result.findings)] if result.findings else []
    notes = []
    if more := "; ".join(f"{change.axis} {', '.join(change.new)}" for change in result.later):
        notes.append(f"the bad revision also fails where this commit does not ({more}): there is another regression")
    if result.unclassified:
        notes.append(f"{counted(result.unclassified, 'commit')} could not be classified")
    return Section("What changed in it", [*lines, *named, *(Line(f"Note: {note}.") for note in notes)], "changed")


def _probes(state: BisectState) -> Table:
    rows = [
        (
            str(probe.number),
            probe.purpose.replace("-", " "),
            (Cell(probe.commit[:12], code=True), f" {one_line(state.history.get(probe.commit, ''), 60)}"),
            Cell(probe.outcome, _STATUS[probe.outcome]),
            _error(probe) or "–",
            one_line(_where(probe) or _reason(probe)),
            f"{probe.seconds:.1f}",
        )
        for probe in state.probes
    ]
    return Table(_COLUMNS, rows, numbers=(0, 4, 6))


def _headline(state: BisectState, result: BisectResult) -> str:
    """The result in one sentence."""
    many = len(state.history)
    if result.outcome == "found":
        return f"{result.suspects[0][:12]} is the culprit among {many} commits."
    return (
        f"The culprit is one of {len(result.suspects)} commits among {many}: the commits between them cannot be classified, "
        "so they are indistinguishable."
    )


def _newly(result: BisectResult) -> list[str]:
    """Return what fails at the commit but not before it; axes on which all values do share a line."""
    lines = []
    complete = []
    for change in result.changes:
        if not change.new:
            continue
        if change.axis in ("layer", "head"):
            chosen, of = [int(v) for v in change.new], [int(v) for v in change.values]
            lines.append(f"Newly out of bounds: {some(change.axis, chosen, of)}.")
        elif change.new == change.values:
            complete.append(change.axis)
        else:
            rest = [v for v in change.values if v not in change.failing]
            right = f"; never at {', '.join(rest)}" if rest else ""
            lines.append(f"Newly out of bounds at {change.axis} {', '.join(change.new)}{right}.")
    return [*lines, *([f"Newly out of bounds at every value of: {', '.join(complete)}."] if complete else [])]


def _effort(state: BisectState) -> str:
    """The number of probes, and what one took."""
    seconds = sorted(probe.seconds for probe in state.probes)
    commits, skips = len({probe.commit for probe in state.probes}), sum(p.outcome == "skip" for p in state.probes)
    return (
        f"{counted(len(seconds), 'probe')} of {counted(commits, 'commit')}, {skips} of them skipped; "
        f"{seconds[len(seconds) // 2]:.2f} s each (median)."
    )


def probe_line(outcome: ProbeOutcome, measured: Measurement) -> str:
    """The outcome of a single probe, in one line."""
    says = _reason(outcome)
    if outcome.worst is not None:
        worst = _error(outcome) + (" times its bound" if math.isfinite(outcome.worst) else "")
        says = f"worst own error {worst}, {_where(outcome)}"
    return f"{outcome.outcome}: {says} ({measured.origin or 'not imported'})"


def _where(probe: ProbeOutcome) -> str:
    """The call and head of a probe's worst error, and that error; empty if it has none."""
    return "" if probe.own is None else f"{probe.where}: own error {percent(probe.own)}"


def _reason(probe: ProbeOutcome) -> str:
    """Why there is no error; empty if there is one, or if a run decided."""
    if probe.status == "measured":
        return ""
    return "no call was computed" if probe.status == "no call" else f"{probe.status}: {probe.reason}"


def _error(probe: ProbeOutcome) -> str:
    """A probe's worst error as a multiple of its bound; empty if it has none."""
    if probe.worst is None:
        return ""
    return "not finite" if not math.isfinite(probe.worst) else f"{probe.worst:.3g}"
