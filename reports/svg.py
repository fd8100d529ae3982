"""The chart of an interval, and the little SVG that drawings need: a scale, its round numbers, and elements.

Colours are presentation attributes taken from `PALETTE`. The page maps each of them to its own variable by an attribute selector,
so a chart follows the page's light or dark theme, and keeps the light colours when it is copied out of the page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from xml.sax.saxutils import escape, quoteattr

from assay.harness.text import one_line

# The page's variable -> colour in the SVG. Distinguishable with the common forms of colour blindness.
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
INK, MUTED, RULE = PALETTE["chart-ink"], PALETTE["chart-muted"], PALETTE["chart-rule"]
REFERENCE, CANDIDATE, FORBIDDEN = PALETTE["chart-reference"], PALETTE["chart-candidate"], PALETTE["chart-forbidden"]

# CSS pixels: a chart fits unscaled into a page of 400 pixels.
_WIDTH, _HEIGHT, _MARGIN = 330, 26, 6

# Font sizes and the height of an axis with its labels, in CSS pixels.
NAME_SIZE, TICK_SIZE, AXIS_HEIGHT = 12, 11, 22


@dataclass(frozen=True)
class Scale:
    """Maps the numbers from `low` to `high` onto the pixels from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Return at most this many multiples of 1, 2 or 5 times a power of ten between two numbers."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * factor for factor in (1, 2, 5, 10) if high - low <= power * factor * most)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def image(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    """Return a chart as an ``<svg>`` element; `label` is its alternative text, with the numbers."""
    size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" aria-label={quoteattr(one_line(label, 800))} {size} '
        f'font-family="Inter, system-ui, sans-serif">{"".join(parts)}</svg>'
    )


def element(tag: str, title: str = "", **attributes: str | float) -> str:
    """Return an element; an underscore in a name stands for a hyphen."""
    written = "".join(
        f" {name.replace('_', '-')}={quoteattr(value if isinstance(value, str) else number(value))}"
        for name, value in attributes.items()
    )
    return f"<{tag}{written}><title>{escape(title)}</title></{tag}>" if title else f"<{tag}{written}/>"


def text(content: str, x: float, y: float, anchor: str = "start", size: int = TICK_SIZE, colour: str = MUTED) -> str:
    """Return text whose vertical middle is at `y`."""
    # The baseline is a third of the font size below the middle; dominant-baseline differs between renderers.
    at = f'x="{number(x)}" y="{number(y + 0.35 * size)}" font-size="{size}" fill="{colour}"'
    return f'<text {at} text-anchor="{anchor}">{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1, **more: str | float) -> str:
    """Return a straight line; `more` are attributes of its stroke, as in `element`."""
    return element("line", "", x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour, stroke_width=width, **more)


def rect(x1: float, x2: float, y1: float, y2: float, colour: str, title: str = "", opacity: float = 1) -> str:
    """Return a filled rectangle between two corners, the left one first."""
    return element("rect", title, x=x1, y=y1, width=x2 - x1, height=y2 - y1, fill=colour, fill_opacity=opacity)


def axis_below(x: Scale, y: float, most: int, title: str = "") -> list[str]:
    """Return a horizontal axis below a plot that ends at `y`, with at most this many labels."""
    parts = [line(x.start, y, x.stop, y, RULE)]
    for value in _ticks(x.low, x.high, most):
        label = f"{value:.3g}" if abs(value) < 1_000 else f"{value:.0f}"
        parts += [line(x(value), y, x(value), y + 4, RULE), text(label.replace("-", "−"), x(value), y + 13, "middle")]
    return parts + ([text(title, (x.start + x.stop) / 2, y + AXIS_HEIGHT + 6, "middle")] if title else [])


def number(value: float) -> str:
    """Format a coordinate, without invisible digits."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"


def interval_chart(
    says: str, value: float | None, low: float | None, high: float | None, bound: float | None = None
) -> str:
    """Draw a value and its interval on one axis, with its bound; see `intervals_chart`. Return nothing without an interval."""
    return (
        "" if value is None or low is None or high is None else intervals_chart(says, {"": (value, low, high)}, bound)
    )


def intervals_chart(
    says: str, rows: Mapping[str, tuple[float, float, float]], bound: float | None = None, title: str = ""
) -> str:
    """Draw values and their intervals below their names on one axis, with their bound; the area beyond it is tinted.

    Returns:
        An ``<svg>`` element with the alternative text `says`, or an empty string without rows or if a number is not finite.
    """
    known = [*chain.from_iterable(rows.values()), *([] if bound is None else [bound])]
    if not rows or not all(map(math.isfinite, known)):
        return ""
    slack = (max(known) - min(known)) * 0.12 or abs(known[0]) * 0.1 or 1.0
    x = Scale(min(known) - slack, max(known) + slack, _MARGIN, _WIDTH - _MARGIN)
    above = NAME_SIZE + 6 if any(rows) else 0
    height, parts = (above + _HEIGHT) * len(rows), []
    for number, (name, (value, low, high)) in enumerate(rows.items(), 1):
        middle = (above + _HEIGHT) * number - _HEIGHT / 2
        parts += (
            [text(one_line(name, 44), _MARGIN, middle - _HEIGHT / 2 - 4, size=NAME_SIZE, colour=INK)] if name else []
        )
        if bound is not None:
            top, bottom = middle - _HEIGHT / 2, middle + _HEIGHT / 2
            parts.append(rect(x(bound), x(x.high), top, bottom, FORBIDDEN, opacity=0.1))
            parts.append(line(x(bound), top, x(bound), bottom, FORBIDDEN, 1.5, stroke_dasharray="4 3"))
        parts.append(line(x(low), middle, x(high), middle, CANDIDATE, 3, stroke_linecap="round"))
        parts.append(element("circle", cx=x(value), cy=middle, r=5, fill=CANDIDATE))
    below = AXIS_HEIGHT + 14 * bool(title)
    return image(_WIDTH, height + below, says, [*parts, *axis_below(x, height, 7, title)])
