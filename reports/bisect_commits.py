"""``report.html`` and ``report.json`` of a commit bisection: the commit, the error profile by commit, and every probe."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import altair as alt
from markupsafe import Markup

from assay.harness.bisect.commits import ui
from assay.harness.bisect.commits.state import Folder, Probe, Result, State
from assay.harness.files import write_whole
from assay.harness.verdict import Verdict
from assay.reports import charts
from assay.reports.page import to_page

HTML, JSON = "report.html", "report.json"
COLOURS = {"good": "chart-right", "bad": "chart-forbidden", "skip": "chart-muted"}
SHAPES = {"good": "circle", "bad": "diamond", "skip": "cross"}
HEADINGS = {"found": "Found", "hidden": "Not told apart", "lost": "Too flaky"}
CLASSES: dict[str, Verdict] = {"found": "pass", "hidden": "inconclusive", "lost": "inconclusive"}


def write_reports(state: State, folder: Folder) -> Path:
    """Write ``report.json`` (the whole state) and ``report.html`` into a bisection's folder.

    Returns:
        The path of the page.

    Raises:
        EvidenceError: the disk is full or not writable.
        ValueError: the bisection has no result yet.
    """
    write_whole(folder.path / JSON, state.model_dump_json(indent=1))
    page = folder.path / HTML
    write_whole(page, to_html(state))
    return page


def to_html(state: State) -> str:
    """The page of a bisection that has a result.

    Raises:
        ValueError: it has none.
    """
    result = state.result
    if result is None:
        raise ValueError("the bisection has no result yet; expected one that was run to its end")
    return to_page(
        "bisect_commits.html.jinja",
        CLASSES[result.verdict],
        state=state,
        spec=state.spec,
        result=result,
        heading=HEADINGS[result.verdict],
        headline=ui.headline(state, result),
        newly=ui.newly(result),
        effort=ui.effort(state, result),
        subjects={one.commit: one.subject for one in state.history},
        errors={probe.number: ui.error_of(probe) for probe in state.probes},
        chart=Markup(error_chart(state, result)),
    )


def error_chart(state: State, result: Result) -> str:
    """Worst own error by commit, as a multiple of its limit, on a log scale; the named commit as a line.

    A probe without a number (it was skipped, raised, or was judged by accuracy) stands at the edge of its verdict: good and
    skipped at the lower one, bad at the upper one, as does an error that is not finite.

    Returns:
        An ``<svg>`` element; an empty string where nothing was probed.
    """
    place = {one.commit: i for i, one in enumerate(state.history, start=1)} | {state.spec.good: 0}
    if not state.probes:
        return ""
    known = [p.worst for p in state.probes if p.worst is not None and 0 < p.worst < math.inf]
    low, high = min([0.5, *known]) / 2, max([2.0, *known]) * 2

    def height(probe: Probe) -> float:
        if probe.worst is None or not math.isfinite(probe.worst):
            return high if probe.outcome == "bad" else low
        return max(probe.worst, low)

    points = [{"commit": place[p.commit], "error": height(p), "verdict": p.outcome} for p in state.probes]
    across = alt.Axis(
        title="commit of the range, oldest first", grid=False, format="d", tickMinStep=1, titleFontWeight="normal"
    )
    up = alt.Axis(
        title="worst own error / limit", format="~g", domain=False, tickSize=0, tickCount=5, titleFontWeight="normal"
    )
    x = alt.X("commit:Q", scale=alt.Scale(domain=[-0.5, len(state.history) + 0.5], nice=False), axis=across)
    y = alt.Y("error:Q", scale=alt.Scale(type="log", domain=[low, high], nice=False), axis=up)
    kinds = [kind for kind in COLOURS if any(p.outcome == kind for p in state.probes)]
    legend = alt.Legend(title=None, orient="top", offset=6, symbolOpacity=1)
    colours = alt.Scale(domain=kinds, range=[charts.PALETTE[COLOURS[kind]] for kind in kinds])
    shapes = alt.Scale(domain=kinds, range=[SHAPES[kind] for kind in kinds])
    limit: Any = charts._data({"error": 1.0}).mark_rule(
        color=charts.PALETTE["chart-forbidden"], strokeDash=[4, 3], strokeWidth=1.5
    )
    layers = [limit.encode(y=y)]
    if result.verdict != "lost":
        spots = [{"commit": place[commit]} for commit in result.candidates]
        lines = charts._data(*spots).mark_rule(color=charts.PALETTE["chart-candidate"], strokeWidth=2, opacity=0.6)
        layers.append(lines.encode(x=x))
    dots = charts._data(*points).mark_point(filled=True, opacity=0.9, size=70)
    layers.append(
        dots.encode(
            x=x,
            y=y,
            color=alt.Color("verdict:N", scale=colours, legend=legend),
            shape=alt.Shape("verdict:N", scale=shapes, legend=legend),
        )
    )
    counts = ", ".join(f"{len({p.commit for p in state.probes if p.outcome == kind})} {kind}" for kind in kinds)
    says = f"worst own error by commit, {len(state.history)} commits: {counts}"
    return charts._svg(alt.layer(*layers).properties(height=220), says, charts.PROFILE_WIDTH)
