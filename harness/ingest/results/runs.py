"""Two runs of assay -> what changed: the verdict, the suites, the own error by layer, the latency, and the environment."""

from __future__ import annotations

from collections.abc import Iterator

from assay.harness.ingest.results.comparison import Change
from assay.harness.judge.latency_result import ratio_text
from assay.harness.judge.report import DepthRow, OwnError, Report
from assay.harness.verdict import WORST_FIRST

LEAST_FACTOR = 1.1
"""Own errors that differ by less are not listed: two runs of one kernel differ so much."""


def changes_of(a: Report, b: Report) -> tuple[Change, ...]:
    """List everything in which two reports differ, in the order in which a reader asks."""
    return (*_verdicts(a, b), *_findings(a, b), *_layers(a, b), *_latency(a, b), *_environment(a, b))


def _verdicts(a: Report, b: Report) -> Iterator[Change]:
    mine, theirs = ({"": one.verdict, **{suite.id: suite.verdict for suite in one.suites}} for one in (a, b))
    for name in dict.fromkeys((*mine, *theirs)):
        x, y = mine.get(name, "not run"), theirs.get(name, "not run")
        if x != y:
            ranks = badness_of(x), badness_of(y)
            worse = None if ranks[0] is None or ranks[1] is None else ranks[1] > ranks[0]
            title = f"verdict of the suite {name}" if name else "verdict"
            yield Change(id=f"verdict-{name}" if name else "verdict", title=title, a=x, b=y, worse=worse)
    for one in a.suites:
        other = next((suite for suite in b.suites if suite.id == one.id), None)
        for metric in one.metrics:
            value = next((found for found in other.metrics if found.id == metric.id), None) if other else None
            if value is not None and value.text != metric.text:
                yield Change(id=f"{one.id}-{metric.id}", title=f"{one.id}: {metric.title}", a=metric.text, b=value.text)


def badness_of(verdict: str) -> int | None:
    """Order verdicts; None for one that does not tell how good a candidate is: a suite that was not run, an engine's error."""
    known = verdict in WORST_FIRST and verdict != "error"
    return len(WORST_FIRST) - 1 - WORST_FIRST.index(verdict) if known else None


def _findings(a: Report, b: Report) -> Iterator[Change]:
    mine, theirs = ({finding.id: finding.title for finding in report.findings} for report in (a, b))
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
    one, other = environment_of(a), environment_of(b)
    for name in dict.fromkeys((*one, *other)):
        x, y = one.get(name, "none"), other.get(name, "none")
        if x != y:
            yield Change(id=f"environment-{name.replace(' ', '-')}", title=name, a=x, b=y)


def environment_of(report: Report) -> dict[str, str]:
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
