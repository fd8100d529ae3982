"""The document of ``assay runs``: a folder of runs, the newest first."""

from __future__ import annotations

from assay.harness.judge.history import RunLine, RunList
from assay.harness.judge.report import OwnError
from assay.harness.text import counted, one_line, times
from assay.reports.document import Block, Cell, Document, Items, Line, Section, Table, Words
from assay.reports.summary import NOTHING, when
from assay.reports.wording.sides import sides_said

_COLUMNS = ("Begun", "Verdict", "What was compared", "Error", "Cause", "Folder")
# Rows that a terminal shows.
_MOST = 40


def runs_document(listed: RunList) -> Document:
    """List the runs with a verdict, newest first, and then those without a report."""
    judged = [run for run in listed.runs if run.verdict is not None]
    body: list[Block] = (
        [Table(_COLUMNS, list(map(_row, judged)), numbers=(3,), style="runs", most=_MOST)] if judged else []
    )
    body += [] if listed.runs else [Line(f"No run in {listed.folder}.")]
    if problems := [f"{one_line(run.folder, 200)}: {one_line(run.problem, 300)}" for run in listed.runs if run.problem]:
        body.append(Section("Without a report", [Items(problems, most=20)], "unread"))
    cause = f": {one_line(judged[0].cause, 400)}" if judged and judged[0].cause else ""
    return Document(
        command="runs",
        title=one_line(listed.folder, 60),
        verdict=judged[0].verdict if judged else None,
        exit_code=0,
        word=counted(len(listed.runs), "run"),
        headline=f"The newest: {judged[0].verdict}{cause}." if judged else "None of them has a verdict.",
        crumbs=[f"in {one_line(listed.folder, 120)}"],
        body=body,
        foot=f"{listed.schema_id}.",
        result=listed,
    )


def _row(run: RunLine) -> tuple[Words, ...]:
    verdict = run.verdict or ""
    words = (_treatment(run), _worst_text(run.worst), one_line(run.cause, 60) or NOTHING, one_line(run.folder, 200))
    return (when(run.created), Cell(verdict, verdict, sign=run.verdict), *words)


def _treatment(run: RunLine) -> str:
    """Describe the comparison: "sage_attn against torch_native, tiny on cpu"."""
    where = f"{run.model or NOTHING} on {run.device}" if run.device else run.model or NOTHING
    candidate, reference = sides_said(run.treatment, run.reference, run.candidate)
    return one_line(f"{candidate}{f' against {reference}' if reference else ''}, {where}", 120)


def _worst_text(worst: OwnError) -> str:
    """Format the worst own error as a multiple of its bound: "140 ×", "2,400,000 ×", "not finite", or a dash if unobserved."""
    if not isinstance(worst, float):
        return worst or NOTHING
    return times(worst)
