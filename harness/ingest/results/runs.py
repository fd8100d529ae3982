"""Two runs of assay -> what changed: the verdict, the suites, the own error by layer, the latency, and the environment."""

from __future__ import annotations

from collections.abc import Iterator

from assay.harness.ingest.results.assay_run import AssayRun
from assay.harness.ingest.results.comparison import Change
from assay.harness.ingest.source import Source
from assay.harness.judge.latency_result import ratio_text
from assay.harness.judge.report import DepthRow, OwnError, Report
from assay.harness.verdict import WORST_FIRST

LEAST_FACTOR = 1.1
"""Own errors that differ by less are not listed: two runs of one kernel differ so much."""


def compare_reports(a: Source, b: Source) -> tuple[Change, ...]:
    """Everything in which two runs differ, the verdict first.

    Raises:
        EvidenceError: a run is damaged, or was changed after it had ended.
    """
    reader = AssayRun()
    return changes_of(reader.report(a), reader.report(b))


def changes_of(a: Report, b: Report) -> tuple[Change, ...]:
    """Everything in which two reports differ, in the order in which a reader asks."""
    return (*_verdicts(a, b), *_findings(a, b), *_layers(a, b), *_latency(a, b), *_environment(a, b))


def _verdicts(a: Report, b: Report) -> Iterator[Change]:
    mine, theirs = ({"": one.verdict, **{suite.id: suite.verdict for suite in one.suites}} for one in (a, b))
    for name in dict.fromkeys((*mine, *theirs)):
        x, y = mine.get(name, "not run"), theirs.get(name, "not run")
        if x != y:
            known = x in WORST_FIRST and y in WORST_FIRST
            worse = WORST_FIRST.index(y) < WORST_FIRST.index(x) if known else None
            title = f"verdict of the suite {name}" if name else "verdict"
            yield Change(id=f"verdict-{name}" if name else "verdict", title=title, a=x, b=y, worse=worse)
    for one in a.suites:
        other = next((suite for suite in b.suites if suite.id == one.id), None)
        for metric in one.metrics:
            value = next((found for found in other.metrics if found.id == metric.id), None) if other else None
            if value is not None and value.text != metric.text:
                yield Change(id=f"{one.id}-{metric.id}", title=f"{one.id}: {metric.title}", a=metric.text, b=value.text)


def _findings(a: Report, b: Report) -> Iterator[Change]:
    mine, theirs = ({one.id: one.title for one in report.findings} for report in (a, b))
    for name in dict.fromkeys((*mine, *theirs)):
        if (name in mine) != (name in theirs):
            x, y = ("found" if name in side else "not found" for side in (mine, theirs))
            title = f"finding: {mine.get(name) or theirs.get(name)}"
            yield Change(id=f"finding-{name}", title=title, a=x, b=y, worse=name in theirs)


def _layers(a: Report, b: Report) -> Iterator[Change]:
    if a.layers is None or b.layers is None:
        return
    mine, theirs = ({one.layer: one for one in report.layers.depth} for report in (a, b) if report.layers)
    for layer in sorted(mine.keys() & theirs.keys()):
        x, y = mine[layer], theirs[layer]
        if _differs(x, y):
            yield Change(
                id=f"own-error-{layer}",
                title=f"own error of layer {layer}",
                a=_error(x.own),
                b=_error(y.own),
                worse=_worse(x, y),
            )


def _differs(x: DepthRow, y: DepthRow) -> bool:
    if isinstance(x.own, float) and isinstance(y.own, float):
        return max(x.own, y.own) > LEAST_FACTOR * min(x.own, y.own)
    return x.own != y.own


def _worse(x: DepthRow, y: DepthRow) -> bool | None:
    if isinstance(x.own, float) and isinstance(y.own, float):
        return y.own > x.own
    return y.out_of_bounds if x.out_of_bounds != y.out_of_bounds else None


def _error(value: OwnError) -> str:
    return "not observed" if value is None else value if isinstance(value, str) else f"{value:.2e}"


def _latency(a: Report, b: Report) -> Iterator[Change]:
    theirs = {(row.where, row.metric): row for row in (b.latency.rows if b.latency else ())}
    for x in a.latency.rows if a.latency else ():
        y = theirs.get((x.where, x.metric))
        if y is None or x.ratio is None or y.ratio is None or f"{x.ratio:.2f}" == f"{y.ratio:.2f}":
            continue
        yield Change(
            id=f"latency-{x.metric}-{x.where.replace(' ', '-').replace(',', '')}",
            title=f"ratio of {x.title}, {x.where}",
            a=ratio_text(x.ratio, x.low, x.high),
            b=ratio_text(y.ratio, y.low, y.high),
            worse=y.ratio > x.ratio,
        )


def _environment(a: Report, b: Report) -> Iterator[Change]:
    one, other = a.environment, b.environment
    pairs = {
        "candidate": (a.candidate.backend, b.candidate.backend),
        "reference": (a.reference.backend, b.reference.backend),
        "engine": (a.candidate.engine, b.candidate.engine),
        "model": (f"{one.model} {one.model_hash[:12]}", f"{other.model} {other.model_hash[:12]}"),
        "hardware": (one.hardware, other.hardware),
        "device": (one.device, other.device),
        "python": (one.python, other.python),
        "git": (one.git, other.git),
    }
    pairs |= {
        f"package {name}": (one.packages.get(name, "none"), other.packages.get(name, "none"))
        for name in sorted({*one.packages, *other.packages})
    }
    for name, (x, y) in pairs.items():
        if x != y:
            yield Change(id=f"environment-{name.replace(' ', '-')}", title=name, a=x, b=y)
