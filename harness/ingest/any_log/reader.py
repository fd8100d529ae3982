"""The generic reader: faults, scores, times and rates with their lines, and how many lines state nothing that it knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from assay.harness.ingest.any_log.faults import TITLES, Traceback, Tracebacks, fault, message
from assay.harness.ingest.any_log.figures import Figure, Tables, figures
from assay.harness.ingest.guessing import below_guessing
from assay.harness.ingest.result import CitedFinding, Document, Excerpt, Fact, FileRead, Statement, Table
from assay.harness.ingest.source import Source
from assay.harness.text import one_line

KEPT = 10_000
"""Different figures, faults and tracebacks that are kept; what lies beyond is counted as read only."""
_SHOWN = 50
"""Most rows of a table and most facts of one kind."""


@dataclass
class Stated:
    """One figure: each time that the text states it."""

    figures: list[Figure] = field(default_factory=list)
    first: int = 0
    last: int = 0
    text: str = ""


@dataclass
class Fault:
    """Lines that report the same fault."""

    id: str
    text: str
    first: int
    last: int
    count: int = 1


@dataclass
class Text:
    """The statements of a text."""

    lines: int = 0
    read: int = 0
    stated: dict[str, Stated] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)
    tracebacks: list[Traceback] = field(default_factory=list)


class AnyLog:
    """Reads any text in which it finds at least one such line. It is asked last."""

    id = "text"
    title = "Text of an unknown program"

    def recognises(self, source: Source) -> bool:
        """Return True if the source is text and one of its lines states something."""
        if source.path.is_dir() or not source.head or "\0" in source.head_text:
            return False
        read = _Reading()
        return any(read.line(line.number, line.text) for line in source.lines())

    def read(self, source: Source) -> Document:
        """See `FileReader`."""
        found = _read(source)
        notes = (
            *source.encoding_notes(),
            "only errors, tracebacks, scores, times and rates were looked for: what the other lines state is not known",
        )
        return Document(
            file=FileRead.of(source, self.id, self.title, found.read, found.lines - found.read, notes=notes),
            facts=tuple(_facts(found)),
            tables=tuple(table for table in (_table(found),) if table.rows),
            findings=tuple(_findings(found)),
        )

    def statements(self, source: Source) -> Iterable[Statement]:
        """Yield each figure that is stated once; of one that is repeated, the lowest, the highest and the last."""
        for name, one in _read(source).stated.items():
            where = f"{source.path}:{one.first}"
            first = one.figures[0]
            if len(one.figures) == 1:
                yield Statement("number", first.names, first.value, where, one.text, first.unit)
                continue
            by_value = sorted(one.figures, key=lambda figure: figure.value)
            for which, figure in (("lowest", by_value[0]), ("highest", by_value[-1]), ("last", one.figures[-1])):
                names = tuple(f"{which} {known}" for known in figure.names)
                yield Statement("number", names, figure.value, where, f"{name}: {figure.written}", figure.unit)


class _Reading:
    def __init__(self) -> None:
        self.text = Text()
        self._tables, self._tracebacks = Tables(), Tracebacks()

    def line(self, number: int, text: str) -> bool:
        """Read a line; return True if it states anything."""
        self.text.lines += 1
        within = list(self._tracebacks.line(number, text))
        self._keep(within)
        understood = any(one is None or one.last == number for one in within)
        row = self._tables.row(text)
        for one in figures(text) if row is None else row:
            understood = True
            self._state(one, number, text)
        id = "" if understood or within else fault(text)
        if id:
            understood = True
            self._report(id, number, text)
        understood = understood or bool(row is not None)
        self.text.read += understood
        return understood

    def end(self) -> Text:
        self._keep([self._tracebacks.cut_off()])
        return self.text

    def _keep(self, found: Iterable[Traceback | None]) -> None:
        room = KEPT - len(self.text.tracebacks)
        self.text.tracebacks += [one for one in found if one][:room]

    def _state(self, figure: Figure, number: int, text: str) -> None:
        if figure.name not in self.text.stated and len(self.text.stated) >= KEPT:
            return
        stated = self.text.stated.setdefault(figure.name, Stated(first=number, text=one_line(text)))
        if len(stated.figures) < KEPT:
            stated.figures.append(figure)
        stated.last = number

    def _report(self, id: str, number: int, text: str) -> None:
        key = message(text)
        known = self.text.faults.get(key)
        if known:
            known.count, known.last = known.count + 1, number
        elif len(self.text.faults) < KEPT:
            self.text.faults[key] = Fault(id, one_line(text), number, number)


def _read(source: Source) -> Text:
    read = _Reading()
    for line in source.lines():
        read.line(line.number, line.text)
    return read.end()


def _facts(found: Text) -> Iterator[Fact]:
    for traceback in found.tracebacks[:_SHOWN]:
        text = one_line(traceback.raised or "a traceback that does not end") + (
            f" ({traceback.frame})" if traceback.frame else ""
        )
        yield Fact(id="traceback", title="Traceback", text=text, cites=(_cite(traceback.first, traceback.last, text),))
    for fault_ in list(found.faults.values())[:_SHOWN]:
        text = (f"{fault_.count}×: " if fault_.count > 1 else "") + fault_.text
        yield Fact(
            id=fault_.id, title=TITLES[fault_.id], text=text, cites=(_cite(fault_.first, fault_.last, fault_.text),)
        )


def _table(found: Text) -> Table:
    rows = []
    for name, one in list(found.stated.items())[:_SHOWN]:
        values = [figure.value for figure in one.figures]
        low, high = (one.figures[values.index(extreme)].written for extreme in (min(values), max(values)))
        lines = str(one.first) if one.first == one.last else f"{one.first}–{one.last}"
        spread = (low, high) if len(values) > 1 else ("", "")
        rows.append((name, one.figures[-1].written, *spread, f"{len(values):,}", lines))
    columns = ("figure", "value (the last)", "lowest", "highest", "times", "lines")
    return Table(id="figures", title="Scores, times and rates", columns=columns, rows=tuple(rows))


def _findings(found: Text) -> Iterator[CitedFinding]:
    for id, title in TITLES.items():
        reported = [one for one in found.faults.values() if one.id == id]
        raised = [traceback for traceback in found.tracebacks if fault(traceback.raised) == id]
        cites = [_cite(one.first, one.last, one.text) for one in reported]
        cites += [_cite(one.first, one.last, one.raised) for one in raised]
        cites.sort(key=lambda cite: cite.first)
        if cites:
            number = f"{len(cites):,} different ones; the first: " if len(cites) > 1 else ""
            yield _finding(id, title, f"{number}{cites[0].text}", tuple(cites[:5]))
    if found.tracebacks:
        last = next((traceback for traceback in reversed(found.tracebacks) if traceback.raised), found.tracebacks[-1])
        which = "The" if len(found.tracebacks) == 1 else f"The last of {len(found.tracebacks):,}"
        ends = f"ends in: {one_line(last.raised)}" if last.raised else "does not end"
        said = f"{which} traceback{'s' if which != 'The' else ''} {ends}"
        cites = [_cite(traceback.first, traceback.last, traceback.raised) for traceback in found.tracebacks[:5]]
        yield _finding("traceback", "Traceback", said, tuple(cites))
    for name, one in found.stated.items():
        stated = one.figures[-1]
        if stated.unit is None and 0 <= stated.value <= 1:
            cites = [_cite(one.first, one.last, one.text)]
            below = below_guessing(stated.task or name.partition(" ")[0], stated.value, 0, name, (), tuple(cites))
            yield from filter(None, [below])


def _finding(id: str, title: str, diagnosis: str, cites: tuple[Excerpt, ...]) -> CitedFinding:
    """Make a warning: that something failed proves no wrong answers."""
    return CitedFinding(
        id=id, title=title, severity="warning", where=f"line {cites[0].first:,}", diagnosis=diagnosis, evidence=(),
        reproduce="", cites=cites,
    )  # fmt: skip


def _cite(first: int, last: int, text: str) -> Excerpt:
    return Excerpt(first=first, last=last, text=one_line(text))
