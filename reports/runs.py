"""The document of ``assay runs``: a folder of runs, with the history of each treatment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from assay.harness.judge.history import RunLine, RunList
from assay.harness.judge.report import NOT_FINITE, OwnError
from assay.harness.sides import differing
from assay.harness.text import counted, one_line, two_digits
from assay.harness.verdict import WORST_FIRST
from assay.reports.document import Block, Cell, Document, Items, Line, Section
from assay.reports.summary import NOTHING, SIGNS, when

# Runs that a history shows: the last of them.
_STRIP = 40
# Treatments that a terminal shows, of more: those that ran last.
_MOST_TREATMENTS = 40
_LEVELS = "▁▂▃▄▅▆▇█"
# Multiples of the bound at which the next level begins: the first two are within bounds.
_LEVEL_OF = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0)
# A run without that suite, or without an own error.
_DOT = "·"


def runs_document(listed: RunList) -> Document:
    """List each treatment with its runs, newest first, and its history by suite, oldest first; then the runs without a report."""
    newest = next((run for run in listed.runs if run.verdict is not None), None)
    against = f" against {one_line(newest.reference, 80)}" if newest and newest.reference else ""
    treated = f"{one_line(newest.candidate, 80)}{against}" if newest else ""
    body: list[Block] = [Line(f"No run in {listed.folder}.")] if not listed.runs else []
    histories = listed.histories
    latest = [history[-1] for history in histories]
    for number, history in enumerate(histories[:_MOST_TREATMENTS], 1):
        body.append(Section(_treatment(history[0]), _brief(history), f"treatment-{number}"))
    if (left := len(histories) - _MOST_TREATMENTS) > 0:
        body.append(Line(f"… and {counted(left, 'treatment')}: see --json"))
    if problems := [
        f"{one_line(run.folder, 200)}: {one_line(run.problem, 300)}" for run in listed.runs if run.verdict is None
    ]:
        body.append(Section("Without a report", [Items(problems, most=20)], "unread"))
    counts = Counter(run.verdict for run in latest)
    now = ", ".join(f"{counts[verdict]:,} {verdict}" for verdict in WORST_FIRST if counts[verdict])
    return Document(
        command="runs",
        title=one_line(listed.folder, 60),
        verdict=min((run.verdict for run in latest if run.verdict), key=WORST_FIRST.index, default=None),
        exit_code=0,
        word=counted(len(listed.runs), "run"),
        headline=f"The newest of each treatment: {now}."
        if len(latest) > 1
        else f"The newest: {newest.verdict}{f': {one_line(newest.cause, 400)}' if newest.cause else ''}."
        if newest
        else "None of them has a verdict.",
        meaning=f"{when(newest.created)}, {treated}." if newest else "",
        crumbs=[f"in {one_line(listed.folder, 120)}"],
        body=body,
        foot=f"{listed.schema_id}.",
        result=listed,
    )


def _where(run: RunLine) -> str:
    """Return the model of a run and its device: "tiny on cpu"."""
    return one_line(f"{run.model or NOTHING} on {run.device}" if run.device else run.model or NOTHING, 120)


def _treatment(run: RunLine) -> str:
    """Return what was compared: "sage_attn against torch_native, tiny on cpu"."""
    words = differing({name: pair for name, pair in run.treatment.items() if name != "backend"})
    settings = f" ({words})" if words else ""
    against = f" against {run.reference}" if run.reference else ""
    return one_line(f"{run.candidate}{against}{settings}, {_where(run)}", 120)


def _worst_text(worst: OwnError) -> str:
    """The worst own error as a multiple of its bound: "140x", "2.4 million x"; "not finite"; a dash where none was observed."""
    if not isinstance(worst, float):
        return worst or NOTHING
    digits = two_digits(worst)
    return f"{digits} x" if digits[-1].isalpha() else f"{digits}x"


def _level(worst: OwnError) -> str:
    """Return how far an own error is from its bound, as a bar of eight heights; a dot where none was observed."""
    if worst is None:
        return _DOT
    return _LEVELS[sum(worst == NOT_FINITE or worst >= least for least in _LEVEL_OF)]


def _brief(history: Sequence[RunLine]) -> list[Block]:
    """For a terminal: two lines for each run, and for each suite a strip with a character for each run."""
    lines: list[Block] = []
    for run in reversed(history):
        assert run.verdict is not None
        verdict = Cell(f"{SIGNS[run.verdict]} {run.verdict:<12} ", run.verdict)
        rest = f"own error {_worst_text(run.worst):<10} {one_line(run.folder, 200)}"
        lines.append(Line((f"  {when(run.created)}  ", verdict, rest)))
        lines += [Line(f"{'':24}{one_line(run.cause, 58)}", "quiet")] if run.cause else []
    last = history[-_STRIP:]
    if len(history) > 1:
        strips = [("verdict", [run.verdict for run in last])]
        names = dict.fromkeys(name for run in reversed(last) for name in run.suites)
        strips += [(name, [run.suites.get(name) for run in last]) for name in names]
        for name, verdicts in strips:
            signs = [_DOT if verdict is None else Cell(SIGNS[verdict], verdict) for verdict in verdicts]
            lines.append(Line((f"  {name:<12} ", *signs)))
        if any(run.worst is not None for run in last):
            lines.append(Line(f"  {'own error':<12} {''.join(_level(run.worst) for run in last)}"))
        key = "oldest to newest; own error: ▁▂ within its bound, █ 100x or more"
        lines.append(Line(f"  {'':<12} {key}", "quiet"))
    return lines
