"""A line of text → the scores, times and rates that it states, whatever program wrote it.

A number counts if its unit is a rate, or if the words before it name a score, a latency or a throughput. All expressions have
bounded repetitions, and of a line only the beginning is read: a damaged file costs no more than a whole one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from assay.harness.ingest.quantity import UNIT, Unit, quantity, unit_of

LONGEST = 2_000
"""Characters of a line that are read."""
_LABEL = 80
"""Most characters of a name."""
_NUMBER = re.compile(
    r"(?<![\w.:/+-])(?P<number>-?(?:\d{1,3}(?:,\d{3}){1,4}|\d{1,15})(?:\.\d{1,15})?(?:[eE][-+]?\d{1,3})?)"
    rf"(?: ?(?P<percent>%)| ?(?:(?P<of>total|output|input|prompt|generation) )?(?P<unit>{UNIT})(?: per (?P<per>token))?)?"
    r"(?![\w:/%]|[-.]\d)"
)
_SCORE = re.compile(
    r"(?:^|[^a-z])(?:accuracy|acc|acc_norm|score|exact[ _]match|em|f1|bleu|rouge\w{0,4}|pass@\d{1,3}|perplexity|ppl|solve[ _]rate"
    r"|mmlu\w{0,40}|gsm8k\w{0,40}|gpqa\w{0,40}|hellaswag|humaneval|arc_\w{1,10}|aime\w{0,10}|math_?500)$"
)
_TIME = re.compile(
    r"latency|throughput|ttft|tpot|\bitl\b|e2el|time[ -]to[ -]first[ -]token|time[ -]per[ -]output[ -]token|eval time|load time"
    r"|total time"
)
_UNIT_LAST = re.compile(r"\((?P<unit>[^()]{1,20})\)$")
_ASIDE = re.compile(r" ?\[[^\[\]]{1,30}\]$")
_BREAK = re.compile(r"[,;|{}\[\]()\"]|: | - |\s{2,}")
_RULE = re.compile(r"\|(?: ?:?-{1,60}:? ?\|){2,30}")
_HINTS = re.compile(
    r"accura|acc|score|match|f1|bleu|rouge|pass@|perplex|ppl|solve|mmlu|gsm8k|gpqa|swag|humaneval|arc_|aime|math|throughput|latency"
    r"|ttft|tpot|itl|e2el|tok|req|time|/s|per sec"
)


class Figure(NamedTuple):
    """A number with its name.

    Attributes:
        name: as it is written, with what it is of.
        value: a percentage as a share.
        written: with its unit.
        unit: of a time or a rate; None for a score.
        task: of a score in a table; empty elsewhere.
    """

    name: str
    value: float
    written: str
    unit: Unit | None
    task: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which it may be called."""
        return (*quantity(self.name)[0], *filter(None, [self.task]))


def figures(text: str) -> Iterator[Figure]:
    """Yield the scores, times and rates that a line of prose or ``name: value`` states."""
    text = " ".join(text[:LONGEST].replace("\t", "  ").replace("  ", " \N{SYMBOL FOR SPACE} ").split())
    text = text.replace("\N{SYMBOL FOR SPACE} ", "").replace("\N{SYMBOL FOR SPACE}", "")
    if not _HINTS.search(text.lower()):
        return
    end, label = 0, ""
    for match in _NUMBER.finditer(text):
        own, given = _named(text[end : match.start()][-2 * _LABEL :])
        end, label = match.end(), own or label
        figure = _figure(match, own, label, given)
        if figure:
            yield figure


def _named(before: str) -> tuple[str, str]:
    """Return the name that ends where a number begins, and the unit in parentheses behind it; both may be empty."""
    words = before.rstrip()
    bare = words.removesuffix(":").removesuffix("=").rstrip()
    if bare == words and not _SCORE.search(words.lower()):
        return "", ""
    unit = _UNIT_LAST.search(bare)
    if unit:
        bare = bare[: unit.start()].rstrip()
    bare = _ASIDE.sub("", bare)
    return _BREAK.split(bare)[-1].strip(" *#>`'")[-_LABEL:], unit["unit"] if unit else ""


def _figure(match: re.Match[str], own: str, label: str, given: str) -> Figure | None:
    """Make the figure of a number: `own` is its name, `label` the line's last name, `given` its unit in parentheses."""
    unit, value = unit_of(match["unit"] or given), float(match["number"].replace(",", ""))
    name = " ".join(filter(None, [match["of"], own or label])) + (
        f" per {match['per']}" if match["per"] and not own else ""
    )
    written = match.group().strip() + (f" {given}" if given else "")
    if unit is not None and (unit.kind != "time" or _TIME.search(name.lower())):
        name = name or "throughput"
        return Figure(name if own or match["of"] or match["per"] else f"{name}, rate", value, written, unit)
    if not own or unit is not None:
        return None
    if _TIME.search(own.lower()) and not match["percent"]:
        return Figure(own, value, written, quantity(own)[1])
    return (
        Figure(own, value / 100 if match["percent"] else value, written, None) if _SCORE.search(own.lower()) else None
    )


class Tables:
    """Tables of Markdown, a line at a time: lm-eval's scores, llama-bench's rates."""

    def __init__(self) -> None:
        self._before: tuple[str, ...] = ()
        self._columns: tuple[str, ...] = ()
        self._above: list[str] = []

    def row(self, text: str) -> tuple[Figure, ...] | None:
        """Return the figures in a line of a table, which may be none; None if the line belongs to no table."""
        text = text[:LONGEST].strip()
        if not (text.startswith("|") and text.endswith("|") and len(text) > 1):
            self._before = self._columns = ()
            return None
        cells = tuple(cell.strip() for cell in text[1:-1].split("|"))
        if _RULE.fullmatch(text):
            self._columns = self._before if len(self._before) == len(cells) else ()
            self._above = [""] * len(self._columns)
            return () if self._columns else None
        if len(cells) != len(self._columns):
            self._before = cells
            return None
        self._above = [cell or above for cell, above in zip(cells, self._above, strict=True)]
        return tuple(self._stated(self._above, cells))

    def _stated(self, row: Sequence[str], cells: Sequence[str]) -> Iterable[Figure]:
        named = {column.lower(): cell for column, cell in zip(self._columns, row, strict=True)}
        task = next((named[name].lstrip("- ") for name in ("task", "tasks", "groups", "test") if named.get(name)), "")
        what = " ".join(filter(None, (task, named.get("metric", ""))))
        for column, cell in zip(self._columns, cells, strict=True):
            number = _NUMBER.match(cell)
            unit = unit_of(column)
            if number and what and (unit or column.lower() in ("value", "score", "accuracy")):
                written = f"{number['number']} {column}" if unit else number["number"]
                yield Figure(what, float(number["number"].replace(",", "")), written, unit, task)
