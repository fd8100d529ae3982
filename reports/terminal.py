"""The common part of terminal renderers: literal lines, a finding, and rows as a table if it fits."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from assay.harness.text import counted, one_line, visible
from assay.harness.verdict import Finding
from assay.reports import document as doc
from assay.reports.operator_picture import text as picture_text

# Colours of verdicts, of the status of checks, of the severity of findings, of what changed, and of emphasis.
_STYLES = {
    "pass": "green", "ok": "green", "regression": "red", "failed": "red", "serious": "red", "inconclusive": "yellow",
    "missing": "yellow", "warning": "yellow", "error": "magenta", "not checked": "dim", "info": "dim",
    "beyond": "red", "strong": "bold", "deciding": "bold", "quiet": "dim",
}  # fmt: skip
_PLAIN = str.maketrans({"≥": ">=", "≤": "<=", "→": "->", "–": "-", "−": "-", "✓": "+", "✕": "x", "…": "...", "±": "+-"})
PLAIN_WIDTH = 100
"""Columns that a picture may take in plain text, such as a comment or the message of an assertion."""
# Most characters of a cell below its column: a kernel's name may have hundreds.
_CELL_WIDTH = 60
# Columns of the labels of a first screen, and most queries of its picture.
_LABELS, _PICTURE_ROWS = 13, 5
# Commands whose documents have no separate screen, and most rows of a label in theirs.
_BRIEF, _OF_A_LABEL = ("compare", "ingest", "invariance", "bench"), 3
_MARKS = {"pass": "✓ ", "regression": "✕ ", "inconclusive": "? ", "error": "! "}


def say(console: Console, text: str | Text) -> None:
    """Print text unchanged, without markup or highlighting. On a terminal, a line that is too long continues below its beginning,
    because the terminal itself would break it within a word or a number. Elsewhere a line stays one line, and so does a command,
    which begins with "$ ".
    """
    _copy(console, _folded(console, text) if console.is_terminal else text)


def _copy(console: Console, text: str | Text) -> None:
    """Print code or commands to copy: never wrapped. Anything that could hide or move a terminal's cursor is made visible."""
    text = Text(text) if isinstance(text, str) else text
    if (shown := _encodable(console, visible(text.plain))) != text.plain:
        text.plain = shown
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _encodable(console: Console, text: str) -> str:
    """Return text in characters that the stream can encode."""
    if console.encoding.startswith("utf"):
        return text
    return text.translate(_PLAIN).encode(console.encoding, "replace").decode(console.encoding)


def _folded(console: Console, text: str | Text) -> Text:
    """Fold lines to fit the console, if their words do; continuations are indented by two more columns."""
    lines = (text if isinstance(text, Text) else Text(text)).split("\n", allow_blank=True)
    return Text("\n").join(part for line in lines for part in _parts(console, line))


def _parts(console: Console, line: Text, below: int = 0) -> list[Text]:
    begins = line.plain.lstrip(" ")
    indent = below or len(line.plain) - len(begins) + 2
    if line.cell_len <= console.width or begins.startswith("$ ") or console.width < 2 * indent:
        return [line]
    breaks, used = [], 0  # at spaces only: an address, a path, "12 %" and "p = 0.01" stay whole
    for word in re.finditer(r"\S+(?: %\S*| = \S+)*\s*", line.plain):
        if used and used + cell_len(word[0].rstrip()) > console.width:
            breaks.append(word.start())
            used = indent
        used += cell_len(word[0]) + (word.start() if not used else 0)
    first, *rest = line.divide(breaks)
    parts = [first, *(Text(" " * indent) + part for part in rest)]
    for part in parts:
        part.rstrip()
    return parts


def _finding_text(finding: Finding, width: int) -> Text:
    """Render a finding with its operator, picture and evidence; a picture takes at most `width` columns."""
    lines = [Text(one_line(f"{finding.severity}: {finding.sentence}", 600))]
    lines += [Text(f"  observed: {one_line(finding.observed, 600)}")] if finding.observed else []
    if finding.picture:
        lines += [Text("  ") + line for line in picture_text(finding.picture, width - 2).split("\n")]
    lines += [Text(f"  - {one_line(line, 400)}") for line in finding.evidence]
    lines += [Text(f"  explained by: {command}") for command in explaining(finding)]
    return Text("\n").join(lines)


