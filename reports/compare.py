"""The documents of ``assay compare``: two results of a tool, and runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from assay.harness.ingest.results.comparison import (
    AnswerFlip,
    ComparedLatency,
    ComparedSide,
    ComparedTask,
    CompareResult,
    HeadMaps,
    RunCell,
    RunRow,
    RunsComparison,
)
from assay.harness.judge.report import ErrorGrid
from assay.harness.text import counted, one_line
from assay.harness.verdict import exit_code_of
from assay.reports.document import (
    Block,
    CaseResult,
    Cell,
    Checks,
    Code,
    Document,
    Facts,
    Fold,
    HeatMaps,
    Items,
    Line,
    Only,
    Section,
    Suite,
    Table,
    Words,
    more,
)
from assay.reports.runs import worst_text
from assay.reports.summary import SIGNS, when

_SHOWN, FLIPS_SHOWN, _ROWS_SHOWN, _MOST_MAPS = 20, 5, 12, 24
"""Rows of each kind, flips, and rows of a group that the terminal shows; heat maps that the page draws."""
_TASK_COLUMNS = ("task", "metric", "pairs", "A", "B", "lost", "gained", "loss in points", "McNemar p", "verdict")
_LATENCY_COLUMNS = ("quantity", "requests", "A", "B", "ratio", "verdict")


def compare_document(result: CompareResult) -> Document:
    """Both sides, the tables, what changed, the checks, and the verdict, which a terminal shows last."""
    reasons = [one_line(reason, 700) for reason in result.reasons]
    closing: list[Block] = [Items(reasons[1:]), Line(f"  {result.covers}")]
    repeat: list[Block] = [Code(result.reproduce, "Repeat this comparison")] if result.reproduce else []
    body: list[Block] = [
        Facts([_side(side) for side in (result.a, result.b)]),
        *([Only("page", [Section("reasons", "Reasons", [Items(reasons)])])] if len(reasons) > 1 else []),
        *_scores(result),
        *_times(result),
        *_flips(result),
        *_outcomes(result),
        Section("checks", "Checks", [Checks(result.checks), Only("page", [Line(result.covers), *repeat])]),
        Only("terminal", closing),
    ]
    cases = [CaseResult("verdict", "assay.compare", result.verdict, result.headline, [*result.reasons, result.covers])]
    cases += [CaseResult(task.task, "assay.compare.tasks", task.verdict, task.why, [task.why]) for task in result.tasks]
    cases += [
        CaseResult(latency.id, "assay.compare.latencies", latency.verdict, latency.why, [latency.why])
        for latency in result.latencies
    ]
    cases += [CaseResult.of(check, "assay.compare.checks") for check in result.checks]
    return Document(
        command="compare",
        title=one_line(result.b.path, 60),
        verdict=result.verdict,
        headline=one_line(result.headline, 700),
        body=body,
        created=result.created,
        suites=[_suite(result, {"A": result.a.path, "B": result.b.path}, cases)],
        result=result,
    )


def _suite(result: CompareResult | RunsComparison, named: dict[str, str], cases: Sequence[CaseResult]) -> Suite:
    code = str(int(exit_code_of(result.verdict)))
    return Suite("assay compare", cases, {"verdict": result.verdict, "exit_code": code, **named})


def _side(side: ComparedSide) -> tuple[Words, ...]:
    known = " ".join(part for part in (side.tool, side.version, side.model) if part)
    read = f"{counted(side.read, side.unit)} read, {side.unread:,} not"
    notes = [one_line(note, 300) for note in side.notes]
    return (side.name, Cell(one_line(side.path, 120), code=True), one_line(f"{known}: {read}", 300), *notes)


def _scores(result: CompareResult) -> list[Block]:
    if not result.tasks:
        return []
    whole = [result.overall] if result.overall and len(result.tasks) > 1 else []
    rows = [_task(task) for task in [*result.tasks, *whole]]
    refused: list[Block] = [
        Line(f"{one_line(task.task, 60)}: {one_line(task.why, 600)}", "quiet") for task in result.tasks if task.refused
    ]
    table = Table(_TASK_COLUMNS, rows, most=_SHOWN)
    return [Section("scores", "Scores", [table, Only("page", refused)], announced=True)]


def _times(result: CompareResult) -> list[Block]:
    if not result.latencies:
        return []
    why = Items([f"{latency.title}: {latency.why}" for latency in result.latencies])
    table = Table(_LATENCY_COLUMNS, [_latency(latency) for latency in result.latencies])
    return [Section("latency", "Latency, B over A", [table, Only("page", [why])], announced=True)]


def _flips(result: CompareResult) -> list[Block]:
    if not result.flips:
        return []
    shown: list[Block] = []
    for flip in result.flips[:FLIPS_SHOWN]:
        what = repr(flip.question[:80]) if flip.question else flip.key[:16]
        words = f"{flip.direction}: {flip.task} {what}, expected {flip.target!r}: A {flip.a!r}, B {flip.b!r}"
        shown.append(Line(one_line(words, 300)))
    changed = result.overall.lost + result.overall.gained if result.overall else 0
    first: list[Block] = [Line(f"The first {len(result.flips)}.", "quiet")] if changed > len(result.flips) else []
    blocks = [Only("page", [*first, _flips_table(result.flips, "B")]), Only("terminal", shown)]
    return [Section("flips", "Flips", [*blocks, *more(changed - FLIPS_SHOWN, "more flip")])]


def _flips_table(flips: Sequence[AnswerFlip], name: str) -> Table:
    """The questions that one side got right and the other did not."""
    rows = []
    for flip in flips:
        task = one_line(flip.task, 40)
        what = (
            Cell(one_line(flip.question, 200), note=task)
            if flip.question
            else f"{task} {one_line(flip.key, 20)}".strip()
        )
        said = (one_line(flip.target, 80), one_line(flip.a, 200), one_line(flip.b, 200))
        rows.append((what, Cell(flip.direction, flip.direction), *said))
    return Table(("Question", "", "Expected", "A", name), rows, style="stacked")


def _outcomes(result: CompareResult) -> list[Block]:
    if not result.outcomes:
        return []
    rows = [(one_line(outcome.test, 200), outcome.a, outcome.b) for outcome in result.outcomes]
    return [
        Section("tests", "Tests with another outcome", [Table(("Test", "A", "B"), rows, most=_SHOWN)], announced=True)
    ]


def _task(task: ComparedTask) -> tuple[str, ...]:
    if not task.pairs:
        refused = "refused" if task.refused else task.verdict
        return (one_line(task.task, 60) or "all tasks", one_line(task.metric, 40), "0", *[""] * 6, refused)
    return (
        one_line(task.task, 60) or "all tasks",
        one_line(task.metric, 40),
        f"{task.pairs:,}",
        f"{task.a:.4f}",
        f"{task.b:.4f}",
        f"{task.lost:,}",
        f"{task.gained:,}",
        f"{100 * task.loss + 0.0:.2f} ({100 * task.low:.1f} to {100 * task.high:.1f})",
        f"{task.p_mcnemar:.2g}",
        task.verdict,
    )


def _latency(latency: ComparedLatency) -> tuple[str, ...]:
    ends = "" if latency.low is None or latency.high is None else f" ({latency.low:.3f} to {latency.high:.3f})"
    ratio = "not measured" if latency.ratio is None else f"{latency.ratio:.3f}{ends}"
    return (latency.title, f"{latency.pairs:,}", _ms(latency.a_median), _ms(latency.b_median), ratio, latency.verdict)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f} ms"


def runs_compared_document(result: RunsComparison) -> Document:
    """The runs, the rows in which they differ, the flips of each beside A, and what each is beside A."""
    cases = []
    for run, pair in zip(result.runs[1:], result.pairs, strict=True):
        reasons = [run.sentence, *pair.reasons[1:], result.covers]
        cases.append(CaseResult(run.name, "assay.compare", pair.verdict, run.sentence, reasons))
        cases += [CaseResult.of(check, f"assay.compare.{run.name}.checks") for check in pair.checks]
    grids = [grid for maps in result.maps for grid in _named(result, maps)][:_MOST_MAPS]
    repeat: list[Block] = [Code(result.reproduce, "Repeat this comparison")] if result.reproduce else []
    body: list[Block] = [
        *_runs(result),
        *(_group(result, group, grids) for group in dict.fromkeys(row.group for row in result.rows)),
        *_equal(result),
        *_beside(result),
        Section("covers", "What this covers", [Line(f"  {result.covers}"), Only("page", repeat)]),
    ]
    return Document(
        command="compare",
        title=f"{len(result.runs)} runs side by side",
        verdict=result.verdict,
        headline=one_line(result.headline, 700),
        body=body,
        created=result.created,
        suites=[_suite(result, {run.name: run.run.folder for run in result.runs}, cases)],
        result=result,
    )


def _runs(result: RunsComparison) -> list[Block]:
    cards: list[tuple[Words, ...]] = []
    lines: list[Block] = []
    for entry in result.runs:
        run, verdict = entry.run, entry.run.verdict or "error"
        about = f"{run.candidate} against {run.reference}, {when(run.created)}, {run.folder}"
        lines.append(
            Line((f"{entry.name}  ", Cell(f"{SIGNS[verdict]} {verdict}", verdict), f"  {one_line(about, 300)}"))
        )
        lines += [Line(f"   {one_line(run.cause, 300)}", "quiet")] if run.cause else []
        own = f"Worst own error {worst_text(run.worst)}{' its bound' if run.worst and run.worst.multiple is not None else ''}."
        card: list[Words] = [Cell(f"{entry.name} {when(run.created)}"), Cell(verdict, verdict)]
        card.append(f"{one_line(run.candidate, 80)} against {one_line(run.reference, 80)}")
        card += [Cell(one_line(run.cause, 160), "strong")] if run.cause else []
        card += [Cell(own, "quiet"), Cell(one_line(run.folder, 160), code=True)]
        card += [entry.sentence] if entry.sentence and len(result.runs) > 2 else []
        cards.append(tuple(card))
    return [Only("terminal", lines), Only("page", [Facts(cards, "cards")])]


def _group(result: RunsComparison, group: str, grids: Sequence[ErrorGrid]) -> Section:
    rows = [row for row in result.rows if row.group == group]
    changed, equal = [row for row in rows if row.differs], [row for row in rows if not row.differs]
    title = {"measured": "Measured by the suites"}.get(group, group.capitalize())
    blocks: list[Block] = [_rows(result, changed)] if changed else [Only("page", [Line("No difference.", "empty")])]
    if group == "own error" and grids:
        left = sum(grid is not None for maps in result.maps for grid in maps.grids) - len(grids)
        maps: list[Block] = [Line("Own error by layer and head", "strong"), HeatMaps(grids, small=True)]
        maps += [Line(f"{left} more heat maps are in the runs' own reports.", "quiet")] if left else []
        blocks.append(Only("page", maps))
    blocks += [Fold(f"{len(equal)} equal or within noise", [_rows(result, equal)])] if equal else []
    return Section(group.replace(" ", "-"), title, blocks, announced=bool(changed))


def _rows(result: RunsComparison, rows: Sequence[RunRow]) -> Table:
    names = [run.name for run in result.runs]
    cells = [(one_line(row.title, 160), *map(_cell, row.cells)) for row in rows]
    return Table(("", *names), cells, style="side-by-side", most=_ROWS_SHOWN)


def _cell(cell: RunCell) -> Words:
    words = {True: "worse", False: "better", None: ""}[cell.worse]
    return Cell(one_line(cell.text, 160), words, note=words) if words else one_line(cell.text, 160)


def _equal(result: RunsComparison) -> list[Block]:
    count = len(result.rows) - len(result.changed)
    said = f"\n{count:,} further rows are equal or within noise: see --json or --html"
    return [Only("terminal", [Line(said)])] if count else []


def _beside(result: RunsComparison) -> list[Block]:
    blocks: list[Block] = []
    said: list[Block] = [Line("")]
    for run, pair in zip(result.runs[1:], result.pairs, strict=True):
        lines: list[Block] = []
        for flip in pair.flips[:FLIPS_SHOWN]:
            words = f"{run.name} {flip.direction}: {flip.key[:32]}, expected {flip.target!r}: A {flip.a!r}, {run.name} {flip.b!r}"
            lines.append(Line(one_line(words, 300)))
        if pair.flips and pair.overall:
            whole = pair.overall
            counts = Line(f"{whole.lost:,} lost, {whole.gained:,} gained of {whole.pairs:,}.", "quiet")
            fold = Fold(f"The first {len(pair.flips)}", [_flips_table(pair.flips, run.name)])
            left = more(whole.lost + whole.gained - FLIPS_SHOWN, "more flip")
            title = f"Questions lost and gained by {run.name}"
            blocks.append(
                Section(f"flips-{run.name}", title, [Only("page", [counts, fold]), Only("terminal", lines), *left])
            )
        checks = Section(f"checks-{run.name}", f"Checks of {run.name} beside A", [Checks(pair.checks)])
        blocks.append(Only("page", [checks]))
        if len(result.runs) > 2 and run.compared:  # the last line of the command says it of two
            said.append(Line((Cell(f"{SIGNS[run.compared]} ", run.compared), one_line(run.sentence, 700))))
    return [*blocks, Only("terminal", said)]


def _named(result: RunsComparison, maps: HeadMaps) -> list[ErrorGrid]:
    """The heat maps of a condition, each titled by its run."""
    return [
        grid.model_copy(update={"title": f"{run.name}: {grid.title}"})
        for run, grid in zip(result.runs, maps.grids, strict=True)
        if grid is not None
    ]
