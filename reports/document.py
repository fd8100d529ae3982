"""One document for whatever a command shows, and for every medium: what is said, in which order. Renderers decide how it looks.

A function for each kind of result makes its `Document`. `assay.reports.terminal`, `page`, `markdown` and `junit` render any
document; its JSON is that of the result itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from assay.harness.picture import Picture
from assay.harness.text import counted, one_line
from assay.harness.verdict import Check, CheckStatus, Finding, Verdict, exit_code_of

Medium = Literal["terminal", "page", "markdown", "github"]
Outcome = Verdict | Literal["ok", "failed", "missing", "not checked"]
CHECK_SIGNS: dict[CheckStatus, str] = {"ok": "✓", "failed": "✕", "missing": "?", "not checked": "–"}


@dataclass(frozen=True)
class Cell:
    """Words of a table, a fact or the header, with more than their text.

    Attributes:
        status: a verdict, "strong" or another word that has a colour or weight; empty for none.
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


Words = str | Cell | tuple[str | Cell, ...]


@dataclass(frozen=True)
class Line:
    """A paragraph.

    Attributes:
        style: "strong", "deciding" (the sentence of a section), "quiet", "empty" (there is none), or another of the style sheet.
    """

    text: Words
    style: str = ""


@dataclass(frozen=True)
class Items:
    """Lines of a list, of which a terminal and Markdown show so many; None for all."""

    lines: Sequence[Words]
    ordered: bool = False
    most: int | None = None


@dataclass(frozen=True)
class Facts:
    """Names with their values; what follows a value stands below it. On a page side by side, in a small grid, or as cards that lead
    to a section ("jumps")."""

    rows: Sequence[tuple[Words, ...]]
    style: Literal["", "small", "jumps"] = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells, the first of which names the row.

    Attributes:
        title: of the table; empty where the section's says it.
        numbers: indices of the columns of numbers.
        style: classes of the style sheet.
        most: rows that a terminal and Markdown show; None for all.
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
    """The findings, or that there are none. A terminal shows the commands that reproduce them if `commands`, a page folds the
    evidence and leaves out the command of a kernel's bug if `brief`, and Markdown shows so many; None for all."""

    findings: Sequence[Finding]
    commands: bool = False
    brief: bool = False
    most: int | None = None


@dataclass(frozen=True)
class Checks:
    """The requirements of a pass. A terminal and Markdown show those that are not met, and Markdown so many; None for all."""

    checks: Sequence[Check]
    most: int | None = None


@dataclass(frozen=True)
class Code:
    """Code or commands, to be copied. A terminal indents what has a label."""

    text: str
    label: str = ""
    language: str = "text"


@dataclass(frozen=True)
class Weights:
    """The picture of an operator."""

    picture: Picture


@dataclass(frozen=True)
class Drawing:
    """A chart for a page, as an ``<svg>`` element; a wide one scrolls in its own frame. An empty one is not shown."""

    svg: str
    wide: bool = True


@dataclass(frozen=True)
class HeatMaps:
    """Errors by layer and head or condition, for a page: one large map at a time, or small ones beside each other.

    Attributes:
        grids: `assay.harness.judge.report.ErrorGrid`s, whose module takes too long to import for the pytest plugin.
    """

    grids: Sequence[Any]
    small: bool = False


@dataclass(frozen=True)
class Entry:
    """One of `Entries`.

    Attributes:
        where: less prominent.
        texts: heading, text, and a rest of it that is marked.
        kinds: a value for each filter.
    """

    status: Cell
    name: str
    about: Words
    where: str
    texts: Sequence[tuple[str, str, str]]
    kinds: Sequence[str] = ()


@dataclass(frozen=True)
class Entries:
    """A list for a page, whose entries unfold to texts of others, and which can be filtered."""

    title: str
    entries: Sequence[Entry]
    filters: Sequence[str] = ()


@dataclass(frozen=True)
class Matrix:
    """Verdicts by row and column, for a page.

    Attributes:
        corner: what the rows and columns are.
        cells: by row; the status of each is its verdict. None where there is nothing.
    """

    corner: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[Cell | None]]


@dataclass(frozen=True)
class Box:
    """Blocks that a page shows together, by a class of the style sheet, such as beside each other."""

    style: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Only:
    """Blocks for one medium."""

    medium: Medium
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Fold:
    """Blocks that a page and Markdown fold below a summary; a terminal shows neither."""

    summary: Words
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Section:
    """Blocks below a heading.

    Attributes:
        id: empty for a part of another section.
        announced: whether a terminal shows the heading, and a blank line above it.
        short: title in the contents of a page; empty for the whole.
        sign: verdict whose sign stands there.
        style: class of the style sheet.
        lead: sentence below the title.
        folded: whether a page folds the blocks; None if they cannot be folded.
    """

    id: str
    title: Words
    blocks: Sequence[Block]
    announced: bool = False
    short: str = ""
    sign: Verdict | None = None
    style: str = ""
    lead: str = ""
    folded: bool | None = None


