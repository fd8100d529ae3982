"""Charts as small static SVG: no script, no network, no fonts of their own, colours that the page can turn dark.

Altair describes a chart, vl-convert draws it. The page maps `PALETTE` to its own variables by attribute selectors, so a
chart follows the page's light or dark theme, and shows the light one wherever it is cut out and pasted.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Any

import altair as alt
import vl_convert

from assay.harness.judge.latency_result import LatencyRow
from assay.harness.judge.report import NOT_FINITE, ConditionRow, DepthRow, Metric, OwnError, Tally
from assay.harness.text import one_line
from assay.reports.summary import bound, interval, latency_ratio, number, share

PALETTE = {
    "chart-ink": "#23262b",
    "chart-muted": "#636a75",
    "chart-rule": "#d6d8dc",
    "chart-reference": "#747b86",
    "chart-candidate": "#1a62b8",
    "chart-right": "#2d8a63",
    "chart-wrong": "#cf7a1c",
    "chart-unparsed": "#9a3d63",
    "chart-forbidden": "#c2382f",
}
"""Name of the page's variable -> colour in the SVG. Told apart with the common forms of colour blindness as well."""

FONT = "Inter, system-ui, sans-serif"
WIDTH = 330
"""Width in CSS pixels: a chart fits unscaled into a page of 400 pixels."""
PROFILE_WIDTH = 1000
"""Width of the profile along depth: 128 layers need it, and a narrow page scrolls it in its own frame."""
LABEL_LIMIT = 20
_KINDS = {"own": "chart-candidate", "inherited": "chart-unparsed", "total": "chart-reference"}
_DASHES = {"own": [1, 0], "inherited": [2, 3], "total": [7, 3], "bound of own": [4, 3]}
_SVG = "http://www.w3.org/2000/svg"
_VEGA_LITE = ".".join(alt.SCHEMA_VERSION.split(".")[:2])


def interval_chart(metric: Metric) -> str:
    """Value and interval of a metric on one axis, with its bound; the side that the bound forbids is tinted.

    Returns:
        An ``<svg>`` element; an empty string where there is neither an interval nor a bound to show, or a number is not finite.
    """
    points = [x for x in (metric.value, metric.low, metric.high, metric.bound) if x is not None]
    if metric.value is None or len(points) < 2 or not all(map(math.isfinite, points)):
        return ""
    low, high = min(points), max(points)
    slack = (high - low) * 0.12 or abs(high) * 0.1 or 1.0
    left, right = low - slack, high + slack
    plain = 1e-2 <= max(abs(low), abs(high)) < 1e6
    axis = alt.Axis(title=None, grid=False, tickCount=5, format=".3~r" if plain else ".2~e", tickSize=4)
    x = alt.X("x:Q", scale=alt.Scale(domain=[left, right], nice=False, zero=False), axis=axis)
    layers = []
    if metric.bound is not None:
        if metric.bound_is:
            edge = left if metric.bound_is == "least" else right
            tint = _data({"x": metric.bound, "x2": edge}).mark_rect(color=PALETTE["chart-forbidden"], opacity=0.1)
            layers.append(tint.encode(x=x, x2="x2:Q"))
        rule = _data({"x": metric.bound}).mark_rule(
            color=PALETTE["chart-forbidden"], strokeWidth=1.5, strokeDash=[4, 3]
        )
        layers.append(rule.encode(x=x))
    if metric.low is not None and metric.high is not None:
        span = _data({"x": metric.low, "x2": metric.high})
        layers.append(
            span.mark_rule(color=PALETTE["chart-candidate"], strokeWidth=3, strokeCap="round").encode(x=x, x2="x2")
        )
    dot = _data({"x": metric.value}).mark_point(color=PALETTE["chart-candidate"], filled=True, opacity=1, size=80)
    layers.append(dot.encode(x=x))
    says = f"{one_line(metric.name)}: {number(metric.value)}"
    says += f", interval {interval(metric)}" if metric.low is not None else ""
    says += f", bound {bound(metric)}" if metric.bound is not None else ""
    return _svg(alt.layer(*layers).properties(height=26), says)


