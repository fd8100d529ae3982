"""The chart of an interval: small static SVG without script, network or fonts, readable in light and dark."""

from __future__ import annotations

import math

from assay.reports import svg

# CSS pixels: a chart fits unscaled into a page of 400 pixels.
_WIDTH, _HEIGHT, _MARGIN = 330, 26, 6


def interval_chart(
    says: str,
    value: float | None,
    low: float | None,
    high: float | None,
    bound: float | None = None,
) -> str:
    """Draw a value and its interval on one axis, with its bound, beyond which it is tinted.

    Returns:
        An ``<svg>`` element with the alternative text `says`; an empty string where there is no interval, for which the number and
        its bound in words are enough, or where a number is not finite.
    """
    if value is None or low is None or high is None:
        return ""
    known = [value, low, high, *([] if bound is None else [bound])]
    if not all(map(math.isfinite, known)):
        return ""
    slack = (max(known) - min(known)) * 0.12 or abs(value) * 0.1 or 1.0
    x = svg.Scale(min(known) - slack, max(known) + slack, _MARGIN, _WIDTH - _MARGIN)
    parts, middle = [], _HEIGHT / 2
    if bound is not None:
        parts.append(svg.rect(x(bound), x(x.high), 0, _HEIGHT, svg.FORBIDDEN, opacity=0.1))
        parts.append(svg.line(x(bound), 0, x(bound), _HEIGHT, svg.FORBIDDEN, 1.5, stroke_dasharray="4 3"))
    parts.append(svg.line(x(low), middle, x(high), middle, svg.CANDIDATE, 3, stroke_linecap="round"))
    parts.append(svg.element("circle", cx=x(value), cy=middle, r=5, fill=svg.CANDIDATE))
    return svg.image(_WIDTH, _HEIGHT + svg.AXIS_HEIGHT, says, [*parts, *svg.axis_below(x, _HEIGHT, 7)])
