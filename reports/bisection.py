"""The documents of bisections: of layers, of sides and of commits."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.drivers.bisect.commits.state import BisectResult, BisectState, CommitInfo
from assay.harness.drivers.bisect.layer_task import LayerBisection
from assay.harness.drivers.bisect.sides_task import SidesBisection
from assay.harness.text import clip, counted, few, one_line, ranges
from assay.harness.verdict import Finding
from assay.reports.document import MORE, Block, Cell, Code, Document, Facts, Findings, Items, Line, Row, Section, Table
from assay.reports.page import TEXT_SHOWN
from assay.reports.wording.bisection import MEASURED, RIGHT
from assay.reports.wording.say import said_finding, say
from assay.reports.wording.written import worded_json

_COLUMNS = ("probe", "for", "commit", "outcome", "worst call, or why skipped", "seconds")
_STATUS = {"good": "pass", "bad": "regression", "skip": "warning"}
# Suspects that are listed, and those on the first screen.
_SUSPECTS, _SUSPECTS_FIRST = 100, 8
_SIDES_HEADINGS = {"found": "Broken by", "nothing": "Nothing is broken", "inconclusive": "No verdict"}
# Names of a list that are shown.
_NAMED = 3
_NOTHING = "–"
_HEADINGS = {"found": "Layers found", "nothing": "No layer needs the reference", "inconclusive": "No verdict"}


def layers_document(result: LayerBisection) -> Document:
    """The probes, the criterion they were judged by, and the finding with the command that reproduces it."""
    candidate = f"{one_line(result.candidate)} in layers"
    right = f"{RIGHT[result.by]} of {result.prompts}"
    columns = ("probe", candidate, right, "lost", "gained", "p (no loss)", "outcome")
    rows = [
        (
            str(number),
            ranges(probe.candidate),
            str(probe.right),
            str(probe.lost),
            str(probe.gained),
            f"{probe.p:.2g}",
            Cell(probe.outcome, "regression" if probe.outcome == "wrong" else "pass"),
        )
        for number, probe in enumerate(result.probes, 1)
    ]
    sets = len({probe.candidate for probe in result.probes})
    over = f"{counted(sets, 'set')} over {counted(len(result.layers), 'layer')}"
    title = f"Layer bisection by {result.by}: {counted(len(rows), 'probe')} of {over}"
    repeats = "until one outcome leads by two, at most five times" if result.floor or result.candidate_floor else "once"
    twice = (
        f"When asked twice, the reference changed {counted(result.floor, 'text')} and the candidate {result.candidate_floor}: "
        f"each set is probed {repeats}."
    )
    known = f"the reference is right on {result.known} of {counted(result.prompts, 'question')}"
    known += ", too few to detect a loss of answers" if result.by == "text" else ""
    return Document(
        command="bisect layers",
        title=result.candidate,
        verdict=None,
        exit_code=int(result.exit_code),
        headline=f"{_HEADINGS[result.outcome]}: {say(result.why)}",
        screen=[
            *_found(result.findings),
            *([Row("Probes", f"{counted(len(rows), 'probe')} of {over}, by {result.by}")] if rows else []),
            Row("Compared", f"by {result.by}; {known}"),
            *([Row("Asked twice", twice.removeprefix("When asked twice, "))] if rows else []),
            *([] if result.findings else [Row("Next", Cell(result.reproduce, code=True), "repeats this bisection")]),
            MORE,
        ],
        body=[
            *([Table(columns, rows, title, numbers=(0, 2, 3, 4, 5))] if rows else []),
            Line(
                f"Compared by {result.by} ({known}); the reference alone: {result.reference_right} of {result.prompts}."
            ),
            *([Line(twice)] if rows else []),
            Line(f"The candidate computes {' and '.join(result.phases)}."),
            Findings(result.findings),
            *([] if result.findings else [Code(result.reproduce, "Repeat this bisection")]),
        ],
        result=result,
        json=worded_json,
    )


def sides_document(result: SidesBisection) -> Document:
    """The differences that break the candidate, with the run that shows each set, and the probes."""
    count, seconds = len(result.differences), sum(probe.seconds for probe in result.probes)
    rows = [
        (
            str(number),
            _applied(probe.applied, count),
            Cell(probe.outcome, _STATUS[probe.outcome]),
            probe.problem or (MEASURED[probe.by] if probe.by else _NOTHING),
            _NOTHING if probe.value is None else f"{probe.value:.2g}",
            _NOTHING if probe.limit is None else f"{probe.limit:.2g}",
            f"{probe.seconds:.0f}",
        )
        for number, probe in enumerate(result.probes, 1)
    ]
    sets = len({probe.applied for probe in result.probes})
    columns = ("probe", "applied to the reference", "outcome", "by", "value", "limit", "seconds")
    unsteady = "Some sets came out both ways, so each was probed until one outcome led clearly."
    left = f"Packages that only the reference has stay in every probe: {few(result.left_out, _NAMED)}."
    probed = f"{counted(len(rows), 'probe')} of {counted(sets, 'set')} of {counted(count, 'difference')}"
    return Document(
        command="bisect sides",
        title=f"{counted(count, 'difference')} between two sides",
        verdict=None,
        exit_code=int(result.exit_code),
        headline=f"{_SIDES_HEADINGS[result.outcome]}: {', '.join(sum(result.sets, ())) or say(result.why)}",
        screen=[
            *_found(result.findings),
            Row("Probes", f"{probed}, {seconds / 60:.0f} min"),
            *([] if result.steady else [Row("Unsteady", unsteady)]),
            *([Row("Left out", left)] if result.left_out else []),
            *([] if result.findings else [Row("Next", Cell(result.reproduce, code=True), "repeats this bisection")]),
            Row("More", "--all prints the rest; the page has every probe"),
        ],
        body=[
            *([Line(say(result.why))] if result.sets else []),
            Findings(result.findings),
            *([] if result.steady else [Line(unsteady)]),
            *([Line(left)] if result.left_out else []),
            Section("Probes", [Table(columns, rows, probed, numbers=(0, 4, 5, 6))], "probes"),
            Section("Differences", [Items([each.label for each in result.differences])], "differences"),
            Code(result.reproduce, "Repeat this bisection"),
        ],
        result=result,
        json=worded_json,
    )


def _applied(names: Sequence[str], of: int) -> str:
    if len(names) in (0, of):
        return "all differences" if names else "nothing: the reference itself"
    return ", ".join(names) if len(names) <= _NAMED else f"{len(names)} of {of} differences"


def bisection_document(state: BisectState) -> Document:
    """The commit, its changes, and every probe."""
    result = state.result
    assert result is not None
    named, spec = result.outcome == "found", state.spec
    asked = [("kernel", spec.kernel), ("good", spec.good[:12]), ("bad", spec.bad[:12])]
    probes: list[Block] = [_probes(state), Code(state.command, "Repeat this bisection, in a new folder")]
    return Document(
        command="bisect commits",
        title=one_line(state.spec.kernel, 60),
        verdict="pass" if named else "inconclusive",
        word="Found" if named else "Ambiguous",
        headline=_headline(state, result),
        meaning=result.commit.subject if result.commit else "",
        screen=_screen(state, result),
        crumbs=[state.spec.repo],
        body=[
            Facts(
                [
                    *((name, Cell(value, code=True)) for name, value in asked),
                    ("classified by", "error, compared with the bound of each call"),
                ]
            ),
            _named(state, result),
            _bug(result),
            Section("Probes", [Line(_effort(state), "quiet"), Section("", probes, detail=True)], "probes"),
        ],
        foot=f"{state.schema_id}. Next to this file: report.json, the complete state.",
        result=state,
    )


def _found(findings: Sequence[Finding]) -> list[Row]:
    """Return the rows of findings: what is wrong, and the command that shows it again."""
    rows = [
        Row("Finding" * (not n), one_line(said.sentence, 200)) for n, said in enumerate(map(said_finding, findings[:3]))
    ]
    return [*rows, *(Row("Next", Cell(finding.reproduce, code=True), "shows it again") for finding in findings[:1])]


def _screen(state: BisectState, result: BisectResult) -> list[Row]:
    """Return the rows: the commit and what changed in it, or the suspects; what is wrong, and how it was probed."""
    rows: list[Row] = []
    if note := result.commit:
        changed = note.diffstat.strip().splitlines()[-1:]
        rows = [
            Row("Commit", one_line(note.subject, 120)),
            Row("", f"{note.commit[:12]} by {one_line(note.author, 60)}, {note.date}"),
            *(Row("Changed", one_line(line, 120)) for line in changed),
            Row("Checked", _checked(state, note)),
        ]
    for n, commit in enumerate([] if result.commit else result.suspects[:_SUSPECTS_FIRST]):
        rows.append(Row("Suspects" * (not n), f"{commit[:12]} {one_line(state.history[commit], 100)}"))
    if not result.commit and (more := len(result.suspects) - _SUSPECTS_FIRST) > 0:
        rows.append(Row("", f"and {more} more"))
    return [
        *rows,
        *_found(result.findings),
        Row("Probes", _effort(state).rstrip(".")),
        *([] if result.findings else [Row("Next", Cell(state.command, code=True), "repeats it in a new folder")]),
        Row("More", "--all prints the rest; the page has every probe"),
    ]


def _named(state: BisectState, result: BisectResult) -> Section:
    """The commit, or the suspects if none could be named."""
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


def _bug(result: BisectResult) -> Section:
    blocks: list[Block] = [Findings(result.findings)] if result.findings else [Line("Not diagnosed.", "empty")]
    if result.unclassified:
        blocks.append(Line(f"Note: {counted(result.unclassified, 'commit')} could not be classified."))
    return Section("What is wrong with it", blocks, "changed")


def _probes(state: BisectState) -> Table:
    rows = [
        (
            str(probe.number),
            probe.purpose.replace("-", " "),
            (Cell(probe.commit[:12], code=True), f" {one_line(state.history.get(probe.commit, ''), 60)}"),
            Cell(probe.came_out, _STATUS[probe.came_out]),
            one_line(probe.said),
            f"{probe.seconds:.1f}",
        )
        for probe in state.probes
    ]
    return Table(_COLUMNS, rows, numbers=(0, 5))


def _headline(state: BisectState, result: BisectResult) -> str:
    """The result in one sentence."""
    many = len(state.history)
    if result.outcome == "found":
        return f"{result.suspects[0][:12]} is the culprit among {counted(many, 'commit')}."
    return (
        f"The culprit is one of {len(result.suspects)} commits among {many}: the commits between them cannot be classified, "
        "so they are indistinguishable."
    )


def _effort(state: BisectState) -> str:
    """The number of probes, and how long each took."""
    seconds = sorted(probe.seconds for probe in state.probes)
    commits, skips = len({probe.commit for probe in state.probes}), sum(p.came_out == "skip" for p in state.probes)
    return (
        f"{counted(len(seconds), 'probe')} of {counted(commits, 'commit')}, {skips} of them skipped; "
        f"{seconds[len(seconds) // 2]:.2f} s each (median)."
    )
