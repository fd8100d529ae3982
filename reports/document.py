"""One document for whatever a command shows, with one body for every medium: what is said, in which order.

A function for each kind of result makes its `Document`; `assay.reports.terminal`, `page`, `markdown`, `github` and `junit` render
any document, and its JSON is that of the result itself. A page shows the whole body. A terminal and Markdown leave out the
sections that are details, what only a page can draw, and rows beyond the first so many.

A body consists of ten kinds of blocks:

- `Line`, `Items`, `Facts`, `Code`: a paragraph, a list, names with values, and what is to be copied;
- `Table`: rows of cells, also as cards or as a matrix of verdicts;
- `Findings`, `Checks`: what is wrong, and the requirements of a pass;
- `Drawing`: a chart or heat maps, for a page alone;
- `Entries`: a list that a page unfolds and filters;
- `Section`: blocks below a heading, or in a box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from assay.harness.picture import Picture
from assay.harness.text import one_line
from assay.harness.verdict import Check, CheckStatus, Finding, Verdict, exit_code_of
from assay.reports.wording.requirements import SaidCheck, said_check
from assay.reports.wording.say import said_finding

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
        sign: the verdict whose sign stands before the text.
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
    """A paragraph; its style is "strong", "deciding", "quiet", "empty" (there is none), or another of the style sheet."""

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
    """Names with their values; what follows a value stands below it. On a page side by side, or in a small grid."""

    rows: Sequence[tuple[Words, ...]]
    style: Literal["", "small"] = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells, the first of which names the row.

    Attributes:
        title: of the table; empty where the section's says it.
        numbers: indices of the columns of numbers.
        style: classes of the style sheet; "cards" for a card for each row, "matrix" for cells in the colours of their verdicts.
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
    """What is wrong.

    Attributes:
        style: what a page folds: "brief" the evidence, without the command of a kernel's bug, which is shown below; "folded" all
            but a line for each.
    """

    of: Sequence[Finding]
    style: Literal["", "brief", "folded"] = ""

    @property
    def findings(self) -> list[Finding]:
        """The findings in words."""
        return list(map(said_finding, self.of))


@dataclass(frozen=True)
class Checks:
    """The requirements of a pass. A terminal and Markdown show those that are not met."""

    of: Sequence[Check]

    @property
    def checks(self) -> list[SaidCheck]:
        """The checks in words."""
        return list(map(said_check, self.of))


@dataclass(frozen=True)
class Code:
    """Code or commands, to be copied. Of a log, a terminal and Markdown show the last lines, so many; None for all."""

    text: str
    label: str = ""
    language: str = "text"
    most: int | None = None


@dataclass(frozen=True)
class Drawing:
    """What only a page draws.

    Attributes:
        drawn: a chart as an ``<svg>`` element; or `assay.harness.judge.report.ErrorGrid`s as heat maps, whose module takes too long
            to import for the pytest plugin.
        style: "wide" for a chart that scrolls in its own frame, "small" for heat maps beside each other instead of one at a time.
    """

    drawn: str | Sequence[Any]
    style: Literal["", "wide", "small"] = ""


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
    """A list whose entries unfold to texts of others on a page, where it can be filtered; elsewhere the first are lines."""

    title: str
    entries: Sequence[Entry]
    filters: Sequence[str] = ()
    most: int = 5


@dataclass(frozen=True)
class Section:
    """Blocks below a heading; without a title a box, by a class of the style sheet. Without blocks it is not shown.

    Attributes:
        title: empty for a box.
        id: empty for a part of another section.
        detail: whether only a page shows it.
        folded: whether a page and Markdown fold the blocks; None if they cannot be folded.
        lead: the sentence below the title, which stays visible when the blocks are folded.
        short: title in the contents of a page, which one of more than three sections has; empty for the whole.
        sign: verdict whose sign stands there.
        style: class of the style sheet.
    """

    title: Words
    blocks: Sequence[Block]
    id: str = ""
    detail: bool = False
    folded: bool | None = None
    lead: str = ""
    short: str = ""
    sign: Verdict | None = None
    style: str = ""


@dataclass(frozen=True)
class Row:
    """A row of the first screen.

    Attributes:
        label: a word or two; empty to continue the row above.
        text: what there is to say; code is a command, which is never broken.
        limit: what it is judged by, or what a command shows, in a column of its own.
        picture: drawn below the text.
    """

    label: str
    text: Words
    limit: str = ""
    picture: Picture | None = None


MORE = Row("More", "--all prints the rest, --html FILE writes the page")
"""The last row of a first screen whose body has more."""

Block = Line | Items | Facts | Table | Findings | Checks | Code | Drawing | Entries | Section


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
        said = said_check(check)
        line = f"{said.title}: {said.found}"
        resolve = [f"To resolve: {said.settles}"] if said.settles else []
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
        title: of the page in a browser's tab, after the word of the header.
        verdict: None for a document that has none.
        exit_code: of the command, where it is not that of the verdict.
        word: in the header; empty for that of the verdict.
        headline: one sentence, below the word; the first line of a terminal, unless `first` is.
        first: what a terminal's first line says instead, where rows say more than the headline.
        screen: the rows below it; without any, a terminal shows the body.
        remedy: what to do at once, below the headline.
        meaning: what the headline does not say; None for what the verdict means and the exit code.
        created: ISO 8601; empty if it does not matter.
        crumbs: above the word: what was examined.
        foot: what a page says at its end, before the command that made it.
        result: what its JSON holds; None for a document without.
        page: where its page is; the last row of a terminal names it.
    """

    command: str
    title: str
    verdict: Verdict | None
    headline: str
    body: Sequence[Block]
    first: str = ""
    screen: Sequence[Row] = ()
    exit_code: int | None = None
    word: str = ""
    remedy: str = ""
    meaning: str | None = None
    created: str = ""
    crumbs: Sequence[Words] = ()
    foot: str = ""
    suites: Sequence[Suite] = ()
    result: BaseModel | None = None
    json: Callable[[Any], str] = _json
    page: str = ""

    @property
    def code(self) -> int:
        """The exit code of the command; 0 for a document that decides nothing."""
        decided = 0 if self.verdict is None else int(exit_code_of(self.verdict))
        return decided if self.exit_code is None else self.exit_code

    @property
    def called(self) -> str:
        """The word of the verdict, as an answer begins with it; empty for a document without one."""
        return (self.word or self.verdict or "").upper()

    @property
    def answer(self) -> str:
        """The first line of an output: verdict, what was decided, and the exit code; empty if nothing is decided."""
        if self.exit_code is None and self.verdict is None:
            return ""
        said = one_line(self.first or self.headline, 640).rstrip(".")
        return f"{self.called}{'   ' * bool(self.called)}{said} · exit {self.code}"


