"""The result of ``assay compare``: on the terminal and as JUnit XML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from assay.harness.files import write_whole
from assay.harness.ingest.results.comparison import ComparedLatency, ComparedTask, CompareResult
from assay.harness.ingest.results.runs_comparison import RunsComparison
from assay.harness.text import counted, one_line, visible
from assay.harness.verdict import Decided
from assay.reports.summary import CHECK_SIGNS
from assay.reports.terminal import print_rows, say, verdict_line

if TYPE_CHECKING:
    from junitparser import TestCase

SHOWN = 20
"""Rows of each kind that the terminal shows."""
TASK_COLUMNS = ("task", "metric", "pairs", "A", "B", "lost", "gained", "loss in points", "McNemar p", "verdict")
LATENCY_COLUMNS = ("quantity", "requests", "A", "B", "ratio", "verdict")


def write_compare_junit(result: CompareResult, path: Path) -> None:
    """Write the result as JUnit XML: a case with the verdict, one for each task, time, test that broke, and check.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    from assay.reports.junit import check_case, verdict_case

    cases = [
        verdict_case("verdict", "assay.compare", result.verdict, result.headline, [*result.reasons, result.covers])
    ]
    cases += [verdict_case(one.task, "assay.compare.tasks", one.verdict, one.why, [one.why]) for one in result.tasks]
    cases += [
        verdict_case(one.id, "assay.compare.latencies", one.verdict, one.why, [one.why]) for one in result.latencies
    ]
    cases += [check_case(one, "assay.compare.checks") for one in result.checks]
    _write_junit(result, {"A": result.a.path, "B": result.b.path}, cases, path)


def write_runs_junit(result: RunsComparison, path: Path) -> None:
    """Write a comparison of runs as JUnit XML: a case for each run beside A, and its checks.

    Raises:
        EvidenceError: the disk is full or not writable.
    """
    from assay.reports.junit import check_case, verdict_case

    cases = []
    for one, pair in zip(result.runs[1:], result.pairs, strict=True):
        reasons = [one.sentence, *pair.reasons[1:], result.covers]
        cases.append(verdict_case(one.name, "assay.compare", pair.verdict, one.sentence, reasons))
        cases += [check_case(check, f"assay.compare.{one.name}.checks") for check in pair.checks]
    _write_junit(result, {one.name: one.run.folder for one in result.runs}, cases, path)


def _write_junit(result: Decided, named: Mapping[str, str], cases: Sequence[TestCase], path: Path) -> None:
    from junitparser import JUnitXml, TestSuite

    document, suite = JUnitXml("assay"), TestSuite("assay compare")
    for key, value in {"verdict": result.verdict, "exit_code": str(result.exit_code), **named}.items():
        suite.add_property(key, one_line(value))
    for case in cases:
        suite.add_testcase(case)
    document.add_testsuite(suite)
    write_whole(path, '<?xml version="1.0" encoding="utf-8"?>\n' + str(document.tostring().decode("utf-8")) + "\n")


def render_compare(result: CompareResult, console: Console) -> None:
    """Print both sides, the tables, the checks that are not ok, and the verdict."""
    for side in (result.a, result.b):
        read = f"{counted(side.read, side.unit)} read, {side.unread:,} not"
        known = " ".join(part for part in (side.tool, side.version, side.model) if part)
        say(console, one_line(f"{side.name}: {side.path}: {known}: {read}", 400))
        for note in side.notes:
            say(console, "  " + one_line(note, 400))
    if result.tasks:
        shown = [*result.tasks[:SHOWN], *([result.overall] if result.overall and len(result.tasks) > 1 else [])]
        print_rows(console, "Scores", TASK_COLUMNS, [task_cells(one) for one in shown])
    if result.latencies:
        print_rows(console, "Latency, B over A", LATENCY_COLUMNS, [latency_cells(one) for one in result.latencies])
    _changes(result, console)
    for check in result.checks:
        if check.status != "ok":
            say(console, one_line(f"{CHECK_SIGNS[check.status]} {check.status}: {check.title}: {check.found}", 600))
    say(console, verdict_line(result.verdict, result.headline))
    for reason in result.reasons[1:]:
        say(console, "  " + one_line(reason, 600))
    say(console, f"  {result.covers}")


def _changes(result: CompareResult, console: Console) -> None:
    for flip in result.flips[:5]:
        what = repr(flip.question[:80]) if flip.question else flip.key[:16]
        words = f"{flip.direction}: {flip.task} {what}, expected {flip.target!r}: A {flip.a!r}, B {flip.b!r}"
        say(console, one_line(words, 300))
    if result.overall and result.overall.lost + result.overall.gained > 5:
        say(console, f"… and {result.overall.lost + result.overall.gained - 5:,} more flips: see --json or --html")
    for outcome in result.outcomes[:SHOWN]:
        say(console, one_line(f"{outcome.test}: {outcome.a} in A, {outcome.b} in B", 300))
    if len(result.outcomes) > SHOWN:
        say(console, f"… and {len(result.outcomes) - SHOWN:,} more")
    for change in result.changes:
        mark = {True: "worse: ", False: "better: ", None: ""}[change.worse]
        say(console, one_line(f"{mark}{change.title}: {change.a} in A, {change.b} in B", 300))


def task_cells(one: ComparedTask) -> tuple[str, ...]:
    """A row of the table of scores; the shared words of the terminal and the page."""
    if not one.pairs:
        return (
            visible(one.task) or "all tasks",
            one.metric,
            "0",
            "",
            "",
            "",
            "",
            "",
            "",
            "refused" if one.refused else one.verdict,
        )
    return (
        one_line(one.task, 60) or "all tasks",
        one_line(one.metric, 40),
        f"{one.pairs:,}",
        f"{one.a:.4f}",
        f"{one.b:.4f}",
        f"{one.lost:,}",
        f"{one.gained:,}",
        f"{100 * one.loss + 0.0:.2f} ({100 * one.low:.1f} to {100 * one.high:.1f})",
        f"{one.p_mcnemar:.2g}",
        one.verdict,
    )


def latency_cells(one: ComparedLatency) -> tuple[str, ...]:
    """A row of the table of latencies."""
    ends = "" if one.low is None or one.high is None else f" ({one.low:.3f} to {one.high:.3f})"
    return (
        one.title,
        f"{one.pairs:,}",
        _ms(one.a_median),
        _ms(one.b_median),
        "not measured" if one.ratio is None else f"{one.ratio:.3f}{ends}",
        one.verdict,
    )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f} ms"
