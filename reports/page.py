"""What all pages share: one file that opens from disk and makes no network request.

Model text is untrusted. Three things keep it inert: `visible` is applied to every expression, Jinja escapes it, and a
Content-Security-Policy admits only the page's own style sheet and script, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from assay.harness.text import clip, counted, one_line, visible
from assay.harness.verdict import Verdict, exit_code_of
from assay.reports import operator_picture, summary
from assay.reports.document import CHECK_SIGNS, Document, HeatMaps, Records, Section, blocks_of, plain
from assay.reports.heat_maps import grid_data, grid_says, worst_grid
from assay.reports.records import records_data
from assay.reports.svg import PALETTE
from assay.reports.terminal import explaining

TEMPLATES = Path(__file__).parent / "templates"
TEXT_SHOWN = 2_000
"""Most characters embedded of a prompt or an answer."""


def to_html(document: Document) -> str:
    """A document as one self-contained HTML page."""
    meaning = document.meaning
    if meaning is None and document.verdict is not None:
        code = f"Exit code {int(exit_code_of(document.verdict))}."
        meaning = " ".join(filter(None, [summary.MEANINGS[document.verdict], code]))
    word = document.word or (document.verdict or "").capitalize()
    blocks = list(blocks_of(document.body))
    grids = [grid for block in blocks if isinstance(block, HeatMaps) for grid in block.grids]
    many = any(isinstance(block, Records) for block in blocks)
    style = _style() + (_read("records.css") if many else "")
    script = _read("page.js") + (_read("layer_diff.js") if grids else "") + (_read("records.js") if many else "")
    return _ENVIRONMENT.get_template("document.html.jinja").render(
        document=document,
        verdict=document.verdict,
        title=f"{word}: {document.title}" if word else document.title,
        word=word,
        meaning=meaning or "",
        sections=[block for block in blocks if isinstance(block, Section) and block.id],
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
    return (TEMPLATES / name).read_text(encoding="utf-8")


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


def _code(text: str) -> Markup:
    """Text as HTML, with what stands between backticks as code."""
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
    "counted": counted,
    "unbroken": lambda text: text.replace(" %", "\N{NO-BREAK SPACE}%"),  # a number and its sign stay on one line
    "code": _code,
    "when": summary.when,
    "picture": lambda picture: Markup(operator_picture.svg(picture)),
    "narrow_picture": lambda picture: Markup(operator_picture.svg(picture, operator_picture.NARROW)),
    "caption": operator_picture.caption,
    "explaining": explaining,
    "kind": lambda block: type(block).__name__,
    "svg": Markup,
    "plain": plain,
    "grid_data": grid_data,
    "grid_says": grid_says,
    "worst_grid": worst_grid,
    "records_data": records_data,
    "id": id,
}
_ENVIRONMENT.globals["check_signs"] = CHECK_SIGNS