def tally_chart(tallies: Sequence[Tally]) -> str:
    """A bar per role, split into right, wrong and unparsed answers; empty where nobody was asked anything."""
    kinds = ("right", "wrong", "unparsed")
    rows = [
        {"role": tally.role, "kind": kind, "count": getattr(tally, kind), "order": order}
        for tally in tallies
        for order, kind in enumerate(kinds)
    ]
    if not any(row["count"] for row in rows):
        return ""
    colour = alt.Color(
        "kind:N",
        scale=alt.Scale(domain=list(kinds), range=[PALETTE[f"chart-{kind}"] for kind in kinds]),
        legend=alt.Legend(title=None, orient="top", symbolType="square", offset=4),
    )
    axis = alt.Axis(title=None, grid=False, tickCount=4, format="d", tickSize=4)
    bars = _data(*rows).mark_bar(size=16)
    chart = bars.encode(
        x=alt.X("count:Q", axis=axis, scale=alt.Scale(nice=False)),
        y=alt.Y("role:N", sort=None, axis=_name_axis()),
        color=colour,
        order=alt.Order("order:Q"),
    )
    says = "; ".join(f"{t.role}: {t.right} right, {t.wrong} wrong, {t.unparsed} unparsed of {t.total}" for t in tallies)
    return _svg(chart.properties(height=54), says)


def condition_chart(rows: Sequence[ConditionRow]) -> str:
    """Accuracy of both roles by bucket: a line of dots, joined where they part. Buckets without items are left out."""
    seen = [row for row in rows if row.items]
    if not seen:
        return ""
    labels = [f"{one_line(row.bucket, LABEL_LIMIT)}  ({row.items})" for row in seen]
    shares = [(row.reference_right / row.items, row.candidate_right / row.items) for row in seen]
    axis = alt.Axis(title=None, values=[0, 0.25, 0.5, 0.75, 1], format=".2~f", tickSize=0, domain=False)
    x = alt.X("x:Q", scale=alt.Scale(domain=[-0.05, 1.05]), axis=axis)
    y = alt.Y("bucket:N", sort=None, axis=_name_axis())
    pairs = [{"bucket": b, "x": r, "x2": c} for b, (r, c) in zip(labels, shares, strict=True)]
    dots = [
        {"bucket": label, "x": pair[i], "role": role}
        for label, pair in zip(labels, shares, strict=True)
        for i, role in enumerate(("reference", "candidate"))
    ]
    roles = alt.Scale(domain=["reference", "candidate"], range=[PALETTE["chart-reference"], PALETTE["chart-candidate"]])
    shapes = alt.Scale(domain=["reference", "candidate"], range=["diamond", "circle"])
    legend = alt.Legend(title=None, orient="top", offset=4, symbolOpacity=1)
    bars = _data(*pairs).mark_rule(color=PALETTE["chart-candidate"], strokeWidth=2, opacity=0.35)
    # The reference's dot is the larger one and lies below, so that it is seen where both roles agree.
    sizes = alt.Scale(domain=["reference", "candidate"], range=[150, 60])
    points = _data(*dots).mark_point(filled=True, opacity=1)
    chart = alt.layer(
        bars.encode(x=x, x2="x2:Q", y=y),
        points.encode(
            x=x,
            y=y,
            color=alt.Color("role:N", scale=roles, legend=legend),
            shape=alt.Shape("role:N", scale=shapes, legend=legend),
            size=alt.Size("role:N", scale=sizes, legend=None),
        ),
    )
    says = f"accuracy by {one_line(seen[0].by)}: " + "; ".join(
        f"{one_line(row.bucket)}: reference {share(row.reference_right, row.items)}, "
        f"candidate {share(row.candidate_right, row.items)} of {row.items}"
        for row in seen
    )
    return _svg(chart.properties(height=26 * len(seen)), says)


