"""``report.html``: one file that opens from disk and asks the network for nothing.

Model text is untrusted. Three things keep it text: Jinja escapes every expression, `visible` is applied to every
expression before that, and a Content-Security-Policy admits this page's one style sheet and one script by their hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from reports import charts, summary
from reports.inside import inside_view
from reports.latency_view import latency_view
from reports.model import ConditionRow, Divergence, Flip, Metric, Report, SuiteResult, Verdict
from reports.text import clip, one_line, visible

TEMPLATES = Path(__file__).parent / "templates"
FLIPS_SHOWN = 256
"""Most flips of a suite that are embedded: with texts cut at `TEXT_SHOWN` the page stays below a few megabytes."""
DIVERGENCES_SHOWN = 60
TEXT_SHOWN = 2_000
"""Most characters of a prompt or an answer that are embedded."""


@dataclass(frozen=True)
class DivergenceView:
    """A divergence with its texts cut where they part."""

    divergence: Divergence
    common: str
    reference_rest: str
    candidate_rest: str


@dataclass(frozen=True)
class ConditionView:
    """The rows of one split, with their chart."""

    by: str
    rows: tuple[ConditionRow, ...]
    chart: Markup


@dataclass(frozen=True)
class SuiteView:
    """A suite with everything that the template would otherwise have to compute."""

    anchor: str
    suite: SuiteResult
    line: summary.SuiteLine
    metrics: tuple[tuple[Metric, Markup], ...]
    tally_chart: Markup
    conditions: tuple[ConditionView, ...]
    flips: tuple[Flip, ...]
    groups: tuple[str, ...]
    divergences: tuple[DivergenceView, ...]


def to_html(report: Report) -> str:
    """The report as one self-contained HTML page."""
    style, script = _style(), _read("page.js") + _read("layers.js")
    return _ENVIRONMENT.get_template("report.html.jinja").render(
        report=report,
        mark=summary.VERDICTS[report.verdict],
        verdicts=summary.VERDICTS,
        check_signs=summary.CHECK_SIGNS,
        inside=inside_view(report.layers) if report.layers else None,
        latency=latency_view(report.latency) if report.latency else None,
        suites=[_suite_view(suite, i) for i, suite in enumerate(report.suites, start=1)],
        roles=(("reference", report.reference), ("candidate", report.candidate)),
        style=Markup(style),
        script=Markup(script),
        policy=_policy(style, script),
        favicon=Markup(_favicon(report.verdict)),
    )


def choose_flips(flips: Sequence[Flip], most: int) -> tuple[Flip, ...]:
    """At most `most` flips, taking turns over direction and group so that each is seen, in their given order."""
    if len(flips) <= most:
        return tuple(flips)
    kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, flip in enumerate(flips):
        kinds[flip.direction, flip.group].append(index)
    turns = sorted((turn, index) for indices in kinds.values() for turn, index in enumerate(indices))
    return tuple(flips[index] for index in sorted(index for _, index in turns[:most]))


def split_divergence(divergence: Divergence) -> DivergenceView:
    """Cut both texts at the word in which they first differ.

    A `Divergence` knows the index of the first differing token but not the tokens' texts, so the cut is made in
    characters, and moved back to the start of its word so that the word is seen whole.
    """
    reference, candidate = visible(divergence.reference_text), visible(divergence.candidate_text)
    shorter = min(len(reference), len(candidate))
    at = next((i for i in range(shorter) if reference[i] != candidate[i]), shorter)
    while at > 0 and not reference[at - 1].isspace():
        at -= 1
    return DivergenceView(
        divergence, clip(reference[:at], TEXT_SHOWN), clip(reference[at:], TEXT_SHOWN), clip(candidate[at:], TEXT_SHOWN)
    )


def _suite_view(suite: SuiteResult, index: int) -> SuiteView:
    flips = choose_flips(suite.flips, FLIPS_SHOWN)
    conditions = []
    for by, group in groupby(suite.conditions, key=lambda row: row.by):
        rows = tuple(group)
        conditions.append(ConditionView(by, rows, Markup(charts.condition_chart(rows))))
    return SuiteView(
        anchor=f"suite-{index}",
        suite=suite,
        line=summary.suite_line(suite),
        metrics=tuple((metric, Markup(charts.interval_chart(metric))) for metric in suite.metrics),
        tally_chart=Markup(charts.tally_chart(suite.tallies)),
        conditions=tuple(conditions),
        flips=flips,
        groups=tuple(dict.fromkeys(flip.group for flip in flips)),
        divergences=tuple(split_divergence(d) for d in suite.divergences[:DIVERGENCES_SHOWN]),
    )


def _finalize(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _style() -> str:
    rules = [
        f'.chart [{attribute}="{colour}"]{{{attribute}:var(--{name})}}'
        for name, colour in charts.PALETTE.items()
        for attribute in ("fill", "stroke")
    ]
    return _read("page.css") + _read("layers.css") + "\n".join(rules)


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _favicon(verdict: Verdict) -> str:
    colours = {"pass": "#17693f", "regression": "#a8201a", "inconclusive": "#855300", "error": "#5a3e8e"}
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8"><circle cx="4" cy="4" r="4" fill="{colours[verdict]}"/></svg>'
    return "data:image/svg+xml," + quote(svg)


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=True,
    finalize=_finalize,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "text": lambda value: clip(value, TEXT_SHOWN),
    "line": one_line,
    "share": summary.share,
    "number": summary.number,
    "interval": summary.interval,
    "bound_and_policy": summary.bound_and_policy,
    "latency_ratio": summary.latency_ratio,
    "own_error": summary.own_error,
}
