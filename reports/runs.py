"""The document of ``assay runs``: a folder of runs, with the history of each treatment."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from urllib.parse import quote

from assay.harness.history.rows import SHOWN, STAGE, settings_of
from assay.harness.history.trend import Trend
from assay.harness.judge.history import RunLine, RunList, Worst
from assay.harness.judge.report import NOT_FINITE
from assay.harness.sides import differing
from assay.harness.text import counted, one_line, two_digits
from assay.harness.verdict import WORST_FIRST
from assay.reports.document import (
    Block,
    Cell,
    Document,
    Items,
    Line,
    Matrix,
    Only,
    Records,
    Section,
    Table,
    Words,
    more,
)
from assay.reports.summary import NOTHING, SIGNS, when
from assay.reports.trend import trend_sections

_STRIP = 40
"""Runs that a history shows: the last of them."""
_FEW_TREATMENTS, _FEW_RUNS = 12, 200
"""Up to so many, each treatment has a section of its own on a page."""
_MOST_TREATMENTS = 40
"""Treatments that a terminal shows, of more: those that ran last."""
_WIDE = 12
"""Columns of a matrix whose cells have room for more than a sign."""
_LEVELS = "▁▂▃▄▅▆▇█"
_LEVEL_OF = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0)
"""Multiples of the bound at which the next level begins: the first two are within bounds."""
_DOT = "·"
"""A run without that suite, or without an own error."""


def runs_document(
    listed: RunList, beside: Path, trends: Sequence[Trend] = (), links: Mapping[str, str] | None = None
) -> Document:
    """Each treatment with its runs, newest first, and its history by suite, oldest first; then what has no report.

    A page begins with a matrix of verdicts by model and candidate. With many treatments or runs, it has one list of all runs
    instead, which can be searched. With few, its verdict is the worst of the newest runs of the treatments.

    Args:
        listed: the runs.
        beside: the folder of the page, from which its links lead to the runs' own pages.
        trends: of the same runs, for the page.
        links: where the page of a run is, by its folder; by default beside its evidence.
    """
    newest = next((run for run in listed.runs if run.verdict is not None), None)
    unread = [run for run in listed.runs if run.verdict is None]
    against = f" against {one_line(newest.reference, 80)}" if newest and newest.reference else ""
    treated = f"{one_line(newest.candidate, 80)}{against}" if newest else ""
    body: list[Block] = [Only("terminal", [Line(f"No run in {listed.folder}.")])] if not listed.runs else []
    histories = listed.histories
    many = len(histories) > _FEW_TREATMENTS or len(listed.runs) > _FEW_RUNS
    latest = [history[-1] for history in histories]
    if len(histories) > 1:
        body.append(Only("page", [Section("matrix", "The newest of each treatment", [_matrix(latest)])]))
    body.append(Only("page", trend_sections(trends)))
    for number, history in enumerate(histories[:_MOST_TREATMENTS] if many else histories, 1):
        shown: list[Block] = [] if many else [*_history(history), _table(history, beside, links)]
        section = Section(
            f"treatment-{number}", _treatment(history[0]), [*_brief(history), Only("page", shown)], announced=True
        )
        body.append(Only("terminal", [section]) if many else section)
    if many:
        body += more(len(histories) - _MOST_TREATMENTS, "treatment")
        body.append(Only("page", [Section("runs", "Runs", [_records(listed, beside, links)])]))
    elif unread:
        body.append(Section("unread", "Without a report", [Items(_unread(unread))], announced=True))
    if many and unread:
        body.append(
            Only("terminal", [Section("unread", "Without a report", [Items(_unread(unread), most=20)], announced=True)])
        )
    verdicts = [run.verdict for run in latest if run.verdict]
    counts = Counter(verdicts)
    now = ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in WORST_FIRST if counts[verdict])
    return Document(
        command="runs",
        title=one_line(listed.folder, 60),
        verdict=None if many else min(verdicts, key=WORST_FIRST.index, default=None),
        exit_code=0,
        word=f"{len(listed.runs):,} runs" if many else counted(len(listed.runs), "run"),
        headline=f"The newest of each treatment: {now}."
        if len(latest) > 1
        else f"The newest: {one_line(newest.headline, 400)}"
        if newest
        else "None of them has a verdict.",
        meaning=f"{when(newest.created)}, {treated}." if newest else "",
        crumbs=[f"in {one_line(listed.folder, 120)}"],
        body=body,
        foot=f"{listed.schema_id}.",
        result=listed,
    )


def _unread(runs: Sequence[RunLine]) -> list[str]:
    return [f"{one_line(run.folder, 200)}: {one_line(run.problem, 300)}" for run in runs]


def _row_of(run: RunLine) -> str:
    """Return the row of a run in the matrix: "tiny on cpu"."""
    return one_line(f"{run.model or NOTHING} on {run.device}" if run.device else run.model or NOTHING, 120)


def _column_of(run: RunLine, references: Set[str]) -> str:
    """Return the column of a run in the matrix: its candidate, with its settings, and its reference where there are several."""
    others = {name: values for name, values in run.treatment.items() if name not in ("backend", STAGE)}
    settings = f" {differing(others)}" if others else ""
    against = f" against {run.reference}" if len(references) > 1 and run.reference else ""
    return one_line(f"{run.candidate or NOTHING}{settings}{against}", 120)


def _matrix(latest: Sequence[RunLine]) -> Matrix:
    """The newest run of each treatment: its verdict, the worst where a cell stands for several."""
    references = {run.reference for run in latest}
    rows, columns = sorted({_row_of(run) for run in latest}), sorted({_column_of(run, references) for run in latest})
    by_cell: dict[tuple[str, str], list[RunLine]] = {}
    for run in latest:
        by_cell.setdefault((_row_of(run), _column_of(run, references)), []).append(run)
    return Matrix(
        "model, candidate",
        rows,
        columns,
        [[_cell(by_cell.get((row, column), []), len(columns) <= _WIDE) for column in columns] for row in rows],
    )


def _cell(runs: Sequence[RunLine], wide: bool) -> Cell | None:
    """A cell of the matrix: the sign of its verdict, and where there is room, the worst own error."""
    if not runs:
        return None
    worst = min(runs, key=lambda run: WORST_FIRST.index(run.verdict or "error"))
    assert worst.verdict is not None
    own = f" {worst_text(worst.worst)}" if wide and worst.worst is not None else ""
    return Cell(f"{SIGNS[worst.verdict]}{own}", worst.verdict)


def _records(listed: RunList, beside: Path, links: Mapping[str, str] | None) -> Records:
    references = {run.reference for run in listed.runs if run.verdict}
    rows = [
        (
            _row_of(run), _column_of(run, references), run.verdict or "", when(run.created) if run.created else "",
            worst_text(run.worst), one_line(run.cause or run.headline or run.problem, 120),
            one_line(run.folder.removeprefix(listed.folder).lstrip("/") or run.folder, 200),
        )
        for run in listed.runs
    ]  # fmt: skip
    columns = ("Model", "Candidate", "Verdict", "Date", "Worst own error", "Why", "Folder")
    return Records("Runs", columns, rows, (0, 1, 2), 2, [_link(run, beside, links) for run in listed.runs])


def _treatment(run: RunLine) -> str:
    """Return what was compared: "sage_attn against torch_native, tiny on cpu"."""
    words = settings_of(run.treatment)
    settings = f" ({words})" if words else ""
    against = f" against {run.reference}" if run.reference else ""
    return one_line(f"{run.candidate}{against}{settings}, {_row_of(run)}", 120)


def worst_text(worst: Worst | None) -> str:
    """The worst own error as a multiple of its bound: "140x", "2.4 million x"; "not finite"; a dash where none was observed."""
    if worst is None:
        return NOTHING
    if worst.error == NOT_FINITE:
        return NOT_FINITE
    if worst.multiple is None:
        return NOTHING
    digits = two_digits(worst.multiple)
    return f"{digits} x" if digits[-1].isalpha() else f"{digits}x"


def _level(worst: Worst | None) -> str:
    """Return how far an own error is from its bound, as a bar of eight heights; a dot where none was observed."""
    if worst is None:
        return _DOT
    multiple = math.inf if worst.error == NOT_FINITE else worst.multiple
    return _DOT if multiple is None else _LEVELS[sum(multiple >= least for least in _LEVEL_OF)]


def _suites(history: Sequence[RunLine]) -> list[str]:
    return list(dict.fromkeys(name for run in reversed(history) for name in run.suites))


def _brief(history: Sequence[RunLine]) -> list[Block]:
    """For a terminal: two lines for each run, and for each suite a strip with a character for each run."""
    lines: list[Block] = []
    for run in reversed(history):
        assert run.verdict is not None
        verdict = Cell(f"{SIGNS[run.verdict]} {run.verdict:<12} ", run.verdict)
        rest = f"own error {worst_text(run.worst):<10} {one_line(run.folder, 200)}"
        lines.append(Line((f"  {when(run.created)}  ", verdict, rest)))
        lines += [Line(f"{'':24}{one_line(run.cause, 58)}", "quiet")] if run.cause else []
    last = history[-_STRIP:]
    if len(history) > 1:
        strips = [("verdict", [run.verdict for run in last])]
        strips += [(name, [run.suites.get(name) for run in last]) for name in _suites(last)]
        for name, verdicts in strips:
            signs = [_DOT if verdict is None else Cell(SIGNS[verdict], verdict) for verdict in verdicts]
            lines.append(Line((f"  {name:<12} ", *signs)))
        if any(run.worst for run in last):
            lines.append(Line(f"  {'own error':<12} {''.join(_level(run.worst) for run in last)}"))
        key = "oldest to newest; own error: ▁▂ within its bound, █ 100x or more"
        lines.append(Line(f"  {'':<12} {key}", "quiet"))
    return [Only("terminal", lines)]


def _history(history: Sequence[RunLine]) -> list[Block]:
    if len(history) == 1:
        return []
    last = history[-_STRIP:]
    rows: list[tuple[Words, ...]] = []
    for suite in _suites(history):
        verdicts = [run.suites.get(suite) for run in last]
        rows.append(
            (one_line(suite, 30), *(_DOT if verdict is None else Cell(verdict, sign=verdict) for verdict in verdicts))
        )
    rows.append(("worst own error", *(f"{worst_text(run.worst)} {_level(run.worst)}" for run in last)))
    columns = ("Suite", *(when(run.created)[5:16] for run in last))
    note = "Own error as a multiple of its bound; at most 1x is within it. A dot: the run had no such suite."
    return [Table(columns, rows, "History, oldest to newest", note, style="history")]


def _table(history: Sequence[RunLine], beside: Path, links: Mapping[str, str] | None) -> Table:
    rows: list[tuple[Words, ...]] = []
    for run in reversed(history):
        headline = one_line(run.headline, 200)
        why = Cell(one_line(run.cause, 100), "strong", note=headline) if run.cause else headline
        verdict, folder = run.verdict or "", Cell(one_line(run.folder, 200), code=True, link=_link(run, beside, links))
        own = worst_text(run.worst)
        rows.append((when(run.created), f"{run.seconds:,.0f} s", Cell(verdict, verdict), own, why, folder))
    return Table(
        ("Date", "Took", "Verdict", "Worst own error", "Why", "Folder"), rows, numbers=(1,), style="runs stacked"
    )


def _link(run: RunLine, beside: Path, links: Mapping[str, str] | None) -> str:
    """The address of a run's page relative to this one; empty where it has none."""
    if links is not None:
        return quote(links.get(run.folder, ""))
    page = next((page for name in SHOWN if (page := Path(run.folder) / name).is_file()), None)
    return quote(os.path.relpath(page.resolve(), beside.resolve())) if page else ""
