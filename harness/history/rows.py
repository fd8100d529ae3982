"""A run, or a cell of a sweep -> its rows: one for each metric of each claim. Pure functions of the files that it left."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from assay.harness.errors import EvidenceError
from assay.harness.evidence.cell import FILE as CELL
from assay.harness.evidence.cell import LOG, OUT, RESULT, CellRecord
from assay.harness.judge.answer_length_check import LENGTH_RATIO
from assay.harness.judge.history import PAGE, REPORT, RunLine, Worst, line_of
from assay.harness.judge.report import NOT_FINITE, SuiteResult
from assay.harness.judge.report_file import parse_report
from assay.harness.sides import differing
from assay.harness.stats.share import clopper_pearson
from assay.harness.text import one_line
from assay.harness.verdict import Verdict

OWN_ERROR = "own-error"
"""The metric of the own error that is nearest to its bound, or farthest beyond it: relative L1; infinite where not finite."""
STAGE = "command"
"""The setting that says what a cell did: a check and a replay of a kernel have no history together."""
READ = (CELL, REPORT, RESULT)
"""Files that a run or a cell is read from."""
SHOWN = (PAGE, f"{OUT}/{PAGE}", LOG)
"""Files that a reader of a list is led to: the first that a run or cell has."""
_ALPHA = 0.05


class ClaimRow(NamedTuple):
    """A metric of a claim of a run. The columns of `COLUMNS`, in order."""

    run: str
    stamp: str
    url: str
    run_id: str
    created: str
    commit: str
    model: str
    candidate: str
    reference: str
    device: str
    treatment: str
    verdict: Verdict | None
    headline: str
    cause: str
    problem: str
    seconds: float
    claim: str = ""
    claim_verdict: Verdict | None = None
    metric: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    bound: float | None = None


COLUMNS = {
    "run": "its name: path of its folder below the place that was read",
    "stamp": "changes with the run's files; empty where they cannot change",
    "url": "where its evidence is",
    "run_id": "as in its report",
    "created": "ISO 8601, UTC",
    "commit": "of the repository that it ran in; empty if not known",
    "model": "", "candidate": "", "reference": "", "device": "",
    "treatment": "what differs between the roles, as asked, or the cell's axes: JSON",
    "verdict": "of the run",
    "headline": "of the run",
    "cause": "title of its first serious finding",
    "problem": "why it has no result",
    "seconds": "that the run took",
    "claim": "id of a claim, such as accuracy",
    "claim_verdict": "of the claim",
    "metric": "id of a number of the claim",
    "value": "", "low": "lower end of its interval", "high": "upper end", "bound": "that applies to it",
}  # fmt: skip
"""The columns of the rows, with what is in them: stable, as ids are."""


def rows_of(name: str, url: str, stamp: str, files: Mapping[str, bytes]) -> list[ClaimRow]:
    """Make the rows of a run or a cell.

    Args:
        name: see `ClaimRow`, and so are `url` and `stamp`.
        files: those of `READ` that it has.
    """
    try:
        return _rows(name, url, stamp, files)
    except (
        EvidenceError,
        ValueError,
        KeyError,
        TypeError,
    ) as error:  # whatever a damaged file holds, the others are listed
        problem, remedy = (
            (error.found, error.do) if isinstance(error, EvidenceError) else (f"{url} is damaged: {error!r}", "")
        )
        problem = one_line(f"{problem.rstrip('.')}{f'; {remedy}' if remedy else ''}", 300)
        line = RunLine(folder=url, run_id=name.rpartition("/")[2], problem=problem)
        return [_row(name, url, stamp, line, "")]


def line_of_rows(rows: list[ClaimRow], folder: str) -> RunLine:
    """Return a run in one line, as `assay.harness.judge.history.line_of` its report."""
    first = rows[0]
    own = next((row for row in rows if row.metric == OWN_ERROR and row.value is not None), None)
    worst = None
    if own is not None and own.value is not None:
        finite = math.isfinite(own.value)
        multiple = own.value / own.bound if finite and own.bound else None
        error = own.value if finite else NOT_FINITE
        worst = Worst.model_construct(error=error, bound=own.bound, multiple=multiple)
    return RunLine.model_construct(  # these rows were valid when they were made, and there may be ten thousand
        folder=folder,
        **{name: getattr(first, name) for name in _SHARED},
        treatment={name: tuple(pair) for name, pair in json.loads(first.treatment).items()},
        suites={row.claim: row.claim_verdict for row in rows if row.claim and row.claim_verdict is not None},
        worst=worst,
    )


_SHARED = (
    "run_id", "created", "verdict", "headline", "cause", "reference", "candidate", "model", "device", "seconds", "problem",
)  # fmt: skip


def settings_of(treatment: Mapping[str, Sequence[str]]) -> str:
    """Return what a treatment has beside the backend, in words, such as "check --page-size=16"; empty for nothing."""
    others = {name: (pair[0], pair[1]) for name, pair in treatment.items() if name not in ("backend", STAGE)}
    return " ".join(filter(None, [treatment.get(STAGE, ("", ""))[1], differing(others)]))


def _rows(name: str, url: str, stamp: str, files: Mapping[str, bytes]) -> list[ClaimRow]:
    if CELL in files:
        cell = CellRecord.model_validate_json(files[CELL])
        result = json.loads(files[RESULT]) if RESULT in files else None
        if not _is_report(result):
            return _of_cell(name, url, stamp, cell, result if isinstance(result, dict) else {})
    report = parse_report(files[RESULT if CELL in files else REPORT], url)
    line = line_of(report, url)
    metrics = [metric for suite in report.suites for metric in _of_suite(suite)]
    if line.worst is not None:
        own = math.inf if line.worst.error == NOT_FINITE else line.worst.error
        metrics.append(("layers", line.suites.get("layers"), OWN_ERROR, own, None, None, line.worst.bound))
    if report.latency is not None:
        said = report.latency.verdict
        metrics += [
            ("latency", said, f"{row.metric} {row.where}", row.ratio, row.low, row.high, row.bound)
            for row in report.latency.rows
        ]
        if (lengths := report.latency.lengths) is not None and lengths.reference:
            metrics.append(("latency", said, LENGTH_RATIO, lengths.candidate / lengths.reference, None, None, None))
    return [
        _row(name, url, stamp, line, report.environment.git.partition(" ")[0], metric) for metric in metrics or [()]
    ]


def _is_report(document: Any) -> bool:
    return isinstance(document, dict) and str(document.get("schema", "")).startswith("assay.report/")


def _of_suite(suite: SuiteResult) -> Iterator[tuple[Any, ...]]:
    """Yield claim, its verdict, and a metric with value, interval and bound."""
    shares = {
        f"{tally.role}-accuracy": clopper_pearson(tally.right, tally.total, _ALPHA)
        for tally in suite.tallies
        if tally.total
    }
    for metric in suite.metrics:
        low, high = metric.low, metric.high
        if metric.id in shares and low is None:
            low, high = shares[metric.id].low, shares[metric.id].high
        yield suite.id, suite.verdict, metric.id, metric.value, low, high, metric.bound
    if not suite.metrics:
        yield suite.id, suite.verdict


def _of_cell(name: str, url: str, stamp: str, cell: CellRecord, result: dict[str, Any]) -> list[ClaimRow]:
    """Make the rows of a cell whose result is no run: of a kernel on calls, or of no result at all."""
    named = {key: cell.axes.get(key, "") for key in ("model", "candidate", "reference", "device")}
    named["candidate"] = named["candidate"] or str(result.get("kernel", ""))
    others = {axis: value for axis, value in cell.axes.items() if axis not in named}
    backend = {"backend": (named["reference"], named["candidate"])} if named["candidate"] else {}
    findings = [finding for finding in result.get("findings", ()) if finding.get("severity") != "info"]
    line = RunLine(
        folder=url,
        run_id=cell.key,
        created=cell.created,
        verdict=cell.verdict,
        headline=cell.headline or cell.problem,
        cause=str(findings[0]["title"]) if findings else "",
        **named,
        treatment=backend | {STAGE: ("", cell.stage)} | {axis: ("", value) for axis, value in others.items()},
        seconds=cell.seconds,
    )
    own, bound = result.get("worst_own"), result.get("worst_bound")
    metric = (
        (cell.stage, cell.verdict, OWN_ERROR, own, None, None, bound) if own is not None else (cell.stage, cell.verdict)
    )
    return [_row(name, url, stamp, line, cell.environment.get("commit", ""), metric)]


def _row(name: str, url: str, stamp: str, line: RunLine, commit: str, metric: tuple[Any, ...] = ()) -> ClaimRow:
    return ClaimRow(
        name, stamp, url, line.run_id, line.created, commit, line.model, line.candidate, line.reference, line.device,
        json.dumps(line.treatment, sort_keys=True), line.verdict, line.headline, line.cause, line.problem, line.seconds, *metric,
    )  # fmt: skip
