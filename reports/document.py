"""One document for whatever a command shows, and for every medium: what is said, in which order. Renderers decide how it looks.

A function for each kind of result makes its `Document`. `assay.reports.terminal`, `page` and `junit` render any document; its
JSON is that of the result itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from assay.harness.picture import Picture
from assay.harness.text import counted, one_line
from assay.harness.verdict import Check, CheckStatus, Finding, Verdict

Medium = Literal["terminal", "page", "markdown"]
Outcome = Verdict | Literal["ok", "failed", "missing", "not checked"]
CHECK_SIGNS: dict[CheckStatus, str] = {"ok": "✓", "failed": "✕", "missing": "?", "not checked": "–"}


@dataclass(frozen=True)
class Cell:
    """Words of a table, a fact or the header, with more than their text.

    Attributes:
        status: a verdict, "worse", "strong" or another word that has a colour or weight; empty for none.
        code: whether it is shown as code.
        link: the address that it leads to on a page.
        note: further words, less prominent on a page and in parentheses elsewhere.
        sign: the verdict whose sign stands for the text where there is no room for it.
    """

    text: str
    status: str = ""
    code: bool = False
    link: str = ""
    note: str = ""
    sign: Verdict | None = None


Words = str | Cell


@dataclass(frozen=True)
class Line:
    """A paragraph.

    Attributes:
        style: "strong", "quiet" or "empty" (there is nothing to show); empty for plain text.
    """

    text: str | Sequence[Words]
    style: Literal["", "strong", "quiet", "empty"] = ""


@dataclass(frozen=True)
class Items:
    """Lines of a list."""

    lines: Sequence[str | Cell]
    ordered: bool = False


@dataclass(frozen=True)
class Facts:
    """Names with their values; what follows a value stands below it. On a page, side by side or as cards."""

    rows: Sequence[tuple[Words, ...]]
    cards: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells, the first of which names the row.

    Attributes:
        title: of the table; empty where the section's says it.
        numbers: indices of the columns of numbers.
        style: classes of the style sheet.
        most: rows that a terminal shows; None for all.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Words]]
    title: str = ""
    note: str = ""
    numbers: Sequence[int] = ()
    style: str = ""
    most: int | None = None


@dataclass(frozen=True)
class Findings:
    """What is wrong; none is said, too. A terminal shows the commands that reproduce them if `commands`."""

    findings: Sequence[Finding]
    commands: bool = False


@dataclass(frozen=True)
class Checks:
    """The requirements of a pass. A terminal shows those that are not met."""

    checks: Sequence[Check]


@dataclass(frozen=True)
class Code:
    """Code or commands, to be copied. A terminal indents what has a label."""

    text: str
    label: str = ""


@dataclass(frozen=True)
class Weights:
    """The picture of an operator, with what is said below it."""

    picture: Picture
    says: str


@dataclass(frozen=True)
class Drawing:
    """A picture for a page, as an ``<svg>`` element."""

    svg: str


@dataclass(frozen=True)
class Embedded:
    """A part of a page that has a template of its own, such as heat maps."""

    template: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Only:
    """Blocks for one medium."""

    medium: Medium
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Fold:
    """Blocks that a page folds below a summary; a terminal shows neither."""

    summary: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    """Blocks below a heading. A terminal shows the heading if `announced`, and a blank line above it."""

    id: str
    title: str
    blocks: Sequence[Block]
    announced: bool = False


Block = Line | Items | Facts | Table | Findings | Checks | Code | Weights | Drawing | Embedded | Only | Fold | Section


@dataclass(frozen=True)
class Case:
    """A case of JUnit: it is green only if its outcome is "pass" or "ok"."""

    name: str
    classname: str
    outcome: Outcome
    message: str
    lines: Sequence[str]
    seconds: float | None = None

    @classmethod
    def of(cls, check: Check, classname: str) -> Case:
        """The case of a requirement of a pass."""
        found = f"{check.title}: {check.found}"
        resolve = [f"To resolve: {check.settles}"] if check.settles and check.status != "ok" else []
        return cls(check.id, classname, check.status, found, [found, *resolve])


@dataclass(frozen=True)
class Suite:
    """Cases of JUnit, with their properties."""

    name: str
    cases: Sequence[Case]
    properties: Mapping[str, str] = field(default_factory=dict)
    created: str = ""


@dataclass(frozen=True, kw_only=True)
class Document:
    """What is said of a result.

    Attributes:
        command: that made it, such as "compare".
        title: of the page in a browser's tab, after the verdict's word if the header has that.
        verdict: None for a document that has none.
        word: in the header; empty for that of the verdict.
        headline: one sentence, below the word.
        meaning: what the headline does not say; None for what the verdict means and the exit code.
        created: ISO 8601; empty if it does not matter.
        crumbs: above the word: what was examined.
        body: in order.
        foot: what a page says at its end, before the command that made it.
        suites: for JUnit.
        result: what its JSON holds; None for a document without.
        scripts: of the page.
        name: of the JUnit document.
    """

    command: str
    title: str
    verdict: Verdict | None
    headline: str
    body: Sequence[Block]
    word: str = ""
    meaning: str | None = None
    created: str = ""
    crumbs: Sequence[Words] = ()
    foot: str = ""
    suites: Sequence[Suite] = ()
    result: BaseModel | None = None
    scripts: Sequence[str] = ("page.js",)
    name: str = "assay"


def plain(words: Words) -> str:
    """Words without markup, on one line."""
    if isinstance(words, str):
        return one_line(words, 700)
    return one_line(words.text, 700) + (f" ({one_line(words.note)})" if words.note else "")


def more(left: int, what: str) -> list[Block]:
    """A line that says how many rows a terminal does not show; none if it shows all."""
    return [Only("terminal", [Line(f"… and {counted(left, what)}: see --json or --html")])] if left > 0 else []
