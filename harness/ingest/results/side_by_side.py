"""Two or more runs of assay -> `RunsComparison`: everything that a reader compares, side by side, and each beside the first."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from assay.harness.errors import UsageError
from assay.harness.files import timestamp
from assay.harness.ingest.results import assay_run
from assay.harness.ingest.results.compare_results import PassLimits, compare_two_runs
from assay.harness.ingest.results.comparison import (
    COVERS,
    CompareResult,
    Group,
    HeadMaps,
    Loaded,
    RunCell,
    RunColumn,
    RunRow,
    RunsComparison,
    load,
)
from assay.harness.ingest.source_file import SourceFile
from assay.harness.judge.history import line_of, worst_own
from assay.harness.judge.latency_result import ratio_text
from assay.harness.judge.report import NOT_FINITE, ErrorGrid, OwnError, Report, excess, out_of_bounds
from assay.harness.reading import reading
from assay.harness.text import percent, two_digits
from assay.harness.verdict import WORST_FIRST, serious

NOTHING = "–"
_LEAST_DIFFERENCE = 0.01
"""Ratios of times that differ by less are equal as printed."""


_LEAST_FACTOR = 1.1
"""Own errors that differ by less are equal: two runs of one kernel differ so much."""


@dataclass(frozen=True)
class _Fact:
    """A fact of one run, under the id that all runs share.

    Attributes:
        badness: orders the facts of an id: what is `factor` times another's, or greater if `factor` is 1, is worse. None where
            neither is better.
    """

    group: Group
    id: str
    title: str
    text: str
    badness: float | None = None
    factor: float = 1.0


def are_runs(paths: Iterable[Path]) -> bool:
    """Return True if all of these paths look like runs of assay.

    Raises:
        UsageError: one does not exist.
    """
    for path in paths:
        source = SourceFile.of(path)
        with reading(path, "results file"):
            if not assay_run.READER.recognises(source):
                return False
    return True


def compare_runs(paths: Sequence[Path], limits: PassLimits, reproduce: str = "") -> RunsComparison:
    """Put runs side by side, and compare each with the first. The verdict is the worst of these comparisons.

    Args:
        paths: folders of runs, the accepted one first; or their ``report.json``, which has no answers.
        limits: of a pass.
        reproduce: the command.

    Raises:
        UsageError: there are fewer than two or more than 26, one is named twice, or one is no run of assay.
        EvidenceError: one of them is damaged.
    """
    letters = string.ascii_uppercase
    if not 2 <= len(paths) <= len(letters):
        raise UsageError(f"{len(paths)} runs were named.", f"2 to {len(letters)} runs", "name the runs to compare")
    if twice := [path for path in paths if sum(path.resolve() == other.resolve() for other in paths) > 1]:
        raise UsageError(f"{twice[0]} was named twice.", "different runs", "leave one out")
    loaded = [load(path) for path in paths]
    for side in loaded:
        if side.kind != "runs":
            raise UsageError(
                f"{side.source.path} is of {side.reader.title}.",
                "runs of assay",
                "compare results of other tools in pairs",
            )
    with reading(" or ".join(map(str, paths)), "run"):
        return _compared(loaded, limits, reproduce)


def _compared(loaded: Sequence[Loaded], limits: PassLimits, reproduce: str) -> RunsComparison:
    reports = [assay_run.report_of(side.source) for side in loaded]
    first, *others = zip(loaded, reports, strict=True)
    pairs = [compare_two_runs(first[0], side, limits, first[1], report) for side, report in others]
    names = string.ascii_uppercase[: len(reports)]
    columns = [
        RunColumn(
            name=name,
            run=line_of(report, str(side.source.path)),
            compared=pair.verdict if pair else None,
            sentence=_renamed(pair.headline, name) if pair else "",
        )
        for name, side, report, pair in zip(names, loaded, reports, (None, *pairs), strict=True)
    ]
    worst = min(columns[1:], key=lambda column: WORST_FIRST.index(column.compared or "pass"))
    assert worst.compared is not None
    return RunsComparison(
        verdict=worst.compared,
        created=timestamp(),
        headline=worst.sentence,
        covers=COVERS["runs"],
        runs=tuple(columns),
        rows=tuple(_rows([*_facts(report, pair, number == 0, pairs)] for number, (report, pair) in enumerate(
            zip(reports, (None, *pairs), strict=True)
        ))),
        maps=tuple(_maps(reports)),
        pairs=tuple(pairs),
        reproduce=reproduce,
    )  # fmt: skip


def _renamed(headline: str, name: str) -> str:
    """Rename the second run: a pair calls it B; here it may be C. What does not name it at all gets its name in front."""
    renamed = re.sub(r"\bB(?= is |'s )", name, headline)
    return renamed if renamed.startswith((f"{name} ", f"{name}'s ")) else f"{name}: {renamed}"


def _rows(of_runs: Iterable[Sequence[_Fact]]) -> list[RunRow]:
    """Make a row for each id that any run has, in the order of their groups."""
    tables = [{fact.id: fact for fact in facts} for facts in of_runs]
    merged = {id_: fact for table in reversed(tables) for id_, fact in table.items()}
    order = list(dict.fromkeys(id_ for table in tables for id_ in table))
    groups: tuple[Group, ...] = ("verdict", "questions", "own error", "latency", "measured", "environment")
    return [
        _row(merged[id_], [table.get(id_) for table in tables])
        for group in groups
        for id_ in order
        if merged[id_].group == group
    ]


def _row(fact: _Fact, facts: Sequence[_Fact | None]) -> RunRow:
    cells = tuple(RunCell(text=fact.text if fact else NOTHING, worse=_worse(facts[0], fact)) for fact in facts)
    numbers = [fact.badness for fact in facts if fact and fact.badness is not None]
    if len(numbers) == len(facts) and fact.factor > 1:
        differs = max(numbers) > fact.factor * min(numbers)
    else:
        differs = len({cell.text for cell in cells}) > 1
    return RunRow(group=fact.group, id=fact.id, title=fact.title, cells=cells, differs=differs)


def _worse(first: _Fact | None, fact: _Fact | None) -> bool | None:
    if first is None or fact is None or first.badness is None or fact.badness is None:
        return None
    if fact.badness > first.badness * first.factor:
        return True
    return False if fact.badness * first.factor < first.badness else None


def _facts(
    report: Report, pair: CompareResult | None, is_first: bool, pairs: Sequence[CompareResult]
) -> Iterator[_Fact]:
    """Yield all facts that one run has."""
    yield from _verdicts(report)
    yield from _questions(pairs[0] if is_first else pair, is_first)
    yield from _own_errors(report)
    yield from _latency(report)
    for name, text in _environment_of(report).items():
        yield _Fact("environment", f"environment-{name}", name, text or NOTHING)


def _verdicts(report: Report) -> Iterator[_Fact]:
    yield _Fact("verdict", "verdict", "verdict", report.verdict, _badness_of(report.verdict))
    causes = serious(report.findings)
    named = "; ".join(dict.fromkeys(item.title for item in causes)) or "none found"
    yield _Fact("verdict", "cause", "cause", named, None if report.verdict == "error" else float(bool(causes)))
    for suite in report.suites:
        title = f"suite {suite.id}"
        yield _Fact("verdict", f"verdict-{suite.id}", title, suite.verdict, _badness_of(suite.verdict))
    for suite in report.suites:
        for metric in suite.metrics:
            yield _Fact("measured", f"{suite.id}-{metric.id}", f"{suite.id}: {metric.title}", metric.text)


def _badness_of(verdict: str) -> int | None:
    """Order verdicts; None for one that does not tell how good a candidate is: a suite that was not run, an engine's error."""
    known = verdict in WORST_FIRST and verdict != "error"
    return len(WORST_FIRST) - 1 - WORST_FIRST.index(verdict) if known else None


