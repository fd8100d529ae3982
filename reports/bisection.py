"""The documents of bisections: of layers and of sides."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.drivers.bisect.layer_task import LayerBisection
from assay.harness.drivers.bisect.sides_task import SidesBisection
from assay.harness.text import counted, few, one_line, ranges
from assay.harness.verdict import Finding
from assay.reports.document import MORE, Cell, Code, Document, Findings, Items, Line, Row, Section, Table
from assay.reports.wording.bisection import MEASURED, RIGHT
from assay.reports.wording.say import said_finding, say
from assay.reports.wording.written import worded_json

_STATUS = {"good": "pass", "bad": "regression", "skip": "warning"}
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


def _found(findings: Sequence[Finding]) -> list[Row]:
    """Return the rows of findings: what is wrong, and the command that shows it again."""
    rows = [
        Row("Finding" * (not n), one_line(said.sentence, 200)) for n, said in enumerate(map(said_finding, findings[:3]))
    ]
    return [*rows, *(Row("Next", Cell(finding.reproduce, code=True), "shows it again") for finding in findings[:1])]
