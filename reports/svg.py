"""The little SVG that charts need: scales, ticks, marks, an axis, a legend.

Colours are presentation attributes taken from `PALETTE`. The page maps each of them to its own variable by an attribute
selector, so a chart follows the page's light or dark theme, and keeps the light colours where it is cut out and pasted.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

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
"""The page's variable -> colour in the SVG. Distinguishable with the common forms of colour blindness."""
INK, MUTED, RULE = PALETTE["chart-ink"], PALETTE["chart-muted"], PALETTE["chart-rule"]
FORBIDDEN = PALETTE["chart-forbidden"]

NAME_SIZE, TICK_SIZE = 12, 11
"""Font sizes in CSS pixels."""
LEGEND_HEIGHT = 24
AXIS_HEIGHT = 22
TITLE_HEIGHT = 16
"""Heights in CSS pixels: of a legend, of an axis with its labels, and of an axis title."""

Shape = Literal["circle", "diamond", "cross", "square"]


@dataclass(frozen=True)
class LinearScale:
    """Maps the numbers from `low` to `high` onto the pixels from `start` to `stop`, linearly or by their logarithm."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.stop - self.start)


@dataclass(frozen=True)
class LegendKey:
    """One entry of a legend: a symbol, or a line with this dash pattern, and its name."""

    name: str
    colour: str
    shape: Shape | None = None
    dash: str = ""


def ticks(low: float, high: float, about: int, whole: bool = False) -> list[float]:
    """Round numbers between `low` and `high`, about as many as asked for: multiples of 1, 2 or 5 times a power of ten.

    Args:
        low: lower end of the axis.
        high: upper end.
        about: how many.
        whole: integers only.
    """
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    # The step nearest to the rough one on a log scale, as in d3-array's ticks.
    factor = next((f for limit, f in ((50**0.5, 10), (10**0.5, 5), (2**0.5, 2)) if rough / power >= limit), 1)
    step = max(factor * power, 1.0) if whole else factor * power
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """Labels of at most three significant digits, with exponents where the numbers are very small or very large."""
    largest = max((abs(value) for value in values), default=0.0)
    plain = largest == 0 or 1e-2 <= largest < 1e6
    return [(_plain(value) if plain else _scientific(value)).replace("-", "−", value < 0) for value in values]


def _plain(value: float) -> str:
    return f"{float(f'{value:.3g}'):.12f}".rstrip("0").rstrip(".")


def _scientific(value: float) -> str:
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}" if value else "0"


def text_width(text: str, size: float) -> float:
    """Estimated width in CSS pixels in a wide or a monospaced font: nothing measures text here, so it errs upwards."""
    return size * sum(_width(character) for character in text)


def _width(character: str) -> float:
    if unicodedata.east_asian_width(character) in "WF":
        return 1.05
    return 0.9 if character in "mwMW@%<>=+~" else 0.72 if character.isupper() else 0.62


def image(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    """A chart as an ``<svg>`` element.

    Args:
        width: CSS pixels.
        height: CSS pixels.
        label: alternative text with the numbers.
        parts: its elements.
    """
    size = f'width="{_number(width)}" height="{_number(height)}" viewBox="0 0 {_number(width)} {_number(height)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" aria-label={quoteattr(label)} {size} '
        f'font-family="Inter, system-ui, sans-serif">{"".join(parts)}</svg>'
    )


def element(tag: str, title: str = "", **attributes: str | float | None) -> str:
    """An element; attributes that are None are left out, and an underscore in a name stands for a hyphen."""
    written = "".join(
        f" {name.replace('_', '-')}={quoteattr(value if isinstance(value, str) else _number(value))}"
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{written}><title>{escape(title)}</title></{tag}>" if title else f"<{tag}{written}/>"


def text(content: str, x: float, y: float, anchor: str = "start", size: int = TICK_SIZE, colour: str = MUTED) -> str:
    """Text whose vertical middle is at `y`."""
    # A third of the font size below the middle is the baseline; dominant-baseline is not the same in all renderers.
    at = f'x="{_number(x)}" y="{_number(y + 0.35 * size)}" font-size="{size}" fill="{colour}"'
    return f'<text {at} text-anchor="{anchor}">{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1, **more: str | float | None) -> str:
    """A straight line; `more` are attributes of its stroke, as in `element`."""
    return element("line", "", x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour, stroke_width=width, **more)


def path(points: Sequence[tuple[float, float]], colour: str, width: float, dash: str = "") -> str:
    """A line through `points`."""
    steps = "L".join(f"{_number(x)},{_number(y)}" for x, y in points)
    return element(
        "path", d=f"M{steps}", fill="none", stroke=colour, stroke_width=width, stroke_dasharray=dash or None,
        stroke_linejoin="round",
    )  # fmt: skip


def rect(x1: float, x2: float, y1: float, y2: float, colour: str, opacity: float | None = None) -> str:
    """A filled rectangle between two corners in any order."""
    left, top = min(x1, x2), min(y1, y2)
    return element(
        "rect", x=left, y=top, width=abs(x2 - x1), height=abs(y2 - y1), fill=colour, fill_opacity=opacity
    )  # fmt: skip


def mark(shape: Shape, x: float, y: float, size: float, colour: str, title: str = "") -> str:
    """A mark centred at a point.

    Args:
        shape: its form.
        x: CSS pixels.
        y: CSS pixels.
        size: half of its extent in CSS pixels; diamonds and crosses are drawn a little larger, to look alike.
        colour: of its filling.
        title: shown while the pointer rests on it.
    """
    if shape == "circle":
        return element("circle", title, cx=x, cy=y, r=size, fill=colour)
    if shape == "square":
        return element("rect", title, x=x - size, y=y - size, width=2 * size, height=2 * size, fill=colour)
    if shape == "diamond":
        r = 1.25 * size
        corners = [(x, y - r), (x + r, y), (x, y + r), (x - r, y)]
    else:
        r, w = 1.2 * size, 0.4 * size
        corners = [(x - w, y - r), (x + w, y - r), (x + w, y - w), (x + r, y - w), (x + r, y + w), (x + w, y + w)]
        corners += [(2 * x - cx, 2 * y - cy) for cx, cy in corners]
    steps = "L".join(f"{_number(cx)},{_number(cy)}" for cx, cy in corners)
    return element("path", title, d=f"M{steps}Z", fill=colour)


def bound_rule(x: LinearScale, bound: float, top: float, bottom: float, forbidden_from: float | None) -> list[str]:
    """A bound as a dashed line across the plot; the side that it forbids, up to `forbidden_from`, is tinted."""
    parts = [] if forbidden_from is None else [rect(x(bound), x(forbidden_from), top, bottom, FORBIDDEN, 0.1)]
    return [*parts, line(x(bound), top, x(bound), bottom, FORBIDDEN, 1.5, stroke_dasharray="4 3")]


def axis_below(x: LinearScale, y: float, at: Sequence[float], title: str = "", rule: bool = True) -> list[str]:
    """A horizontal axis below a plot that ends at `y`: labels at the numbers `at`, with a rule and ticks if wanted."""
    parts = [line(x.start, y, x.stop, y, RULE)] if rule else []
    for value, label in zip(at, tick_texts(at), strict=True):
        parts += [line(x(value), y, x(value), y + 4, RULE)] if rule else []
        parts.append(text(label, x(value), y + 13, "middle"))
    return parts + ([text(title, (x.start + x.stop) / 2, y + AXIS_HEIGHT + 6, "middle")] if title else [])


def log_axis_beside(x: LinearScale, y: LinearScale, percent: bool = False) -> list[str]:
    """A logarithmic axis at the left of a plot: a rule and a label, also in percent, at powers of ten, at most eight of them."""
    exponents = range(math.ceil(math.log10(y.low) - 1e-9), math.floor(math.log10(y.high) + 1e-9) + 1)
    parts = []
    for exponent in exponents[:: 1 + len(exponents) // 8]:
        at = y(10.0**exponent)
        label = f"{float(f'1e{exponent + 2}'):g} %" if percent else f"{float(f'1e{exponent}'):g}"
        parts += [line(x.start, at, x.stop, at, RULE), text(label, x.start - 8, at, "end")]
    return parts


def legend(keys: Sequence[LegendKey], x: float = 4) -> list[str]:
    """The legend above a plot."""
    parts = []
    for key in keys:
        if key.shape is None:
            parts.append(line(x, 8, x + 22, 8, key.colour, 3, stroke_dasharray=key.dash or None))
            x += 28
        else:
            parts.append(mark(key.shape, x + 5, 8, 4.5, key.colour))
            x += 15
        parts.append(text(key.name, x, 8, size=NAME_SIZE, colour=INK))
        x += text_width(key.name, NAME_SIZE) + 12
    return parts


def _number(value: float | None) -> str:
    return "0" if not value else f"{value:.2f}".rstrip("0").rstrip(".")