def plain(words: Words) -> str:
    """Words without markup, on one line."""
    parts = words if isinstance(words, tuple) else (words,)
    notes = (part if isinstance(part, str) else part.text + (f" ({part.note})" if part.note else "") for part in parts)
    return one_line("".join(notes), 700)


def blocks_of(blocks: Sequence[Block]) -> Iterator[Block]:
    """All blocks, those within sections included, in order."""
    for block in blocks:
        yield block
        if isinstance(block, Section):
            yield from blocks_of(block.blocks)


def checks_blocks(checks: Sequence[Check]) -> list[Block]:
    """The requirements that are not met, and below them, folded, those that are."""
    met, unmet = ([check for check in checks if (check.status == "ok") == ok] for ok in (True, False))
    title = f"{len(met)} {'check is' if len(met) == 1 else 'checks are'} ok"
    blocks: list[Block] = [Checks(unmet)] if unmet else []
    blocks += [Section(title, [Checks(met)], detail=True, folded=True)] if met else []
    return blocks or [Line("Nothing was checked.", "empty")]


def first_words(texts: Sequence[str]) -> list[str]:
    """Return texts without the words that all of them begin with, such as an instruction."""
    lines = [" ".join(text.split()) for text in texts]
    first, last = min(lines, default=""), max(lines, default="")  # what these two share, all share
    alike = next((n for n, pair in enumerate(zip(first, last, strict=False)) if len(set(pair)) > 1), 0)
    return [line[first.rfind(" ", 0, alike) + 1 :] for line in lines]


def code_lines(code: Code) -> list[str]:
    """The lines of code that a terminal and Markdown show: the last so many, below how many are left out."""
    lines = code.text.rstrip("\n").split("\n")
    left = 0 if code.most is None else len(lines) - code.most
    return lines if left <= 0 else [f"... {left} lines left out", *lines[left:]]