def plain_text(blocks: Sequence[doc.Block]) -> str:
    """Return blocks as the unwrapped text of an assertion or of a JUnit case."""
    out = io.StringIO()
    _blocks(blocks, Console(file=out, width=PLAIN_WIDTH, force_terminal=False))
    return out.getvalue().strip("\n")


def explaining(finding: Finding) -> list[str]:
    """Return the command that explains a finding, or nothing without such a page."""
    return [f"assay explain {one_line(finding.id, 100)}"] if finding.explained else []


def render(document: doc.Document, console: Console, everything: bool = False) -> None:
    """Print the answer, and below it the first screen, or the whole body if there is no screen or everything is requested."""
    if document.answer:
        mark = _MARKS.get(document.verdict or "", "") if console.is_terminal else ""
        said = Text(f"{mark}{document.answer}")
        said.stylize(f"bold {_STYLES.get(document.verdict or '', '')}", 0, len(mark + document.called))
        say(console, said)
    if (screen := document.screen or _brief(document)) and not everything:
        say(console, "")
        rows(console, screen)
        return
    _blocks(document.body, console)
    if document.remedy:
        say(console, f"What to do: {one_line(document.remedy, 700)}")


def rows(console: Console, given: Sequence[doc.Row]) -> None:
    """Print rows of a first screen: labels, texts and limits each in a column; lines fold if a terminal is too narrow."""
    ends = {
        kind: max([0, *(cell_len(doc.plain(row.text)) for row in given if row.limit and _is_command(row) == kind)])
        for kind in (True, False)
    }
    for row in given:
        line = Text.assemble((f"{row.label:<{_LABELS}}", "bold"), _text(row.text, ""))
        if row.limit:
            beside = line + Text(" " * (ends[_is_command(row)] + _LABELS - line.cell_len) + f"   {row.limit}", "dim")
            fits = not console.is_terminal or beside.cell_len <= console.width
            line = beside if fits else line if _is_command(row) else line + Text(f"   {row.limit}", "dim")
        parts = _parts(console, line, _LABELS) if console.is_terminal and not _is_command(row) else [line]
        _copy(console, Text("\n").join(parts))
        if row.picture:
            room = (console.width if console.is_terminal else PLAIN_WIDTH) - _LABELS
            for drawn in picture_text(row.picture, room, _PICTURE_ROWS).split("\n"):
                _copy(console, Text(" " * _LABELS) + drawn)


def _brief(document: doc.Document) -> list[doc.Row]:
    """Make the first screen of a document without its own: facts, findings, reasons, what is missing, and the next commands.

    A document that decides nothing, or whose table is the answer, has no first screen.
    """
    made: list[doc.Row] = []
    for block in _not_details(document.body) if document.command in _BRIEF and document.verdict else ():
        match block:
            case doc.Facts():
                made += [
                    doc.Row(one_line(doc.plain(name), _LABELS - 2), doc.plain(value)) for name, value, *_ in block.rows
                ]
            case doc.Findings():
                made += [doc.Row("Finding", one_line(finding.sentence, 200)) for finding in block.findings]
            case doc.Items():
                made += [doc.Row("Why", one_line(doc.plain(line), 200)) for line in block.lines]
            case doc.Checks():
                unmet = (check for check in block.checks if check.status in ("failed", "missing"))
                made += [doc.Row("Missing", one_line(f"{check.title}: {check.found}", 200)) for check in unmet]
            case doc.Code():
                made += [
                    doc.Row("Next", doc.Cell(line, code=True))
                    for line in block.text.splitlines()
                    if line.startswith("assay")
                ]
    shown: list[doc.Row] = []
    for label in sorted(
        dict.fromkeys(row.label for row in made), key=lambda label: label not in ("Finding", "Why", "Missing")
    ):
        some = [row for row in made if row.label == label][:_OF_A_LABEL]
        shown += [replace(row, label=label * (not n)) for n, row in enumerate(some)]
    return [*shown, doc.MORE] if shown else []


def _not_details(blocks: Sequence[doc.Block]) -> Iterator[doc.Block]:
    for block in blocks:
        if not isinstance(block, doc.Section):
            yield block
        elif not (block.detail or block.folded or block.id.startswith("file-")):
            yield from _not_details(block.blocks)


def _is_command(row: doc.Row) -> bool:
    return isinstance(row.text, doc.Cell) and row.text.code


def _blocks(blocks: Sequence[doc.Block], console: Console) -> None:
    for block in blocks:
        _block(block, console)


