"""Any document as GitHub Markdown, with other people's text shown literally."""

from __future__ import annotations

import re
from collections.abc import Sequence

from assay.harness.text import one_line, visible
from assay.harness.verdict import Finding, Verdict
from assay.reports import document as doc
from assay.reports.operator_picture import text as picture_text
from assay.reports.terminal import PLAIN_WIDTH, explaining
from assay.reports.wording.requirements import SaidCheck

_SIGNS: dict[Verdict, str] = {"pass": "✅", "regression": "❌", "inconclusive": "❓", "error": "⚠️"}
# Most characters of a command, findings and checks of a block, and lines of a list: GitHub refuses a comment of 65,536 characters.
_COMMAND, _MOST, _ITEMS = 2_000, 5, 20
# Characters with a meaning in CommonMark, GitHub's tables or strike-through. An underscore inside a word has none, and
# names of backends are full of them.
_SPECIAL = re.compile(r"[\\`*{}\[\]<>|~$&]|(?<![^\W_])_|_(?![^\W_])|^(?=[#+=-]+(?:\s|$))|^\d+(?=[.)](?:\s|$))")
# GitHub turns these into links and mentions after rendering, when a backslash no longer helps; a comment splits them.
_LINKED = re.compile(r"@(?=\w)|#(?=\d)|:(?=//)|(?<=www)\.", re.IGNORECASE)


def to_markdown(document: doc.Document, level: int = 2) -> str:
    """Render a document as Markdown, with a heading of this level."""
    heading, foot = _escape(document.title), ""
    said = f"**{_escape(document.word)}**. " * bool(document.word) + _escape(document.headline, 700)
    if document.verdict:
        word = document.word or document.verdict.capitalize()
        heading, said = f"{_SIGNS[document.verdict]} {word}: {heading}", f"**{_escape(document.headline, 700)}**"
        foot = f"<sub>{' · '.join(['assay', *map(_words, document.crumbs)])}</sub>"
    remedy = [f"What to do: {_escape(document.remedy, 700)}", ""] if document.remedy else []
    lines = [f"{'#' * level} {heading}", "", said, "", *remedy, *_lines(document.body)]
    return "\n".join([*lines, *([foot] if foot else [])]).rstrip("\n") + "\n"


def _escape(text: str, limit: int = 200) -> str:
    """Put `text` on one line, cut at `limit` characters, as Markdown that shows it literally."""
    shown = _SPECIAL.sub(lambda match: _escaped(match.group()), one_line(text, limit))
    return _LINKED.sub(lambda match: f"{match.group()}<!-- -->", shown)