def _questions(pair: CompareResult | None, is_first: bool) -> Iterator[_Fact]:
    """Yield, for the first run, its score in the first pair: each pair is of the questions that both runs asked."""
    task = pair.overall if pair else None
    if task is None or not task.pairs:
        return
    yield _Fact(
        "questions", "score", "right answers, of the questions in both", f"{task.a if is_first else task.b:.3f}"
    )
    if is_first:
        return
    yield _Fact("questions", "lost", "questions lost", f"{task.lost:,} of {task.pairs:,}")
    yield _Fact("questions", "gained", "questions gained", f"{task.gained:,} of {task.pairs:,}")
    ends = f"{100 * task.low:.1f} to {100 * task.high:.1f}"
    yield _Fact("questions", "loss", "loss in points", f"{100 * task.loss + 0.0:.1f} ({ends})")


def _own_errors(report: Report) -> Iterator[_Fact]:
    worst = worst_own(report)
    if worst is not None:
        text, badness = _own(worst.error, worst.bound)
        yield _Fact("own error", "own-error", "worst own error against the truth", text, badness, _LEAST_FACTOR)
    if report.layers is None:
        return
    for row in report.layers.depth:
        if row.own is not None:
            text, badness = _own(row.own, row.bound)
            yield _Fact("own error", f"own-error-{row.layer}", f"layer {row.layer}", text, badness, _LEAST_FACTOR)
    for grid in report.layers.grids:
        if grid.columns == "head":
            beyond, total, where = _beyond(grid)
            title = f"{grid.where}: heads out of bounds"
            text = f"{beyond:,} of {total:,}{where and ', ' + where}"
            yield _Fact("own error", f"heads-{grid.where}", title, text, float(beyond))