def _block(block: doc.Block, console: Console) -> None:
    match block:
        case doc.Line():
            say(console, _text(block.text, _STYLES.get(block.style, "")))
        case doc.Items():
            for line in block.lines[: block.most]:
                say(console, Text("  ") + _text(line, ""))
            _left(console, len(block.lines), block.most)
        case doc.Facts():
            _facts(block, console)
        case doc.Table():
            _table(block, console)
        case doc.Entries():
            for entry in block.entries[: block.most]:
                say(
                    console,
                    Text("  ").append_text(_text((entry.status, f": {entry.name}: "), "")) + _text(entry.about, ""),
                )
            _left(console, len(block.entries), block.most)
        case doc.Findings():
            _findings(block, console)
        case doc.Checks():
            _unmet(block, console)
        case doc.Code():
            _code(block, console)
        case doc.Section() if block.blocks and not block.detail:
            if block.title:
                say(console, "")
                say(console, _text(block.title, "bold"))
            if block.lead:
                say(console, block.lead)
            _blocks(block.blocks, console)


def _facts(block: doc.Facts, console: Console) -> None:
    for name, value, *notes in block.rows:
        say(console, f"{doc.plain(name)}: {doc.plain(value)}")
        for note in notes:
            say(console, f"  {doc.plain(note)}")


def _findings(block: doc.Findings, console: Console) -> None:
    for finding in block.findings:
        say(console, _finding_text(finding, console.width))
        if finding.reproduce:
            say(console, f"  $ {finding.reproduce}")


def _unmet(block: doc.Checks, console: Console) -> None:
    for check in block.checks:
        if check.status == "ok":
            continue
        sign = (f"{doc.CHECK_SIGNS[check.status]} {check.status}", _STYLES[check.status])
        say(console, Text.assemble(sign, one_line(f": {check.title}: {check.found}", 600)))
        if check.settles:
            say(console, f"  to resolve: {one_line(check.settles, 400)}")


def _code(block: doc.Code, console: Console) -> None:
    if block.label:
        say(console, f"{block.label}:")
    indent = "  " if block.label and block.language == "text" else ""
    _copy(console, "\n".join(f"{indent}{line}".rstrip() for line in doc.code_lines(block)))


def _table(table: doc.Table, console: Console) -> None:
    """Print rows below their columns on a terminal that is wide enough, otherwise each row as one line that is never wrapped."""
    title = one_line(f"{table.title} ({table.note})" if table.note and table.title else table.title)
    if title:
        say(console, title)
    made, options = _in_columns(console, table), console.options.update(width=1_000)
    if console.is_terminal and Measurement.get(console, options, made).minimum <= console.width:
        console.print(made)
    else:
        for name, *cells in table.rows[: table.most]:
            named = zip(table.columns[1:], cells, strict=True)
            say(console, f"  {doc.plain(name)}: {'; '.join(f'{column} {doc.plain(cell)}' for column, cell in named)}")
    _left(console, len(table.rows), table.most)


def _left(console: Console, of: int, most: int | None) -> None:
    if most is not None and of > most:
        say(console, f"  … and {counted(of - most, 'more row')}: see --json or --html")


def _in_columns(console: Console, table: doc.Table) -> Table:
    """Show the first rows of a table. Only row names may wrap, and all cells of a table of sentences."""
    wraps = "side-by-side" in table.style
    most = 700 if wraps else _CELL_WIDTH
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    rows = [
        [Text(_encodable(console, one_line(doc.plain(cell), most)), style=_style(cell)) for cell in row]
        for row in table.rows[: table.most]
    ]
    for number, column in enumerate(table.columns):
        justify: JustifyMethod = "right" if number in table.numbers else "left"
        if number == 0:
            made.add_column(Text(column), justify=justify, min_width=16, max_width=30 if wraps else None)
        elif wraps:
            made.add_column(Text(column), justify=justify, ratio=1)
        else:
            width = max([len(column), *(row[number].cell_len for row in rows)])
            made.add_column(Text(column), justify=justify, min_width=width, no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def _style(words: doc.Words) -> str:
    return _STYLES.get(words.status, "") if isinstance(words, doc.Cell) else ""


def _text(words: doc.Words, style: str) -> Text:
    parts = words if isinstance(words, tuple) else (words,)
    shown = (
        part if isinstance(part, str) else f"{part.text} ({part.note})" if part.note else part.text for part in parts
    )
    return Text.assemble(*zip(shown, map(_style, parts), strict=True), style=style)