Block = (
    Line
    | Items
    | Facts
    | Table
    | Findings
    | Checks
    | Code
    | Weights
    | Drawing
    | HeatMaps
    | Entries
    | Matrix
    | Box
    | Only
    | Fold
    | Section
)


@dataclass(frozen=True)
class CaseResult:
    """A case of JUnit: it is green only if its outcome is "pass" or "ok"."""

    name: str
    classname: str
    outcome: Outcome
    message: str
    lines: Sequence[str]
    seconds: float | None = None

    @classmethod
    def of(cls, check: Check, classname: str) -> CaseResult:
        """The case of a requirement of a pass."""
        line = f"{check.title}: {check.found}"
        resolve = [f"To resolve: {check.settles}"] if check.settles and check.status != "ok" else []
        return cls(check.id, classname, check.status, line, [line, *resolve])


@dataclass(frozen=True)
class Suite:
    """Cases of JUnit, with their properties."""

    name: str
    cases: Sequence[CaseResult]
    properties: Mapping[str, str] = field(default_factory=dict)
    created: str = ""


def _json(result: BaseModel) -> str:
    return result.model_dump_json(indent=2, by_alias=True)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A result as every renderer shows it.

    Attributes:
        command: that made it, such as "compare".
        title: of the page in a browser's tab, after the word of the header.
        verdict: None for a document that has none.
        exit_code: of the command, where it is not that of the verdict.
        word: in the header; empty for that of the verdict.
        headline: one sentence, below the word; a terminal shows it last.
        remedy: what to do at once, below the headline.
        meaning: what the headline does not say; None for what the verdict means and the exit code.
        created: ISO 8601; empty if it does not matter.
        crumbs: above the word: what was examined.
        body: in order.
        contents: whether a page begins with links to its sections.
        foot: what a page says at its end, before the command that made it.
        suites: for JUnit.
        result: what its JSON holds; None for a document without.
        json: writes the result.
        name: of the JUnit document.
        page: where its page is; the last line of an output names it.
    """

    command: str
    title: str
    verdict: Verdict | None
    headline: str
    body: Sequence[Block]
    exit_code: int | None = None
    word: str = ""
    remedy: str = ""
    meaning: str | None = None
    created: str = ""
    crumbs: Sequence[Words] = ()
    contents: bool = False
    foot: str = ""
    suites: Sequence[Suite] = ()
    result: BaseModel | None = None
    json: Callable[[Any], str] = _json
    name: str = "assay"
    page: str = ""

    @property
    def code(self) -> int:
        """The exit code of the command; 0 for a document that decides nothing."""
        decided = 0 if self.verdict is None else int(exit_code_of(self.verdict))
        return decided if self.exit_code is None else self.exit_code

    @property
    def conclusion(self) -> str:
        """The last line of an output, which stays on the screen: verdict, exit code and why; empty if nothing is decided."""
        if self.exit_code is None and self.verdict is None:
            return ""
        if self.exit_code is not None:
            return one_line(self.headline, 700) + (f" (exit code {self.exit_code})" if self.exit_code else "")
        said = one_line(f"{(self.word or self.verdict or '').upper()} (exit code {self.code}): {self.headline}", 700)
        return one_line(f"{one_line(said, 440)} Report: {self.page}", 700) if self.page else said


def plain(words: Words) -> str:
    """Words without markup, on one line."""
    parts = words if isinstance(words, tuple) else (words,)
    notes = (part if isinstance(part, str) else part.text + (f" ({part.note})" if part.note else "") for part in parts)
    return one_line("".join(notes), 700)


def blocks_of(blocks: Sequence[Block]) -> Iterator[Block]:
    """All blocks for a page, those within others included, in order."""
    for block in blocks:
        yield block
        if isinstance(block, (Box, Fold, Section)) or (isinstance(block, Only) and block.medium == "page"):
            yield from blocks_of(block.blocks)


def more(left: int, what: str) -> list[Block]:
    """A line that says how many rows a terminal does not show; none if it shows all."""
    return [Only("terminal", [Line(f"… and {counted(left, what)}: see --json or --html")])] if left > 0 else []
