"""The document of a layer bisection: every probe, the layers that must run the reference, and the finding."""

from __future__ import annotations

from assay.harness.drivers.bisect.layer_task import LayerBisection
from assay.harness.text import one_line, ranges
from assay.reports.document import Cell, Code, Document, Findings, Line, Table
from assay.reports.wording.bisection import RIGHT
from assay.reports.wording.say import say
from assay.reports.wording.written import worded_json

_HEADINGS = {"found": "Layers found", "nothing": "No layer needs the reference", "inconclusive": "No verdict"}


def layers_document(result: LayerBisection) -> Document:
    """The probes, what they were judged by, and the finding with the command that reproduces it."""
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
    title = f"Layer bisection by {result.by}: {len(rows)} probes of {sets} sets over {len(result.layers)} layers"
    repeats = "until one outcome leads by two, at most five times" if result.floor or result.candidate_floor else "once"
    twice = (
        f"When asked twice, the reference changed {result.floor} texts and the candidate {result.candidate_floor}: "
        f"each set is probed {repeats}."
    )
    known = f"the reference is right on {result.known} of {result.prompts} questions"
    known += ", too few to detect a loss of answers" if result.by == "text" else ""
    return Document(
        command="bisect layers",
        title=result.candidate,
        verdict=None,
        exit_code=int(result.exit_code),
        headline=f"{_HEADINGS[result.outcome]}: {say(result.why)}",
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
