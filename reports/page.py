"""The common part of all pages: one file that opens from disk and makes no network request.

Model text is untrusted. Three things keep it inert: `visible` is applied to every expression, Jinja escapes it, and a
Content-Security-Policy admits only the page's own style sheet and script, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.utils import htmlsafe_json_dumps
from markupsafe import Markup, escape

from assay.harness.judge.report import ErrorGrid, excess, out_of_bounds
from assay.harness.text import clip, counted, one_line, visible
from assay.harness.verdict import Verdict, exit_code_of
from assay.reports import operator_picture, summary
from assay.reports.document import CHECK_SIGNS, Document, Drawing, Section, blocks_of, plain
from assay.reports.svg import PALETTE
from assay.reports.terminal import explaining
from assay.reports.wording.layers import grid_title

_TEMPLATES = Path(__file__).parent / "templates"
_NO_BREAK = "\N{NO-BREAK SPACE}"
TEXT_SHOWN = 2_000
"""Most characters of a prompt or an answer to embed."""


def to_html(document: Document) -> str:
    """Render a document as one self-contained HTML page."""
    meaning = document.meaning
    if meaning is None and document.verdict is not None:
        code = f"Exit code {int(exit_code_of(document.verdict))}."
        meaning = " ".join(filter(None, [summary.MEANINGS[document.verdict], code]))
    word = document.word or (document.verdict or "").capitalize()
    blocks = list(blocks_of(document.body))
    drawings = [block.drawn for block in blocks if isinstance(block, Drawing)]
    grids = [grid for drawn in drawings if not isinstance(drawn, str) for grid in drawn]
    style = _style()
    script = _read("page.js") + (_read("layer_diff.js") if grids else "")
    return _ENVIRONMENT.get_template("document.html.jinja").render(
        document=document,
        verdict=document.verdict,
        title=f"{word}: {document.title}" if word else document.title,
        word=word,
        meaning=meaning or "",
        sections=[block for block in blocks if isinstance(block, Section) and block.id and block.blocks],
        grids=grids,
        numbers={id(grid): number for number, grid in enumerate(grids)},
        style=Markup(style),
        script=Markup(script),
        policy=_policy(style, script),
        favicon=Markup(_favicon(document.verdict)),
    )


def _finalize(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _style() -> str:
    rules = [
        f'.chart [{attribute}="{colour}"]{{{attribute}:var(--{name})}}'
        for name, colour in PALETTE.items()
        for attribute in ("fill", "stroke")
    ]
    return _read("page.css") + _read("layer_diff.css") + "\n".join(rules)


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _unbroken(text: str) -> str:
    """Keep a number on one line with its sign or unit, and with the number that it became."""
    joined = re.sub(r"(?<=\d) (?=%|×|(?:s|ms|min|[kMG]i?B|nats)\b)", _NO_BREAK, text)
    return re.sub(r"(?<=\d) (?:->|→) (?=\d)", f"{_NO_BREAK}→{_NO_BREAK}", joined)


def _breaking(text: str) -> Markup:
    """Return text as HTML that may break a long name after each of its parts."""
    parts = re.split(r"(\S{24,})", _unbroken(visible(text)))
    names = (Markup("<wbr>").join(map(escape, re.split(r"(?<=[._/:=(,])(?=[^\s\d])", name))) for name in parts[1::2])
    return Markup("").join(part for pair in zip_longest(map(escape, parts[::2]), names, fillvalue="") for part in pair)


def _code(text: str) -> Markup:
    """Return text as HTML, with the parts between backticks as code."""
    parts = [escape(visible(part)) for part in text.split("`")]
    if len(parts) % 2 == 0:  # an odd number of backticks quotes nothing
        return escape(visible(text))
    return Markup("").join(Markup("<code>{}</code>").format(part) if n % 2 else part for n, part in enumerate(parts))


def _favicon(verdict: Verdict | None) -> str:
    colours = {
        None: "#5a616c",
        "pass": "#17693f",
        "regression": "#a8201a",
        "inconclusive": "#855300",
        "error": "#5a3e8e",
    }
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8"><circle cx="4" cy="4" r="4" fill="{colours[verdict]}"/></svg>'
    return "data:image/svg+xml," + quote(svg)


def _worst_grid(grids: Sequence[ErrorGrid]) -> ErrorGrid | None:
    """Return the heat map with the worst cell, or None without heat maps."""
    return max(grids, key=lambda grid: _worst(grid)[0], default=None)


def _grid_data(grids: Sequence[ErrorGrid]) -> Markup:
    """Return the data that layer_diff.js draws, as JSON that is safe within a script element."""
    return htmlsafe_json_dumps([_payload(grid) for grid in grids], separators=(",", ":"))


def _grid_says(grid: ErrorGrid) -> str:
    """Say how many of its cells are out of bounds."""
    if all(bound is None for bound in grid.bounds):
        return "no bound"
    count = sum(map(sum, _beyond(grid)))
    return f"{count:,} out of bounds" if count else "within bounds"


def _payload(grid: ErrorGrid) -> dict[str, object]:
    return {
        "title": one_line(f"{grid_title(grid)}: {grid.where}"),
        "column": grid.columns,
        "rows": [one_line(label, 40) for label in grid.row_labels],
        "columns": [one_line(label, 40) for label in grid.column_labels],
        "bounds": grid.bounds,
        "values": grid.values,
        "beyond": _beyond(grid),
        "worst": _worst(grid)[1],
    }


def _beyond(grid: ErrorGrid) -> list[list[int]]:
    """Mark the cells that are out of bounds with 1, others with 0, rows x columns."""
    rows = zip(grid.values, grid.bounds, strict=True)
    return [[int(out_of_bounds(error, bound)) for error in row] for row, bound in rows]


def _worst(grid: ErrorGrid) -> tuple[float, tuple[int, int]]:
    """Return the largest excess, and the row and column of the first cell that has it."""
    rows = enumerate(zip(grid.values, grid.bounds, strict=True))
    cells = ((excess(error, bound), (r, c)) for r, (row, bound) in rows for c, error in enumerate(row))
    return max(cells, key=lambda cell: cell[0], default=(-1.0, (0, 0)))


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(_TEMPLATES),
    autoescape=True,
    finalize=_finalize,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {
    "text": lambda value: clip(value, TEXT_SHOWN),
    "line": one_line,
    "counted": counted,
    "unbroken": _unbroken,
    "breaking": _breaking,
    "code": _code,
    "when": summary.when,
    "panels": operator_picture.panels,
    "caption": operator_picture.caption,
    "legend": operator_picture.legend,
    "explaining": explaining,
    "kind": lambda block: type(block).__name__,
    "svg": Markup,
    "plain": plain,
    "grid_data": _grid_data,
    "grid_says": _grid_says,
    "grid_title": grid_title,
    "worst_grid": _worst_grid,
    "id": id,
}
_ENVIRONMENT.globals["check_signs"] = CHECK_SIGNS
