"""The document of ``assay compare``: two results, two files of tensors, or two traces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from assay.harness.ingest.comparison import (
    AnswerFlip,
    CellAt,
    ComparedAnswers,
    ComparedTask,
    ComparedTensors,
    ComparedTraces,
    Comparison,
    TensorRow,
    TraceDifference,
)
from assay.harness.ingest.result import FileRead
from assay.harness.text import counted, one_line
from assay.harness.verdict import Verdict, exit_code_of
from assay.reports.document import (
    Block,
    CaseResult,
    Cell,
    Code,
    Document,
    Drawing,
    Entries,
    Entry,
    Facts,
    Items,
    Line,
    Section,
    Suite,
    Table,
    Words,
    checks_blocks,
    first_words,
)
from assay.reports.summary import NOTHING, number
from assay.reports.svg import intervals_chart
from assay.reports.trace_timeline import timeline_svg
from assay.reports.wording.comparison import COVERS, cell_text, comparison_words, first_places, layer_text
from assay.reports.wording.say import say
from assay.reports.wording.written import worded_json

# Rows of a table that the terminal shows.
_SHOWN = 20
# Most rows and names of tensors on the page.
_TENSORS_SHOWN = 100
_TASK_COLUMNS = (
    "task", "metric", "pairs", "A ± error", "B ± error", "lost", "gained", "loss in points", "McNemar p", "verdict",
)  # fmt: skip
_TENSOR_COLUMNS = ("layer", "boundary", "tensor", "cells out of bounds", "worst error", "bound", "first", "worst")
# Tensors and traces are equal or not; a result is as good or not.
_WORDS: dict[Verdict, str] = {"pass": "Equal", "regression": "Different", "inconclusive": "Not compared"}


def compare_document(result: Comparison) -> Document:
    """Both sides, their differences, the checks, and the verdict, which a terminal shows last."""
    headline, why = comparison_words(result)
    covers = COVERS.get(result.kind, "")
    reasons = [one_line(reason, 700) for reason in map(say, result.why) if reason not in headline]
    missing = "What is missing" if result.verdict == "inconclusive" else "Checks"
    checks = Section(missing, checks_blocks(result.checks) if result.checks else [], "checks")
    body: list[Block] = [
        Facts([_side("A", result.a), _side("B", result.b)]),
        *(Line(f"Note: {say(note)}") for note in result.notes),
        *([checks] if result.verdict == "inconclusive" else []),
        Section("Reasons", [Items(reasons)] if reasons else [], "reasons"),
        *(_answers(result.answers) if result.answers else []),
        *(_tensors(result.tensors) if result.tensors else []),
        *(_traces(result.trace) if result.trace else []),
        *([] if result.verdict == "inconclusive" else [checks]),
        *([Line(covers, "quiet after")] if covers else []),
        *([Code(result.reproduce, "Repeat this comparison")] if result.reproduce else []),
    ]
    tasks = result.answers.tasks if result.answers else ()
    cases = [CaseResult("verdict", "assay.compare", result.verdict, headline, [*why, covers])]
    for task in tasks:
        said = say(*task.why)
        cases.append(CaseResult(task.name, "assay.compare.tasks", task.verdict, said, [said]))
    cases += [CaseResult.of(check, "assay.compare.checks") for check in result.checks]
    properties = {"verdict": result.verdict, "exit_code": str(int(exit_code_of(result.verdict)))}
    return Document(
        command="compare",
        title=one_line(result.b.path, 60),
        verdict=result.verdict,
        word="" if result.kind in ("answers", "runs") else _WORDS[result.verdict],
        headline=one_line(headline, 700),
        body=body,
        created=result.created,
        suites=[Suite("assay compare", cases, properties | {"A": result.a.path, "B": result.b.path})],
        result=result,
        json=worded_json,
    )


def _side(name: str, file: FileRead) -> tuple[Words, ...]:
    read = f"{counted(file.read, file.unit)} read, {file.unread:,} not"
    notes = [one_line(note, 300) for note in file.notes]
    return (name, Cell(one_line(file.path, 120), code=True), one_line(f"{file.title}: {read}", 300), *notes)


def _answers(answers: ComparedAnswers) -> Iterator[Block]:
    if answers.tasks:
        whole = [] if answers.overall in answers.tasks else [answers.overall]
        alone: list[Block] = [
            Line(f"{one_line(task.name, 60)}: {one_line(say(*task.why), 600)}", "quiet")
            for task in answers.tasks
            if task.differs or task.test == "unpaired"
        ]
        rows = [*answers.tasks, *whole]
        table = Table(_TASK_COLUMNS, list(map(_task, rows)), numbers=range(2, 9), style="scores stacked", most=_SHOWN)
        known = {
            task.name or "all tasks": (100 * task.loss, 100 * task.low, 100 * task.high)
            for task in rows
            if task.test not in ("unpaired", "bootstrap") and task.pairs
        }
        drawn = intervals_chart(
            "; ".join(f"{name}: loss {loss:.1f} points, {low:.1f} to {high:.1f}" for name, (loss, low, high) in known.items()),
            known, 100 * answers.margin, "loss in points; tinted: beyond the margin",
        )  # fmt: skip
        yield Section("Scores", [table, Drawing(drawn), *alone], "scores")
    if answers.flips:
        changed = answers.overall.lost + answers.overall.gained
        most = f"The first {len(answers.flips)} of {changed} that changed."
        yield Section("Answers", [Line(most, "quiet"), _entries(answers.flips)], "flips")


def _entries(flips: Sequence[AnswerFlip]) -> Entries:
    """The questions by their first words."""
    entries = []
    for flip, begins in zip(flips, first_words([flip.question for flip in flips]), strict=True):
        task, name = one_line(flip.task, 40), one_line(begins, 100) or one_line(flip.key, 40)
        target, a, b = (
            Cell(one_line(text, 40) or NOTHING, "strong") for text in (flip.target, flip.a[-200:], flip.b[-200:])
        )
        entries.append(
            Entry(
                Cell(flip.direction, flip.direction), name, ("expected ", target, ", A ", a, ", B ", b), task,
                (("A", flip.a, ""), ("B", flip.b, ""), ("Question", flip.question, ""), ("Expected", flip.target, "")),
                (flip.direction, task),
            )
        )  # fmt: skip
    return Entries("Questions and answers", entries, ("direction", "task"))


def _task(task: ComparedTask) -> tuple[Words, ...]:
    name, metric = one_line(task.task, 60) or "all tasks", one_line(task.metric, 40)
    unpaired = task.test == "unpaired"
    if not task.pairs and not unpaired:
        return (name, metric, "0", *[""] * 6, Cell(task.verdict, task.verdict))
    shown = f" ({100 * task.low:.1f} to {100 * task.high:.1f})" if task.low > -1 or task.high < 1 else ""
    counts = ("unpaired", "", "") if unpaired else (f"{task.pairs:,}", f"{task.lost:,}", f"{task.gained:,}")
    loss, p = f"{100 * task.loss + 0.0:.2f}{shown}", "" if unpaired else f"{task.p_mcnemar:.2g}"
    means = (
        f"{mean:.4f}" + ("" if error is None else f" ± {error:.4f}")
        for mean, error in ((task.a, task.a_error), (task.b, task.b_error))
    )
    return (name, metric, counts[0], *means, *counts[1:], loss, p, Cell(task.verdict, task.verdict))


def _tensors(tensors: ComparedTensors) -> Iterator[Block]:
    """The first and the worst difference, heat maps by layer and head, the tensors that differ, and those not compared."""
    empty = f"; {counted(tensors.empty, 'pair')} without elements: not counted" if tensors.empty else ""
    pairs = (
        f"{tensors.pairs:,}: {tensors.identical:,} identical, {tensors.within:,} within bounds, {tensors.differing:,} out of "
        f"bounds{empty}"
    )
    mode = "bit for bit" if tensors.exact else "cell by cell"
    yield Facts([
        ("pairs", pairs),
        ("compared", f"{tensors.bytes / 1e6:,.1f} MB, {mode}, in {tensors.seconds:.2f} s"),
    ])  # fmt: skip
    same = tensors.first == tensors.worst
    cells = {"First and worst": tensors.first} if same else {"First": tensors.first, "Worst": tensors.worst}
    lines = [Line((Cell(name, "strong"), f": {_where(cell)}: {_error(cell)}")) for name, cell in cells.items() if cell]
    if lines:
        yield Section("Differences", lines, "differences")
    if tensors.grids:
        explained = "A bound is the rounding error of the tensors’ dtype, or the given tolerance."
        about = (
            "Each cell is the worst of all tensors of this boundary in the layer: Σ|B − A| / Σ|A| over one token of a "
            f"head. {'Every bit must be equal.' if tensors.exact else explained} "
            "Later boundaries inherit an error from an early one."
        )
        yield Section("By layer and head", [Line(about, "quiet"), Drawing(tensors.grids)], "maps", detail=True)
    rows = [_tensor(row) for row in tensors.tensors if row.out_of_bounds][:_TENSORS_SHOWN]
    if rows:
        table = Table(_TENSOR_COLUMNS, rows, numbers=(0, 3, 4, 5), most=12)
        blocks = [table, *_left(tensors.differing - len(rows))]
        yield Section("Tensors that differ, in depth order", blocks, "tensors")
    names = [one_line(say(line), 300) for line in tensors.not_compared[:_TENSORS_SHOWN]]
    if names:
        listed = [Items(names, most=8), *_left(tensors.not_compared_count - len(names))]
        yield Section("Not compared", listed, "not-compared")


def _tensor(row: TensorRow) -> tuple[Words, ...]:
    worst = row.worst
    return (
        "" if worst.layer is None else str(worst.layer), worst.boundary, Cell(one_line(worst.tensor, 90), code=True),
        f"{row.out_of_bounds:,} of {row.cells:,}",
        Cell(worst.error if isinstance(worst.error, str) else number(worst.error), "beyond"), number(worst.bound),
        _cell(row.first), _cell(worst),
    )  # fmt: skip


def _cell(cell: CellAt | None) -> str:
    return cell_text(cell.index, cell.axes).removeprefix(", ") if cell else ""


def _where(cell: CellAt) -> str:
    """Such as "layer 3, attention, head 2, token 17, of model.layers.3.self_attn.attn"."""
    step = f", pass {cell.step}" if cell.step else ""
    place = cell_text(cell.index, cell.axes)
    return one_line(f"{layer_text(cell.layer)}, {cell.boundary}{place}{step}, of {cell.tensor}", 400)


def _error(cell: CellAt) -> str:
    """Such as "error 0.31, bound 0.031"."""
    bound = "every bit must be equal" if cell.bound is None else f"bound {cell.bound:.2g}"
    return f"{cell.error if isinstance(cell.error, str) else f'error {cell.error:.2g}'}, {bound}"


def _traces(trace: ComparedTraces) -> Iterator[Block]:
    """A summary of all differences, and the timelines."""
    if trace.kinds:
        kinds = [(kind.where, *_sides(kind), f"{kind.count:,}", first_places(kind)) for kind in trace.kinds]
        of = len(kinds) + trace.kinds_left_out
        about = f"{trace.differences:,} differences of {counted(of, 'kind')}, each kind once, in the order of its first place."
        table = Table(("where", "first trace", "second trace", "times", "first at"), kinds, numbers=(3, 4), most=_SHOWN)
        yield Section("Differences", [Line(about), table, *_left(trace.kinds_left_out)], "differences")
    names = ("First trace", "Second trace")
    shown = [(name, timeline_svg(timeline)) for name, timeline in zip(names, trace.timelines, strict=False)]
    for name, drawn in shown:
        if drawn:
            yield Section(name, [Drawing(drawn, "wide")], f"timeline-{name[0]}", detail=True)


def _sides(kind: TraceDifference) -> tuple[str, str]:
    return say(kind.a) if kind.a else "–", say(kind.b) if kind.b else "–"


def _left(count: int) -> list[Block]:
    return [Line(f"{count:,} more are not shown.", "quiet")] if count > 0 else []