def profile_chart(rows: Sequence[DepthRow]) -> str:
    """Own, inherited and total error along depth, on a log scale, against the bound of own error.

    Layers out of bounds are marked on the line of own errors. What is not finite stands as a cross at the upper edge, and
    where nothing was observed a line is broken.
    """
    numbers = [
        x for row in rows for x in (row.own, row.inherited, row.total, row.bound) if isinstance(x, float) and x > 0
    ]
    if not numbers:
        return ""
    low, high = 10 ** math.floor(math.log10(min(numbers))), 10 ** math.ceil(math.log10(max(numbers)) + 0.01)
    points: list[dict[str, Any]] = []
    for kind in _KINDS:
        run = 0
        for row in rows:
            error: OwnError = getattr(row, kind)
            if error is None:
                run += 1
                continue
            y = high if error == NOT_FINITE else max(float(error), low)
            mark = (
                "not finite" if error == NOT_FINITE else "out of bounds" if kind == "own" and row.out_of_bounds else ""
            )
            points.append({"layer": row.layer, "y": y, "kind": kind, "run": f"{kind} {run}", "mark": mark})
    steps = [
        {"layer": row.layer - 0.5, "end": row.layer + 0.5, "y": row.bound, "kind": "bound of own"}
        for row in rows
        if row.bound is not None
    ]
    names = [*(kind for kind in _KINDS if any(point["kind"] == kind for point in points))]
    names += ["bound of own"] if steps else []
    across = alt.Axis(title="layer", grid=False, format="d", tickMinStep=1, tickSize=4, titleFontWeight="normal")
    up = alt.Axis(title=None, format="~g", values=_decades(low, high), domain=False, tickSize=0)
    ends = [rows[0].layer - 0.5, rows[-1].layer + 0.5]
    x = alt.X("layer:Q", scale=alt.Scale(domain=ends, nice=False, zero=False), axis=across)
    y_axis = alt.Y("y:Q", scale=alt.Scale(type="log", domain=[low, high], nice=False), axis=up)
    scale = alt.Scale(domain=names, range=[PALETTE[_KINDS.get(name, "chart-forbidden")] for name in names])
    legend = alt.Legend(title=None, orient="top", offset=6, symbolType="stroke", symbolStrokeWidth=3, symbolSize=300)
    dashes = alt.Scale(domain=names, range=[_DASHES[name] for name in names])
    marks = alt.Scale(domain=["", "out of bounds", "not finite"], range=["circle", "diamond", "cross"])
    common = {"x": x, "y": y_axis, "color": alt.Color("kind:N", scale=scale, legend=legend)}
    dashed = common | {"strokeDash": alt.StrokeDash("kind:N", scale=dashes, legend=legend)}
    marked = _data(*(point for point in points if point["mark"])).mark_point(filled=True, opacity=1, size=60)
    ink, forbidden = (alt.value(PALETTE[name]) for name in ("chart-ink", "chart-forbidden"))
    chart = alt.layer(
        _data(*steps).mark_rule(strokeWidth=1.5).encode(**dashed, x2="end:Q"),
        _data(*points).mark_line(strokeWidth=2).encode(**dashed, detail="run:N"),
        _data(*points).mark_point(filled=True, opacity=1, size=18).encode(**common),
        marked.encode(
            x=x,
            y=y_axis,
            shape=alt.Shape("mark:N", scale=marks, legend=None),
            color=alt.condition("datum.mark == 'not finite'", ink, forbidden),
        ),
    )
    bad = sum(row.out_of_bounds for row in rows)
    says = f"error by layer, {rows[0].layer} to {rows[-1].layer}: {bad} of {len(rows)} own errors are out of bounds"
    return _svg(chart.properties(height=200), says, PROFILE_WIDTH)


def ratio_ends(rows: Sequence[LatencyRow]) -> tuple[float, float]:
    """Ends of an axis that holds 1, the bound, and every measured ratio with its interval."""
    found = [x for row in rows for x in (row.bound, row.ratio, row.low, row.high, row.floor) if x is not None]
    low, high = min(found, default=1.0), max(found, default=1.0)
    low, high = min(low, 1.0), max(high, 1.0)
    slack = 0.06 * (high - low) or 0.1
    return low - slack, high + slack