def _code(text: str, limit: int = 200) -> str:
    """Make `text` a code span, fenced by more backticks than it contains in a row. Not for tables: a pipe would end the cell."""
    shown = visible(text).replace("\n", " ") or " "
    shown = shown if len(shown) <= limit else shown[: limit - 1] + "…"
    fence = "`" * (_longest_backticks(shown) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _fenced(text: str, language: str = "text") -> list[str]:
    """Make `text` a block of code, in a fence that it cannot end, with a blank line after it."""
    lines = visible(text).rstrip("\n").split("\n")
    fence = "`" * max(3, max(map(_longest_backticks, lines)) + 1)
    return [f"{fence}{language}", *lines, fence, ""]


def _escaped(character: str) -> str:
    if character.isdigit():
        return f"{character}\\"
    return {"<": "&lt;", ">": "&gt;", "&": "&amp;"}.get(character, "\\" + character)


def _longest_backticks(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _words(words: doc.Words) -> str:
    if isinstance(words, tuple):
        return "".join(map(_words, words))
    if isinstance(words, str):  # the spaces at its ends join it to its neighbours
        return f"{' ' * words.startswith(' ')}{_escape(words, 700)}{' ' * words.endswith(' ')}"
    text = f"**{_escape(words.text, 700)}**" if words.status == "strong" else _escape(words.text, 700)
    text = f"{_SIGNS[words.sign]} {text}" if words.sign else text
    text = f"[{text}]({words.link})" if words.link and not words.link.startswith("#") else text
    return f"{text} ({_escape(words.note)})" if words.note else text


def _lines(blocks: Sequence[doc.Block]) -> list[str]:
    return [line for block in blocks for line in _block(block)]


def _block(block: doc.Block) -> list[str]:
    match block:
        case doc.Line():
            return [f"**{_words(block.text)}**" if block.style == "strong" else _words(block.text), ""]
        case doc.Items():
            most = block.most or _ITEMS
            lines = [f"{'1.' if block.ordered else '-'} {_words(line)}" for line in block.lines[:most]]
            return [*lines, *_left(len(block.lines), most), ""] if lines else []
        case doc.Facts():
            rows = ((_words(name), "; ".join(map(_words, values))) for name, *values in block.rows)
            return [*(f"- **{name}**: {values}" for name, values in rows), ""]
        case doc.Table():
            return _table(block)
        case doc.Entries():
            lines = [
                f"- {_words((entry.status, f': {entry.name}: '))}{_words(entry.about)}"
                for entry in block.entries[: block.most]
            ]
            return [*lines, *_left(len(block.entries), block.most), ""]
        case doc.Findings():
            shown = [line for finding in block.findings[:_MOST] for line in _finding(finding)]
            return [*shown, *_left(len(block.findings), _MOST), ""] if block.findings else []
        case doc.Checks():
            unmet = [check for check in block.checks if check.status != "ok"]
            return [*map(_check, unmet[:_MOST]), *_left(len(unmet), _MOST), ""] if unmet else []
        case doc.Code():
            code = "\n".join(line[:_COMMAND] for line in doc.code_lines(block))
            return [*([f"{_escape(block.label)}:", ""] if block.label else []), *_fenced(code, block.language)]
        case doc.Section() if block.blocks and not block.detail:
            return _section(block)
        case _:
            return []


def _section(section: doc.Section) -> list[str]:
    inner = [*([_escape(section.lead, 700), ""] if section.lead else []), *_lines(section.blocks)]
    if not inner or not section.title:
        return inner
    if section.folded and any(map(_block, section.blocks)):
        return [f"<details><summary>{_words(section.title)}</summary>", "", *inner, "</details>", ""]
    return [f"**{_words(section.title)}**", "", *inner]


def _left(of: int, most: int | None) -> list[str]:
    return [f"- and {of - most} more, in report.html"] if most is not None and of > most else []


def _table(table: doc.Table) -> list[str]:
    sides = ("---:" if number in table.numbers else "---" for number in range(len(table.columns)))
    lines = [f"**{_escape(table.title)}**", ""] if table.title else []
    left = _left(len(table.rows), table.most)
    more = [[left[0].removeprefix("- "), *[""] * (len(table.columns) - 1)]] if left else []
    for row in (map(_escape, table.columns), sides, *(map(_words, row) for row in table.rows[: table.most]), *more):
        lines.append(f"| {' | '.join(row)} |")
    return [*lines, "", *([_escape(table.note, 700), ""] if table.note else [])]


def _finding(finding: Finding) -> list[str]:
    """Render a finding as a list item, with its evidence and the command that reproduces it below."""
    observed = f" Observed: {_escape(finding.observed, 400)}" if finding.observed else ""
    explained = "".join(f" (explained by {_span(command)})" for command in explaining(finding))
    lines = [f"- **{_escape(finding.title)}**: {_escape(finding.sentence, 500)}{observed}{explained}"]
    lines += [f"  - {'; '.join(_escape(line, 160) for line in finding.evidence[:3])}"] if finding.evidence else []
    if finding.picture:
        drawn = _fenced(picture_text(finding.picture, PLAIN_WIDTH).plain)
        lines += ["", *(f"  {line}".rstrip() for line in drawn)]
    return lines + ([f"  - {_span(finding.reproduce)}"] if finding.reproduce else [])


def _span(command: str) -> str:
    joined = command.replace("\\\n", " ").strip()
    return (
        "the command that reproduces it is in report.html"
        if "\n" in joined or len(joined) > _COMMAND
        else _code(joined, _COMMAND)
    )


def _check(check: SaidCheck) -> str:
    settles = f" To resolve: {_escape(check.settles)}" if check.settles else ""
    return f"- {doc.CHECK_SIGNS[check.status]} {check.status}: **{_escape(check.title)}**: {_escape(check.found)}.{settles}"
