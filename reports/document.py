"""One document for each result, with one body for every medium: what to say, and in which order.

A function for each kind of result makes its `Document`; `assay.reports.terminal`, `page`, `markdown`, `github` and `junit` render
any document, and its JSON is the result's own. A page shows the whole body. A terminal and Markdown leave out the sections that
are details, anything that only a page can draw, and all but the first rows.

A body consists of ten kinds of blocks:

- `Line`, `Items`, `Facts`, `Code`: a paragraph, a list, names with values, and text to copy;
- `Table`: rows of cells, also as cards or as a matrix of verdicts;
- `Findings`, `Checks`: the defects, and the requirements of a pass;
- `Drawing`: a chart or heat maps, only for a page;
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
    """Text in a table, a fact or the header, with its presentation.

    Attributes:
        status: a verdict, "strong" or another word that has a colour or weight, or empty.
        code: whether to show it as code.
        link: the address that it leads to on a page.
        note: further text, less prominent on a page and in parentheses elsewhere.
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
    """A paragraph; its style is "strong", "deciding", "quiet", "empty" (nothing to show), or another of the style sheet."""

    text: Words
    style: str = ""


@dataclass(frozen=True)
class Items:
    """Lines of a list; a terminal and Markdown show the first `most`, or all for None."""

    lines: Sequence[Words]
    ordered: bool = False
    most: int | None = None


@dataclass(frozen=True)
class Facts:
    """Names with their values, and notes below them. A page shows them side by side, or in a small grid."""

    rows: Sequence[tuple[Words, ...]]
    style: Literal["", "small"] = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells; the first cell names the row.

    Attributes:
        title: the table's title, or empty if the section's title says it.
        numbers: indices of the columns of numbers.
        style: classes of the style sheet; "cards" for one card per row, "matrix" for cells in the colours of their verdicts.
        most: rows that a terminal and Markdown show, or None for all.
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
    """A list of findings.

    Attributes:
        style: which parts a page folds: "brief" folds the evidence and omits the command of a kernel's bug, which is shown below;
            "folded" folds all but one line per finding.
    """

    of: Sequence[Finding]
    style: Literal["", "brief", "folded"] = ""

    @property
    def findings(self) -> list[Finding]:
        """The findings, with their text."""
        return list(map(said_finding, self.of))


@dataclass(frozen=True)
class Checks:
    """The requirements of a pass. A terminal and Markdown show the unmet ones."""

    of: Sequence[Check]

    @property
    def checks(self) -> list[SaidCheck]:
        """The checks, with their text."""
        return list(map(said_check, self.of))


@dataclass(frozen=True)
class Code:
    """Code or commands to copy. A terminal and Markdown show the last `most` lines of a log, or all for None."""

    text: str
    label: str = ""
    language: str = "text"
    most: int | None = None


@dataclass(frozen=True)
class Drawing:
    """A drawing, which only a page shows.

    Attributes:
        drawn: a chart as an ``<svg>`` element; or `assay.harness.judge.report.ErrorGrid`s as heat maps, whose module takes too long
            to import for the pytest plugin.
        style: "wide" for a chart that scrolls in its own frame, "small" for heat maps next to each other instead of one at a time.
    """

    drawn: str | Sequence[Any]
    style: Literal["", "wide", "small"] = ""


@dataclass(frozen=True)
class Entry:
    """One of `Entries`.

    Attributes:
        where: text about its place, less prominent.
        texts: heading, text, and the marked rest of the text.
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
    """A list whose entries a page can unfold and filter; elsewhere the first entries are lines."""

    title: str
    entries: Sequence[Entry]
    filters: Sequence[str] = ()
    most: int = 5


@dataclass(frozen=True)
class Section:
    """Blocks below a heading, or in a box if it has no title (`style` is its class). A section without blocks is not shown.

    Attributes:
        title: empty for a box.
        id: empty for a part of another section.
        detail: whether only a page shows it.
        folded: whether a page and Markdown fold the blocks, or None if they cannot be folded.
        lead: the sentence below the title, which stays visible when the blocks are folded.
        short: title in the page's table of contents, which needs more than three sections; empty to use the whole title.
        sign: the verdict whose sign stands there.
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
        label: a word or two, or empty to continue the row above.
        text: the row's text; code is a command, which is never broken.
        limit: the limit that the text is judged by, or what a command shows, in a separate column.
        picture: drawing below the text.
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
        """Make the case of a requirement of a pass."""
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
        title: title of the page in a browser's tab, after the header's word.
        verdict: the verdict, or None for a document without one.
        exit_code: the command's exit code, if it is not the verdict's.
        word: the header's word, or empty for the verdict's.
        headline: one sentence, below the word; the first line of a terminal, unless `first` is set.
        first: the first line of a terminal, if its rows say more than the headline.
        screen: the rows below it; without rows, a terminal shows the body.
        remedy: what to do at once, below the headline.
        meaning: what the headline does not say, or None to explain the verdict and the exit code.
        created: ISO 8601, or empty if it does not matter.
        crumbs: the subject of the result, above the word.
        foot: last text of a page, before the command that made it.
        result: content of its JSON, or None for a document without JSON.
        page: path of its page, which the last row of a terminal names.
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
        """The word of the verdict, with which an answer begins, or an empty string without a verdict."""
        return (self.word or self.verdict or "").upper()

    @property
    def answer(self) -> str:
        """The first line of an output: verdict, decision and exit code, or an empty string if nothing is decided."""
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
    """Yield all blocks in order, including those within sections."""
    for block in blocks:
        yield block
        if isinstance(block, Section):
            yield from blocks_of(block.blocks)


def checks_blocks(checks: Sequence[Check]) -> list[Block]:
    """List the unmet requirements, and below them, folded, the met ones."""
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
    """The lines of code that a terminal and Markdown show: the last ones, below the number of lines left out."""
    lines = code.text.rstrip("\n").split("\n")
    left = 0 if code.most is None else len(lines) - code.most
    return lines if left <= 0 else [f"... {left} lines left out", *lines[left:]]