def ratio_chart(rows: Sequence[LatencyRow], ends: tuple[float, float]) -> str:
    """Ratios of times of one load with their intervals, a line for each metric; what lies beyond the bound is tinted.

    The diamond is the floor: the reference over itself. An interval that too few ratios leave open is not drawn.
    """
    shown = [row for row in rows if row.ratio is not None]
    if not shown:
        return ""
    axis = alt.Axis(title=None, grid=False, tickCount=5, format=".3~r", tickSize=4)
    x = alt.X("x:Q", scale=alt.Scale(domain=list(ends), nice=False, zero=False), axis=axis)
    y = alt.Y("metric:N", sort=None, axis=_name_axis())
    bound = shown[0].bound
    tint = _data({"x": bound, "x2": ends[1]}).mark_rect(color=PALETTE["chart-forbidden"], opacity=0.1)
    rule = _data({"x": bound}).mark_rule(color=PALETTE["chart-forbidden"], strokeWidth=1.5, strokeDash=[4, 3])
    equal = _data({"x": 1.0}).mark_rule(color=PALETTE["chart-rule"], strokeWidth=1.5)
    spans = [
        {"metric": row.metric, "x": row.low, "x2": row.high}
        for row in shown
        if row.low is not None and row.high is not None
    ]
    roles = alt.Scale(
        domain=["reference over itself", "candidate"],
        range=[PALETTE["chart-reference"], PALETTE["chart-candidate"]],
    )
    shapes = alt.Scale(domain=roles.domain, range=["diamond", "circle"])
    legend = alt.Legend(title=None, orient="top", offset=4, symbolOpacity=1, labelLimit=200)
    dots = [{"metric": row.metric, "x": row.floor, "of": roles.domain[0]} for row in shown if row.floor is not None]
    dots += [{"metric": row.metric, "x": row.ratio, "of": roles.domain[1]} for row in shown]
    layers = [tint.encode(x=x, x2="x2:Q"), equal.encode(x=x), rule.encode(x=x)]
    if spans:
        thick = _data(*spans).mark_rule(color=PALETTE["chart-candidate"], strokeWidth=3, strokeCap="round")
        layers.append(thick.encode(x=x, x2="x2:Q", y=y))
    layers.append(
        _data(*dots)
        .mark_point(filled=True, opacity=1, size=70)
        .encode(
            x=x,
            y=y,
            color=alt.Color("of:N", scale=roles, legend=legend),
            shape=alt.Shape("of:N", scale=shapes, legend=legend),
        )
    )
    says = (
        f"{one_line(shown[0].shape)}, {shown[0].concurrency} in flight, candidate over reference, bound {bound:g}: "
        + "; ".join(f"{row.metric} {latency_ratio(row.ratio, row.low, row.high)}" for row in shown)
    )
    return _svg(alt.layer(*layers).properties(height=26 * len(shown)), says)


def _decades(low: float, high: float) -> list[float]:
    exponents = range(round(math.log10(low)), round(math.log10(high)) + 1)
    return [float(f"1e{exponent}") for exponent in exponents[:: 1 + len(exponents) // 7]]


def _data(*rows: dict[str, Any]) -> Any:
    return alt.Chart(alt.Data(values=list(rows)))


def _name_axis() -> Any:
    return alt.Axis(title=None, ticks=False, domain=False, labelPadding=8, labelLimit=200, labelFontSize=12)


def _svg(chart: Any, says: str, width: int = WIDTH) -> str:
    spec = (
        chart.properties(
            background="transparent", padding=4, width=width, autosize={"type": "fit-x", "contains": "padding"}
        )
        .configure(aria=False, font=FONT)
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=PALETTE["chart-muted"],
            titleColor=PALETTE["chart-muted"],
            domainColor=PALETTE["chart-rule"],
            tickColor=PALETTE["chart-rule"],
            gridColor=PALETTE["chart-rule"],
            labelFontSize=11,
        )
        .configure_axisY(labelColor=PALETTE["chart-ink"])
        .configure_legend(labelColor=PALETTE["chart-ink"], labelFontSize=12, symbolSize=70)
        .to_dict()
    )
    return _inline(vl_convert.vegalite_to_svg(spec, vl_version=_VEGA_LITE), says)


def _inline(svg: str, says: str) -> str:
    """`svg` as an image with an alternative text, without the parts that draw nothing."""
    ET.register_namespace("", _SVG)
    root = ET.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.get("display") == "none" or (child.get("class") == "background" and not child.get("fill")):
                parent.remove(child)
        for name in ("class", "aria-hidden", "aria-roledescription", "role"):
            parent.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", says)
    root.set("class", "chart")
    return ET.tostring(root, encoding="unicode")
