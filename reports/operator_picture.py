"""The picture of an operator: three grids of queries x keys, which a page draws as SVG and a terminal prints as characters.

Both show the same grids of signs, labels and legend; the page also shades weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import wrap

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
from assay.reports import svg

# The text of a cell, its style in a terminal, and its colour on a page.
_CELLS = {
    SAME: ("as expected", "dim", svg.MUTED),
    UNSEEN: ("missing", "red", svg.FORBIDDEN),
    WRONGLY_SEEN: ("wrongly seen", "yellow", svg.PALETTE["chart-wrong"]),
    WRONG_WEIGHT: ("wrong weight", "blue", svg.CANDIDATE),
    ELSEWHERE: ("from elsewhere", "magenta", svg.PALETTE["chart-unparsed"]),
    NONE: ("correctly masked", "dim", ""),
}
# The sign of every cell in a row without weights, or with more than weights, and its text.
_ROWS: dict[RowKind, tuple[str, str]] = {
    "nan": ("N", "NaN"), "infinite": ("I", "infinite"), "zero": ("0", "zero"), "constant": ("C", "constant"),
    "right": ("=", "right, not read"), "wrong": ("?", "wrong, not read"), "shifted": ("+", "something is added"),
    "nonlinear": ("&", "its weights are not the whole output"),
}  # fmt: skip

# CSS pixels: the width of a page, the largest cell, the smallest whose sign can be distinguished, and the margin of a panel.
_ROOM, _LARGEST, _SMALLEST, _TOP, _BELOW, _RIGHT = 930, 20, 10, 20, 20, 18
_DIGIT = 7  # CSS pixels of a character of a label
_KEYS_OF_A_QUERY = 24  # most that a line shows
_SHADES = 8  # of a weight, from the least to the largest of its query


def caption(picture: Picture) -> str:
    """Describe the picture: the call, the q head, and the queries and keys if they are not all."""
    parts = [picture.call, f"q head {picture.head} of {picture.heads}"]
    if picture.wrong_heads and picture.heads > 1:
        parts.append(f"wrong in {some('q head', picture.wrong_heads, range(picture.heads))}")
    if picture.foreign_kv_heads:
        heads = picture.foreign_kv_heads
        parts.append(f"reads from kv head{'s' * (len(heads) > 1)} {ranges(heads)}, not its own")
    parts += [picture.shown] if picture.shown else []
    parts += ["labels are sequence:position"] if _several(picture) else []
    return one_line("; ".join(parts), 600)


def _grids(picture: Picture) -> dict[str, list[str]]:
    """Return the three panels by title, as rows of signs; a query without weights has its own sign for every key."""
    difference = [
        cells if kind in WITH_WEIGHTS else _ROWS[kind][0] * len(picture.key_indices)
        for cells, kind in zip(picture.cells, picture.rows, strict=True)
    ]
    seen = str.maketrans({UNSEEN: NONE, **dict.fromkeys((WRONGLY_SEEN, WRONG_WEIGHT, ELSEWHERE), SAME)})
    return {
        "expected": ["".join(SAME if weight else NONE for weight in row) for row in picture.expected],
        "read": [row.translate(seen) for row in difference],
        "difference": difference,
    }


def _legend(picture: Picture) -> list[tuple[str, str]]:
    """Return the sign and the text of each kind of cell and row in the picture."""
    signs = {sign for row in picture.cells for sign in row}
    cells = [(sign, words) for sign, (words, *_) in _CELLS.items() if sign in signs]
    return cells + [(sign, words) for kind, (sign, words) in _ROWS.items() if kind in picture.rows]


def _several(picture: Picture) -> bool:
    """Return True if a label needs the number of a sequence."""
    return len({*picture.query_sequences, *picture.key_sequences}) > 1


def _query_labels(picture: Picture) -> list[str]:
    labels = zip(picture.query_sequences, picture.query_positions, strict=True)
    return [f"{sequence}:{position}" if _several(picture) else str(position) for sequence, position in labels]


def _key_labels(picture: Picture) -> dict[int, str]:
    """Label some keys: the first after each break, and round numbers."""
    starts = {0, *picture.key_breaks}
    labels = enumerate(zip(picture.key_sequences, picture.key_indices, strict=True))
    step = 5 if len(picture.key_indices) < 20 else 10
    return {
        n: f"{sequence}:{index}" if _several(picture) else str(index)
        for n, (sequence, index) in labels
        if n in starts or index % step == 0
    }


def panels(picture: Picture) -> list[str]:
    """Draw the expected weights, the observed weights, and their differences, as three ``<svg>`` elements.

    The first two are shaded by weight, relative to the largest of the query. Differences have a sign for each kind, so that colour
    is not needed to distinguish them. A page puts panels side by side if they fit; signs never get too small, shades may.
    """
    keys = max(1, len(picture.key_indices))
    third, half, whole = (_ROOM // parts // keys for parts in (3, 2, 1))
    sizes = [third] * 3 if third >= _SMALLEST else [half, half, whole]
    drawn = zip(_grids(picture).items(), sizes, strict=True)
    return [_panel(picture, title, rows, max(4, min(_LARGEST, size))) for (title, rows), size in drawn]


def _panel(picture: Picture, title: str, rows: Sequence[str], cell: int) -> str:
    queries = _query_labels(picture)
    left = 8 + _DIGIT * max(map(len, ("query", *queries)))
    right, bottom = left + cell * len(picture.key_indices), _TOP + cell * len(rows)
    parts = [
        svg.text(title, left, _TOP - 9, size=svg.NAME_SIZE, colour=svg.INK),
        svg.element(
            "rect", x=left, y=_TOP, width=right - left, height=bottom - _TOP, fill="none", stroke=svg.RULE,
        ),
        svg.text("query", left - 6, _TOP - 9, "end"),
        svg.text("key", left - 6, bottom + 9, "end"),
    ]  # fmt: skip
    step = math.ceil((svg.TICK_SIZE + 1) / cell)
    parts += [svg.text(queries[n], left - 6, _TOP + (n + 0.5) * cell, "end") for n in range(0, len(rows), step)]
    end = 0.0
    for n, name in _key_labels(picture).items():
        x, half = left + (n + 0.5) * cell, _DIGIT / 2 * len(name)
        if x - half > end:
            # The first label begins at the frame, so that it does not run into the name of the axis.
            parts.append(svg.text(name, max(x, left + half), bottom + 9, "middle"))
            end = max(x, left + half) + half + 4
    parts += _rows_without_weights(picture, title, left, right, cell)
    if title == "difference":
        parts += _signs(picture, rows, left, cell)
    else:
        parts += _shades(picture, title, left, cell)
    for n in picture.key_breaks:
        parts.append(svg.line(left + n * cell, _TOP, left + n * cell, bottom, svg.MUTED, 0.8))
    for n in picture.query_breaks:
        parts.append(svg.line(left, _TOP + n * cell, right, _TOP + n * cell, svg.MUTED, 0.8))
    width = max(right, left + 112) + _RIGHT  # room for a title, and for the text of rows without weights
    return svg.image(width, bottom + _BELOW, f"Attention weights, {title}: {caption(picture)}", parts)


def _shades(picture: Picture, title: str, left: float, cell: int) -> list[str]:
    """Draw a square for each weight, stronger for more; one path for each shade keeps pages small."""
    colour, weights = (svg.REFERENCE, picture.expected) if title == "expected" else (svg.CANDIDATE, picture.read)
    paths: dict[int, str] = {}
    for n, row in enumerate(weights):
        largest = max(map(abs, (*picture.expected[n], *picture.read[n])), default=0.0)
        for k, weight in enumerate(row):
            if weight:
                shade = max(1, math.ceil(_SHADES * math.sqrt(abs(weight) / largest)))
                square = _square(left + (k + 0.5) * cell, _TOP + (n + 0.5) * cell, (cell - 1) / 2)
                paths[shade] = paths.get(shade, "") + square
    return [
        svg.element("path", d=steps, fill=colour, fill_opacity=0.15 + 0.85 * shade / _SHADES)
        for shade, steps in sorted(paths.items())
    ]


def _signs(picture: Picture, rows: Sequence[str], left: float, cell: int) -> list[str]:
    """Draw a sign for each cell: one path for each kind in a row, with a title."""
    parts = []
    for n, (row, kind) in enumerate(zip(rows, picture.rows, strict=True)):
        y = _TOP + (n + 0.5) * cell
        if kind not in WITH_WEIGHTS:
            continue
        for sign in sorted(set(row) - {NONE}):
            keys = [k for k, shown in enumerate(row) if shown == sign]
            words = "" if sign == SAME else _says(picture, n, sign, keys)
            parts.append(_sign(sign, [(left + (k + 0.5) * cell, y) for k in keys], cell, words))
        if kind in _ROWS:
            parts.append(
                svg.text(_ROWS[kind][0], left + cell * len(row) + 3, y, size=min(12, cell), colour=svg.FORBIDDEN)
            )
    return parts


def _says(picture: Picture, row: int, sign: str, keys: Sequence[int]) -> str:
    should, does = (sum(weights[row][k] for k in keys) for weights in (picture.expected, picture.read))
    which = ranges([picture.key_indices[k] for k in keys])
    return (
        f"query {_query_labels(picture)[row]}: key{'s' * (len(keys) > 1)} {which} {_CELLS[sign][0]}; "
        f"expected {percent(should)} of the weight, read {percent(does)}"
    )


def _rows_without_weights(picture: Picture, title: str, left: float, right: float, cell: int) -> Iterator[str]:
    """Draw consecutive rows of one kind as a block with a word in it."""
    if title == "expected":
        return
    first = 0
    for kind, group in groupby(picture.rows):
        top, first = _TOP + first * cell, first + len(list(group))
        bottom = _TOP + first * cell
        if kind in WITH_WEIGHTS:
            continue
        yield svg.rect(left, max(right, left + 112), top + 1, bottom - 1, svg.RULE, opacity=0.55)
        if kind != "right":
            yield svg.rect(left, left + 3, top + 1, bottom - 1, svg.FORBIDDEN)
        if bottom - top >= _SMALLEST:
            yield svg.text(_ROWS[kind][1], left + 8, (top + bottom) / 2, colour=svg.INK)


def legend(picture: Picture) -> list[tuple[str, str]]:
    """Return the legend of the panels: signs as ``<svg>`` elements, and their text; rows without weights have theirs inside."""
    blocks = {sign for kind, (sign, _) in _ROWS.items() if kind not in WITH_WEIGHTS}
    return [(_alone(sign), words) for sign, words in _legend(picture) if sign not in {NONE, *blocks}]


def _alone(sign: str) -> str:
    drawn = _sign(sign, [(7, 7)], 14, "") if sign in _CELLS else svg.text(sign, 7, 7, "middle", 12, svg.FORBIDDEN)
    return svg.image(14, 14, "", [drawn])


def _sign(sign: str, spots: Sequence[tuple[float, float]], cell: float, title: str) -> str:
    """Draw the sign of one kind of cell at several centres, as one path."""
    r = max(1.0, cell / 7) if sign == SAME else (cell - 1) / 2 - (0.75 if sign in (UNSEEN, ELSEWHERE) else 0)
    outline = {WRONG_WEIGHT: _triangle, ELSEWHERE: _cross}.get(sign, _square)
    steps, colour = "".join(outline(x, y, r) for x, y in spots), _CELLS[sign][2]
    if sign in (UNSEEN, ELSEWHERE):
        width = 1.5 if sign == UNSEEN else 2
        # Without pointer-events, the pointer would have to rest on a line for the title to be shown.
        return svg.element("path", title, d=steps, fill="none", stroke=colour, stroke_width=width, pointer_events="all")
    return svg.element("path", title, d=steps, fill=colour)


def _square(x: float, y: float, r: float) -> str:
    return f"M{x - r:g},{y - r:g}h{2 * r:g}v{2 * r:g}h-{2 * r:g}z"


def _triangle(x: float, y: float, r: float) -> str:
    return f"M{x - r:g},{y + r:g}h{2 * r:g}l-{r:g},-{2 * r:g}z"


def _cross(x: float, y: float, r: float) -> str:
    return f"M{x - r:g},{y - r:g}l{2 * r:g},{2 * r:g}M{x - r:g},{y + r:g}l{2 * r:g},-{2 * r:g}"


def text(picture: Picture, width: int = 100, most: int = 0) -> Text:
    """Print the picture as lines of characters, one for each cell, with a legend and the caption.

    With `most`, a larger picture shows that many queries, around the first that differs, and no caption.

    All three panels are shown if they fit into `width` columns, or else only the differences, for the keys that fit: the same
    characters then say what was expected and what was observed.
    """
    picture = picture.around(most) if most else picture
    grids, labels = _grids(picture), _query_labels(picture)
    margin = max(map(len, ("query", *labels))) + 1
    marks = [f" {_ROWS[kind][0]}" if kind in _ROWS and kind in WITH_WEIGHTS else "" for kind in picture.rows]
    columns, cut = range(len(picture.key_indices)), ""
    full, beside = len(columns) + len(picture.key_breaks), max(map(len, marks))
    if margin + 2 * (max(full, len("expected")) + 2) + max(full + beside, len("difference")) > width:
        grids = {"difference": grids["difference"]}
        columns = _columns_that_fit(picture, width - margin - beside)
        if len(columns) < len(picture.key_indices):
            cut = f"; of these, keys {ranges([picture.key_indices[n] for n in columns])} fit here"
    ruler = _ruler(picture, columns)
    size = max(len(ruler), min(full, len(columns) + len(picture.key_breaks)), len("expected"))
    drawing = Text(" " * margin + "  ".join(f"{title:<{size}}" for title in grids).rstrip() + "\n")
    drawing.append(f"{'query':<{margin}}" + "  ".join(f"{ruler:<{size}}" for _ in grids).rstrip() + "\n", "dim")
    for n, label in enumerate(labels):
        drawing.append(f"{label:<{margin}}")
        for title, rows in grids.items():
            shown = "".join("|" * (k in picture.key_breaks and k > columns[0]) + rows[n][k] for k in columns)
            for sign, group in groupby(shown):
                drawing.append("".join(group), "dim" if sign == "|" else _CELLS.get(sign, ("", "red"))[1])
            if title != "difference":
                drawing.append(" " * (size - len(shown) + 2))
        drawing.append(marks[n], "red").append("\n")
    words = ", ".join(f"{sign} {words}" for sign, words in _legend(picture))
    drawing.append(
        "\n".join(wrap(words, width) if most else [*wrap(words, width), *wrap(caption(picture) + cut, width)])
    )
    return drawing


def one_query(picture: Picture) -> str:
    """Describe the first query that differs, in a line: the keys that it should see, and those that it sees."""
    part = picture.around(2)
    grids, columns = _grids(part), _columns_that_fit(part, _KEYS_OF_A_QUERY)
    n = next((n for n, row in enumerate(part.cells) if any(cell in WRONG for cell in row)), 0)
    expected, read = ("".join(grids[title][n][k] for k in columns) for title in ("expected", "read"))
    cut = f" (keys {ranges([part.key_indices[k] for k in columns])})" if len(columns) < len(part.key_indices) else ""
    return f"query {_query_labels(part)[n]} should see {expected}, sees {read}{cut}"


def _columns_that_fit(picture: Picture, room: int) -> range:
    """Return the keys that fit into this many columns, including the first that differs."""
    keys = len(picture.key_indices)
    count = max(1, min(keys, room - len(picture.key_breaks)))
    first = next((k for k in range(keys) if any(row[k : k + 1] in WRONG for row in picture.cells)), 0)
    start = max(0, min(first - 2, keys - count))
    return range(start, start + count)


def _ruler(picture: Picture, columns: Sequence[int]) -> str:
    """Place the labels of some keys, each above its column."""
    names, line, breaks = _key_labels(picture), "", 0
    for place, k in enumerate(columns):
        breaks += place > 0 and k in picture.key_breaks
        if (k in names or not place) and (not line or len(line) < place + breaks):
            line = f"{line:<{place + breaks}}{names.get(k, picture.key_indices[k])}"
    return line