def _own(error: OwnError, bound: float | None) -> tuple[str, float]:
    """Return an own error in words, and its size; what is not finite is worse than any number."""
    if not isinstance(error, float):
        return NOT_FINITE, math.inf
    return percent(error) + (f" ({two_digits(error / bound)}x its bound)" if bound else ""), error


def _beyond(grid: ErrorGrid) -> tuple[int, int, str]:
    """Count the observed heads of all layers that are out of bounds, and all of them; name the worst."""
    cells = [
        (excess(error, bound), f"worst layer {layer}, head {head}", out_of_bounds(error, bound))
        for layer, head, error, bound in grid.observed()
    ]
    beyond = sum(out for _, _, out in cells)
    return beyond, len(cells), max(cells)[1] if beyond else ""


def _maps(reports: Sequence[Report]) -> Iterator[HeadMaps]:
    """Yield the heat maps by layer and head, in the order of the first run that has them."""
    of_runs = [
        {grid.where: grid for grid in (report.layers.grids if report.layers else ()) if grid.columns == "head"}
        for report in reports
    ]
    for where in dict.fromkeys(where for grids in of_runs for where in grids):
        yield HeadMaps(where=where, grids=tuple(grids.get(where) for grids in of_runs))


def _latency(report: Report) -> Iterator[_Fact]:
    for row in report.latency.rows if report.latency else ():
        if row.ratio is not None:
            text = ratio_text(row.ratio, row.low, row.high)
            title = f"ratio of {row.title}, {row.where}"
            yield _Fact("latency", f"latency-{row.metric}-{row.where}", title, text, row.ratio, 1 + _LEAST_DIFFERENCE)


def _environment_of(report: Report) -> dict[str, str]:
    """List what was compared and where, by name; a package as "package NAME"."""
    here = report.environment
    named = {
        "candidate": report.candidate.backend,
        "reference": report.reference.backend,
        "engine": report.candidate.engine,
        "model": f"{here.model} {here.model_hash[:12]}",
        "hardware": here.hardware,
        "device": here.device,
        "python": here.python,
        "git": here.git,
    }
    return named | {f"package {name}": version for name, version in sorted(here.packages.items())}
