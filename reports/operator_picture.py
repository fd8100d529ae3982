"""The picture of an operator, as SVG for a page and as characters for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap
from xml.sax.saxutils import escape

from rich.text import Text

from assay.harness.picture import (
    ELSEWHERE,
    NONE,
    SAME,
    UNSEEN,
    WITH_WEIGHTS,
    WRONG,
    WRONG_WEIGHT,
    WRONGLY_SEEN,
    Picture,
    RowKind,
)
from assay.harness.text import one_line, percent, ranges, some
from assay.reports import svg as draw
from assay.reports.svg import FORBIDDEN, INK, MUTED, NAME_SIZE, PALETTE, RULE, TICK_SIZE, text_width

WIDTH = 980
"""Most CSS pixels of a picture: what a page has room for within a finding."""
NARROW = 312
"""The same on a phone of 390 CSS pixels."""
_SMALLEST, LARGEST = 10, 20
"""CSS pixels of a cell whose sign can be told from others, and of the largest cell."""
_SHADED = 4
"""CSS pixels of a cell whose shade can be told from others."""
_SHADES = 8
"""Shades of a weight, from the least to the largest of its query."""
_GAP, _TITLE, _AXIS, _LEAST_WIDTH, _LEGEND = 30, 20, 22, 112, 20
_NARROW_GAP, _RIGHT = 14, 18
"""Between panels on a phone, and right of the last one, for the sign of a row."""
_REFERENCE, _CANDIDATE = PALETTE["chart-reference"], PALETTE["chart-candidate"]

_CELL_WORDS = {
    SAME: "as expected", UNSEEN: "unseen", WRONGLY_SEEN: "wrongly seen", WRONG_WEIGHT: "wrong weight", ELSEWHERE: "from elsewhere",
}  # fmt: skip
_ROW_WORDS: dict[RowKind, str] = {
    "nan": "NaN", "infinite": "infinite", "zero": "zero", "constant": "constant", "right": "right, not read",
    "wrong": "wrong, not read", "shifted": "something is added", "nonlinear": "not the whole output",
}  # fmt: skip
_ROW_SIGNS: dict[RowKind, str] = {
    "nan": "N", "infinite": "I", "zero": "0", "constant": "C", "right": "=", "wrong": "?", "shifted": "+", "nonlinear": "&",
}  # fmt: skip
_STYLES = {
    UNSEEN: "red",
    WRONGLY_SEEN: "yellow",
    WRONG_WEIGHT: "blue",
    ELSEWHERE: "magenta",
    SAME: "dim",
    NONE: "dim",
    "|": "dim",
}


def caption(picture: Picture) -> str:
    """Return what is shown: the call, the q head, and the queries and keys if they are not all."""
    parts = [picture.call, f"q head {picture.head} of {picture.heads}"]
    if picture.wrong_heads and picture.heads > 1:
        parts.append(f"wrong in {some('q head', picture.wrong_heads, range(picture.heads))}")
    if picture.foreign_kv_heads:
        heads = picture.foreign_kv_heads
        parts.append(f"reads from kv head{'s' * (len(heads) > 1)} {ranges(heads)}, not its own")
    if picture.shown:
        parts.append(picture.shown)
    if _several(picture):
        parts.append("labels are sequence:position")
    return one_line("; ".join(parts), 600)


def _summary(picture: Picture) -> str:
    """The picture in words, for who cannot see it: how many pairs of a query and a key differ, and what else is wrong."""
    counts = {sign: sum(row.count(sign) for row in picture.cells) for sign in _CELL_WORDS}
    words = [f"{count:,} {_CELL_WORDS[sign]}" for sign, count in counts.items() if count]
    rows = [(word, picture.rows.count(kind)) for kind, word in _ROW_WORDS.items()]
    kinds = [f"; {word} in {count} {'query' if count == 1 else 'queries'}" for word, count in rows if count]
    return f"pairs of a query and a key: {', '.join(words) or 'none'}{''.join(kinds)}"


def svg(picture: Picture, width: int = WIDTH) -> str:
    """Three panels of queries x keys: the expected weights, the weights that were read, and what differs.

    Expected and read are shaded by weight, relative to the largest of the query. What differs has a sign for each kind, so that no
    colour is needed to tell them. Panels stand side by side; where cells would be too small for signs, the last stands below.

    Args:
        picture: what to draw.
        width: CSS pixels that there is room for. On a screen, a picture of many keys is wider where its signs would be too small.
            A phone is smaller than any such picture: there its cells shrink instead, and titles and zooming tell signs apart.

    Returns:
        An ``<svg>`` element.
    """
    keys = max(1, len(picture.key_indices))
    label = max(text_width(label_, TICK_SIZE) for label_ in ("query", *_query_labels(picture))) + 8
    gap = _GAP if width >= WIDTH else _NARROW_GAP
    across = _cell(width - label - _RIGHT - 2 * gap, 3, keys)
    above, room = _cell(width - label - _RIGHT - gap, 2, keys), width - label - _RIGHT
    below: float = _cell(room, 1, keys) or _SMALLEST
    below = max(_SMALLEST, below) if width >= WIDTH else min(max(_SMALLEST, below), room / keys)
    entries = _legend(picture, width)
    lines = 1 + max((line for *_, line in entries), default=0)
    top = lines * _LEGEND + _TITLE
    down = _AXIS + _TITLE + 8
    expected = _Panel(picture, label, top, across or above or below)
    if across or above:
        read = _Panel(picture, label + expected.width + gap, top, expected.cell)
    else:
        read = _Panel(picture, label, expected.bottom + down, below)
    difference = (
        _Panel(picture, read.left + read.width + gap, top, across)
        if across
        else _Panel(picture, label, read.bottom + down, below)
    )
    parts = [
        f"<title>{escape('Attention weights: ' + caption(picture))}</title>",
        f"<desc>{escape(_summary(picture))}</desc>",
    ]
    for sign, name, x, line in entries:
        parts += _entry(sign, name, x, line * _LEGEND + 9)
    parts += [*expected.frame("expected", True), *expected.shades(picture.expected, _REFERENCE), *expected.rules()]
    parts += [
        *read.frame("read", read.left == label),
        *read.shades(picture.read, _CANDIDATE),
        *read.blocks(),
        *read.rules(),
    ]
    parts += [
        *difference.frame("difference", difference.left == label),
        *difference.signs(),
        *difference.blocks(),
        *difference.rules(),
    ]
    right = max(x + _entry_width(name) for _, name, x, _ in entries)
    right = max(right, *(panel.left + panel.width + _RIGHT for panel in (expected, read, difference)))
    return draw.image(
        right, difference.bottom + _AXIS, f"Attention weights: {caption(picture)}; {_summary(picture)}", parts
    )


def _cell(room: float, panels: int, keys: int) -> int:
    """CSS pixels of a cell if so many panels share a line; 0 if they do not fit, or cells would be too small.

    A weight's shade can be told on a smaller cell than a sign, and all three panels in a line are of one size.
    """
    least = _SMALLEST if panels == 3 else _SHADED
    cell = min(LARGEST, math.floor(room / panels / keys))
    return cell if cell >= least and panels * max(cell * keys, _LEAST_WIDTH) <= room else 0


@dataclass(frozen=True)
class _Panel:
    """One of the three panels: where it stands, in CSS pixels, and the size of its cells."""

    picture: Picture
    left: float
    top: float
    cell: float

    @property
    def width(self) -> float:
        """CSS pixels, with room for its title and for what rows without weights say."""
        return max(self.cell * len(self.picture.key_indices), _LEAST_WIDTH)

    @property
    def right(self) -> float:
        """Where its last cell ends."""
        return self.left + self.cell * len(self.picture.key_indices)

    @property
    def bottom(self) -> float:
        """Where its last row ends."""
        return self.top + self.cell * len(self.picture.rows)

    def frame(self, title: str, labelled: bool) -> list[str]:
        """Border, title and the labels of keys; those of queries if wanted."""
        parts = [
            draw.text(title, self.left, self.top - 9, size=NAME_SIZE, colour=INK),
            draw.element(
                "rect", x=self.left, y=self.top, width=self.right - self.left, height=self.bottom - self.top, fill="none",
                stroke=RULE,
            ),
        ]  # fmt: skip
        end = -math.inf
        for n, name in _key_labels(self.picture):
            half = text_width(name, TICK_SIZE) / 2
            x = max(
                self.left + (n + 0.5) * self.cell, self.left + half - 4
            )  # the first must not run into the name of the axis
            if x - half > end + 4:
                parts.append(draw.text(name, x, self.bottom + 9, "middle"))
                end = x + half
        return parts + (self._query_axis() if labelled else [])

    def _query_axis(self) -> list[str]:
        parts = [
            draw.text("query", self.left - 6, self.top - 9, "end"),
            draw.text("key", self.left - 6, self.bottom + 9, "end"),
        ]
        end = -math.inf
        for n, name in enumerate(_query_labels(self.picture)):
            y = self.top + (n + 0.5) * self.cell
            if y >= end + TICK_SIZE:
                parts.append(draw.text(name, self.left - 6, y, "end"))
                end = y
        return parts

    def rules(self) -> list[str]:
        """Lines where queries or keys do not follow one another."""
        xs = [self.left + n * self.cell for n in self.picture.key_breaks]
        ys = [self.top + n * self.cell for n in self.picture.query_breaks]
        return [draw.line(x, self.top, x, self.bottom, MUTED, 0.8) for x in xs] + [
            draw.line(self.left, y, self.right, y, MUTED, 0.8) for y in ys
        ]

    def shades(self, weights: Sequence[Sequence[float]], colour: str) -> list[str]:
        """A square for each weight, stronger for more; a path for each shade keeps pages small."""
        paths: dict[int, list[str]] = {}
        most = [
            max(map(abs, (*a, *b)), default=0.0) for a, b in zip(self.picture.expected, self.picture.read, strict=True)
        ]
        for n, (row, largest) in enumerate(zip(weights, most, strict=True)):
            for k, weight in enumerate(row):
                if weight:
                    shade = max(1, math.ceil(_SHADES * math.sqrt(abs(weight) / largest)))
                    paths.setdefault(shade, []).append(_square(*self._centre(n, k), (self.cell - 1) / 2))
        return [
            draw.element("path", d="".join(steps), fill=colour, fill_opacity=0.15 + 0.85 * shade / _SHADES)
            for shade, steps in sorted(paths.items())
        ]

    def _centre(self, row: int, key: int) -> tuple[float, float]:
        """The centre of a cell."""
        return self.left + (key + 0.5) * self.cell, self.top + (row + 0.5) * self.cell

    def signs(self) -> list[str]:
        """A sign for each cell; one path for each kind of a row, with a title in words."""
        parts = []
        for n, (cells, kind) in enumerate(zip(self.picture.cells, self.picture.rows, strict=True)):
            for sign in sorted(set(cells) - {NONE}, key=list(_CELL_WORDS).index):
                keys = [k for k, cell in enumerate(cells) if cell == sign]
                spots = [self._centre(n, k) for k in keys]
                parts.append(_sign(sign, spots, self.cell, "" if sign == SAME else self._says(n, sign, keys)))
            if kind in ("shifted", "nonlinear"):
                y = self.top + (n + 0.5) * self.cell
                parts.append(
                    draw.text(
                        _ROW_SIGNS[kind], self.right + 3, y, size=min(NAME_SIZE, int(self.cell)), colour=FORBIDDEN
                    )
                )
        return parts

    def _says(self, row: int, sign: str, keys: Sequence[int]) -> str:
        should, does = (sum(weights[row][k] for k in keys) for weights in (self.picture.expected, self.picture.read))
        which = ranges([self.picture.key_indices[k] for k in keys])
        return (
            f"query {_query_labels(self.picture)[row]}: key{'s' * (len(keys) > 1)} {which} {_CELL_WORDS[sign]}; "
            f"expected {percent(should)} of the weight, read {percent(does)}"
        )

    def blocks(self) -> list[str]:
        """Rows without weights, as blocks with a word in them."""
        parts = []
        for first, count, kind in _blocks(self.picture):
            y, height = self.top + first * self.cell, count * self.cell
            parts.append(draw.rect(self.left, self.right, y + 1, y + height - 1, RULE, 0.55))
            if kind != "right":
                parts.append(draw.rect(self.left, self.left + 3, y + 1, y + height - 1, FORBIDDEN))
            if height >= _SMALLEST:
                parts.append(draw.text(_ROW_WORDS[kind], self.left + 8, y + height / 2, colour=INK))
        return parts


def _entry(sign: str, name: str, x: float, y: float) -> list[str]:
    """An entry of the legend: its sign and its name."""
    at = (x + 7, y)
    if sign in _CELL_WORDS:
        drawn = _sign(sign, [at], 14, "")
    elif sign in ("expected", "read"):
        drawn = draw.mark("square", *at, 5, _REFERENCE if sign == "expected" else _CANDIDATE)
    else:
        drawn = draw.text(sign, *at, "middle", NAME_SIZE, FORBIDDEN)
    return [drawn, draw.text(name, x + 20, y, size=NAME_SIZE, colour=INK)]


def _entry_width(name: str) -> float:
    """CSS pixels of an entry of the legend, with the space after it."""
    return 20 + text_width(name, NAME_SIZE) + 10


def _legend(picture: Picture, width: int) -> list[tuple[str, str, float, int]]:
    """The entries of the legend: sign and name, each with its place in CSS pixels and its line."""
    seen = {sign for row in picture.cells for sign in row}
    entries = {"expected": "expected", "read": "read, stronger for more weight"}
    entries |= {sign: word for sign, word in _CELL_WORDS.items() if sign in seen}
    entries |= {_ROW_SIGNS[kind]: _ROW_WORDS[kind] for kind in WITH_WEIGHTS if kind in picture.rows and kind != "read"}
    placed, x, line = [], 0.0, 0
    for sign, name in entries.items():
        if x and x + _entry_width(name) > width:
            x, line = 0.0, line + 1
        placed.append((sign, name, x, line))
        x += _entry_width(name)
    return placed


def _sign(sign: str, spots: Sequence[tuple[float, float]], cell: float, title: str) -> str:
    """The sign of one kind of cell at some centres, as one path."""
    r = max(1.0, cell / 7) if sign == SAME else (cell - 1) / 2 - (0.75 if sign in (UNSEEN, ELSEWHERE) else 0)
    outlines = {SAME: _square, UNSEEN: _square, WRONGLY_SEEN: _square, WRONG_WEIGHT: _triangle, ELSEWHERE: _cross}
    steps = "".join(outlines[sign](x, y, r) for x, y in spots)
    if sign in (UNSEEN, ELSEWHERE):
        colour, width = (FORBIDDEN, 1.5) if sign == UNSEEN else (PALETTE["chart-unparsed"], 2)
        # Without this, the pointer would have to rest on a line for the title to be shown.
        return draw.element(
            "path", title, d=steps, fill="none", stroke=colour, stroke_width=width, pointer_events="all"
        )
    colour = {SAME: MUTED, WRONGLY_SEEN: PALETTE["chart-wrong"], WRONG_WEIGHT: _CANDIDATE}[sign]
    return draw.element("path", title, d=steps, fill=colour)


def _square(x: float, y: float, r: float) -> str:
    return f"M{_number(x - r)},{_number(y - r)}h{_number(2 * r)}v{_number(2 * r)}h-{_number(2 * r)}z"


def _triangle(x: float, y: float, r: float) -> str:
    return f"M{_number(x - r)},{_number(y + r)}h{_number(2 * r)}l-{_number(r)},-{_number(2 * r)}z"


def _cross(x: float, y: float, r: float) -> str:
    d = _number(2 * r)
    return f"M{_number(x - r)},{_number(y - r)}l{d},{d}M{_number(x - r)},{_number(y + r)}l{d},-{d}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _several(picture: Picture) -> bool:
    """Return True if a label needs the number of a sequence."""
    return len({*picture.query_sequences, *picture.key_sequences}) > 1


def _query_labels(picture: Picture) -> list[str]:
    labels = zip(picture.query_sequences, picture.query_positions, strict=True)
    return [f"{sequence}:{position}" if _several(picture) else str(position) for sequence, position in labels]


def _key_labels(picture: Picture) -> list[tuple[int, str]]:
    """Keys that get a label, with it: the first after each break, and round numbers."""
    starts = {0, *picture.key_breaks}
    labels = enumerate(zip(picture.key_sequences, picture.key_indices, strict=True))
    step = 5 if len(picture.key_indices) < 20 else 10
    return [
        (n, f"{sequence}:{index}" if _several(picture) else str(index))
        for n, (sequence, index) in labels
        if n in starts or index % step == 0
    ]


def _blocks(picture: Picture) -> Iterator[tuple[int, int, RowKind]]:
    """Consecutive rows of one kind that have no weights: the first, how many, and the kind."""
    first = 0
    for kind, group in groupby(picture.rows):
        count = len(list(group))
        if kind not in WITH_WEIGHTS:
            yield first, count, kind
        first += count


def text(picture: Picture, width: int = 100) -> Text:
    """The picture as lines of characters, one for each cell, with a legend and the caption.

    All three panels are shown if they fit into so many columns, else only what differs, and of that only the keys that fit: the
    same characters say what was expected and what was read.
    """
    panels = {"expected": _expected_rows(picture), "read": _read_rows(picture), "difference": _difference_rows(picture)}
    labels = _query_labels(picture)
    margin = max(map(len, ("query", *labels))) + 1
    marks = [f" {_ROW_SIGNS[kind]}" if kind in _ROW_SIGNS and kind in WITH_WEIGHTS else "" for kind in picture.rows]
    columns, cut = range(len(picture.key_indices)), ""
    full, beside = len(columns) + len(picture.key_breaks), max(map(len, marks))
    if margin + 2 * (max(full, len("expected")) + 2) + max(full + beside, len("difference")) > width:
        panels = {"difference": panels["difference"]}
        columns = _columns_that_fit(picture, width - margin - beside)
        if len(columns) < len(picture.key_indices):
            cut = f"; of these, keys {ranges([picture.key_indices[n] for n in columns])} fit here"
    ruler = _ruler(picture, columns)
    size = max(len(ruler), min(full, len(columns) + len(picture.key_breaks)), len("expected"))
    drawing = Text(" " * margin + "  ".join(f"{title:<{size}}" for title in panels).rstrip() + "\n")
    drawing.append(f"{'query':<{margin}}" + "  ".join(f"{ruler:<{size}}" for _ in panels).rstrip() + "\n", "dim")
    for n, label in enumerate(labels):
        drawing.append(f"{label:<{margin}}")
        for title, rows in panels.items():
            shown = "".join("|" * (k in picture.key_breaks and k > columns[0]) + rows[n][k] for k in columns)
            for sign, group in groupby(shown):
                drawing.append("".join(group), _STYLES.get(sign, "red"))
            if title != "difference":
                drawing.append(" " * (size - len(shown) + 2))
        drawing.append(marks[n], "red").append("\n")
    below = [line for words in (_text_legend(picture), caption(picture) + cut) for line in wrap(words, width)]
    drawing.append("\n".join(below))
    return drawing


def _expected_rows(picture: Picture) -> list[str]:
    return ["".join(SAME if weight else NONE for weight in row) for row in picture.expected]


def _read_rows(picture: Picture) -> list[str]:
    seen = str.maketrans({UNSEEN: NONE, **dict.fromkeys((WRONGLY_SEEN, WRONG_WEIGHT, ELSEWHERE), SAME)})
    return [row.translate(seen) for row in _difference_rows(picture)]


def _difference_rows(picture: Picture) -> list[str]:
    """The cells; of a query without weights, its sign for every key."""
    keys = len(picture.key_indices)
    return [cells or _ROW_SIGNS[kind] * keys for cells, kind in zip(picture.cells, picture.rows, strict=True)]


def _columns_that_fit(picture: Picture, room: int) -> range:
    """Keys that fit into so many columns, with the first that differs among them."""
    keys = len(picture.key_indices)
    count = max(1, min(keys, room - len(picture.key_breaks)))
    first = next((k for k in range(keys) if any(row[k : k + 1] in WRONG for row in picture.cells)), 0)
    start = max(0, min(first - 2, keys - count))
    return range(start, start + count)


def _ruler(picture: Picture, columns: Sequence[int]) -> str:
    """The labels of some keys, each above its column."""
    names, line, breaks = dict(_key_labels(picture)), "", 0
    for place, k in enumerate(columns):
        breaks += place > 0 and k in picture.key_breaks
        if (k in names or not place) and (not line or len(line) < place + breaks):
            name = names.get(k, str(picture.key_indices[k]))
            line = f"{line:<{place + breaks}}{name}"
    return line


def _text_legend(picture: Picture) -> str:
    signs = {sign for row in picture.cells for sign in row}
    words = [f"{sign} {word}" for sign, word in {**_CELL_WORDS, NONE: "rightly none"}.items() if sign in signs]
    return ", ".join(
        words + [f"{_ROW_SIGNS[kind]} {word}" for kind, word in _ROW_WORDS.items() if kind in picture.rows]
    )
