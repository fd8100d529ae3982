"""The document of a hypothesis or a finding, and the list of all."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable

from rich.console import Console

from assay.harness.bugs.bug import FORM_WORDS
from assay.harness.bugs.family import KIND_TITLES
from assay.harness.explain.other_findings import OTHER_KIND, Page
from assay.harness.explain.pages import ids_of, titles
from assay.harness.text import percent
from assay.reports.document import Block, Cell, Code, Document, Items, Line, Only, Section, Weights
from assay.reports.terminal import say

_MARK = "  # <--"
"""Marks the lines of wrong code that the right code has not."""


def _effect(page: Page) -> str:
    """By how much the bug changes its example; empty for a finding that is no hypothesis."""
    if page.error is None:
        return ""
    off = f"off by {percent(page.error)}" if math.isfinite(page.error) else "not finite"
    return f"On this call the output is {off}."


def _marked(wrong: str, right: str) -> str:
    """Wrong code with a mark on each line that the right code does not have."""
    lines, others = wrong.rstrip("\n").split("\n"), right.rstrip("\n").split("\n")
    kept = {
        at for block in difflib.SequenceMatcher(None, lines, others, autojunk=False).get_matching_blocks()
        for at in range(block.a, block.a + block.size)
    }  # fmt: skip
    return "\n".join(line if at in kept else f"{line}{_MARK}" for at, line in enumerate(lines))


def _short(address: str) -> str:
    """A report as "owner/repository#number"; other addresses as they are."""
    issue = re.fullmatch(r"https://github\.com/([^/]+/[^/]+)/(?:issues|pull)/(\d+)", address)
    return f"{issue[1]}#{issue[2]}" if issue else address


def explain_document(page: Page) -> Document:
    """Build the document of a bug: its weights, wrong and right code, public reports, and what to do."""
    blocks: list[Block] = [
        Only("terminal", [Line(f"{page.id}: {page.title}", "strong"), Line(page.about)]),
        Line(f"Severity: {page.severity}.", "quiet"),
    ]
    if page.picture is not None:
        blocks.append(Section("picture", "What it does to the weights", [Weights(page.picture, _effect(page))]))
    if page.code is not None:
        wrong, right = _marked(page.code.wrong, page.code.right), page.code.right
        code: list[Block] = [
            Line(FORM_WORDS[page.code.form], "quiet"),
            Code(wrong, "Wrong", "python"),
            Code(right, "Right", "python"),
        ]
        blocks.append(Section("code", "Wrong and right code", code, announced=True))
        links = Items([Cell(_short(address), link=address) for address in page.reports])
        both: list[Block] = [Only("page", [links]), Only("markdown", [links]), Only("terminal", [Items(page.reports)])]
        reports = both if page.reports else [Line("No public report is known.", "empty")]
        reports += [Line(page.measured)] if page.measured else []
        blocks.append(Section("reports", "Public reports", reports, announced=True))
    do: list[Block] = [Line(page.do), Code(page.command, "Show it")]
    if page.variants and page.kind != OTHER_KIND:
        do.append(Line(f"Of the same kind: {', '.join(page.variants)}", "quiet"))
    blocks.append(Section("do", "What to do", do, announced=True))
    return Document(
        command="explain", title=page.id, verdict=None, word=page.title, headline=page.about, crumbs=[page.id],
        body=blocks,
    )  # fmt: skip


def render_list(console: Console) -> None:
    """Print every id with its title, by kind."""
    known = titles()
    width = max(map(len, known))
    for kind, heading in kinds():
        say(console, f"{heading}:")
        for id_ in ids_of(kind):
            say(console, f"  {id_:<{width}}  {known[id_]}")
    say(console, "assay explain ID has the picture, wrong and right code, and public reports.")


def kinds() -> Iterable[tuple[str, str]]:
    """Kinds of hypotheses with their headings, and the other findings."""
    return [*KIND_TITLES.items(), (OTHER_KIND, "Findings that are no known bug")]
