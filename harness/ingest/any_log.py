"""The generic reader: faults, scores, times and rates with their lines, and how many lines state nothing that it knows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from assay.harness.ingest.guessing import below_guessing
from assay.harness.ingest.quantity import UNIT, Unit, quantity, unit_of
from assay.harness.ingest.result import (
    CitedFinding,
    CitedLines,
    Excerpt,
    Fact,
    FactTable,
    FileDocument,
    FileRead,
    FormatReader,
    Statement,
)
from assay.harness.ingest.source_file import SourceFile
from assay.harness.text import one_line
from assay.harness.tracebacks import Traceback, Tracebacks

_LONGEST = 2_000
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


class _Figure(NamedTuple):
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


def _figures(text: str) -> Iterator[_Figure]:
    """Yield the scores, times and rates that a line of prose or ``name: value`` states."""
    text = " ".join(text[:_LONGEST].replace("\t", "  ").replace("  ", " \N{SYMBOL FOR SPACE} ").split())
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


def _figure(match: re.Match[str], own: str, label: str, given: str) -> _Figure | None:
    """Make the figure of a number: `own` is its name, `label` the line's last name, `given` its unit in parentheses."""
    unit, value = unit_of(match["unit"] or given), float(match["number"].replace(",", ""))
    name = " ".join(filter(None, [match["of"], own or label])) + (
        f" per {match['per']}" if match["per"] and not own else ""
    )
    written = match.group().strip() + (f" {given}" if given else "")
    if unit is not None and (unit.kind != "time" or _TIME.search(name.lower())):
        name = name or "throughput"
        return _Figure(name if own or match["of"] or match["per"] else f"{name}, rate", value, written, unit)
    if not own or unit is not None:
        return None
    if _TIME.search(own.lower()) and not match["percent"]:
        return _Figure(own, value, written, quantity(own)[1])
    return (
        _Figure(own, value / 100 if match["percent"] else value, written, None) if _SCORE.search(own.lower()) else None
    )


class _Tables:
    """Tables of Markdown, a line at a time: lm-eval's scores, llama-bench's rates."""

    def __init__(self) -> None:
        self._before: tuple[str, ...] = ()
        self._columns: tuple[str, ...] = ()
        self._above: list[str] = []

    def row(self, text: str) -> tuple[_Figure, ...] | None:
        """Return the figures in a line of a table, which may be none; None if the line belongs to no table."""
        text = text[:_LONGEST].strip()
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

    def _stated(self, row: Sequence[str], cells: Sequence[str]) -> Iterable[_Figure]:
        named = {column.lower(): cell for column, cell in zip(self._columns, row, strict=True)}
        task = next((named[name].lstrip("- ") for name in ("task", "tasks", "groups", "test") if named.get(name)), "")
        what = " ".join(filter(None, (task, named.get("metric", ""))))
        for column, cell in zip(self._columns, cells, strict=True):
            number = _NUMBER.match(cell)
            unit = unit_of(column)
            if number and what and (unit or column.lower() in ("value", "score", "accuracy")):
                written = f"{number['number']} {column}" if unit else number["number"]
                yield _Figure(what, float(number["number"].replace(",", "")), written, unit, task)


KEPT = 10_000
"""Different figures, faults and tracebacks that are kept; what lies beyond is counted as read only."""
_SHOWN = 50
"""Most rows of a table and most facts of one kind."""
_TITLES = {
    "cuda-error": "CUDA error",
    "out-of-memory": "Out of memory",
    "nccl-error": "NCCL error",
    "crash": "Crash",
    "not-a-number": "NaN or infinity",
    "error": "Error",
}
"""Faults by id, the most telling first: a line counts as the first that it is."""
_FAULTS = (
    ("out-of-memory", r"out of memory|outofmemory|oom[- ]kill|cannot allocate memory|std::bad_alloc|cuda_error_out_of_memory"),
    ("cuda-error", r"cuda (?:runtime |driver )?error|cuda_error_|cublas_status_(?!success)|cudnn_status_(?!success)"
                   r"|device-side assert|illegal memory access|unspecified launch failure|hip error"),
    ("nccl-error", r"nccl ?error|nccl warn|nccl(?:internal|system|unhandled\w{0,10}|remote)error|nccl.{0,60}timed? ?out"),
    ("crash", r"segmentation fault|core dumped|bus error|\bsig(?:segv|abrt|bus|ill)\b|fatal python error|terminate called"
              r"|illegal instruction|ggml_assert|assert(?:ion)?.{0,120} failed|assertion failed"),
    ("not-a-number", r"\b(?:nans?|infs?)\b.{0,40}\b(?:detected|found|logits?|logprobs?)\b"
                     r"|\b(?:detected|found|contains?|has|have)\b.{0,20}\b(?:nans?|infs?)\b"),
)  # fmt: skip
_COMPILED = tuple((id, re.compile(pattern)) for id, pattern in _FAULTS)
_LEVEL = re.compile(r"(?:ERROR|FATAL|CRITICAL)\b|\[E\] |error: |fatal: |E\d{4} \d\d:")
_LEVEL_WITHIN = re.compile(r"[\[( |:](?:ERROR|FATAL|CRITICAL)[\]) |:]|\[E\] ")
_PREFIX = 100
"""Characters before a level: a time, a process, a file."""
_DIGIT = re.compile(r"\d")


def _recognises(source: SourceFile) -> bool:
    """Return True if the source is text and one of its lines states something."""
    if source.path.is_dir() or not source.head or "\0" in source.head_text:
        return False
    text = _Statements()
    return any(text.line(number, line) for number, line in source.lines())


def _read(source: SourceFile) -> FileDocument:
    """Read all of it, a line at a time."""
    text = _Statements.of(source)
    notes = (
        *source.encoding_notes(),
        "only errors, tracebacks, scores, times and rates were looked for: what the other lines state is not known",
    )
    table = _table(text)
    return FileDocument(
        file=FileRead.of(source, "text", "Text of an unknown program", text.read, text.lines - text.read, notes=notes),
        facts=tuple(_facts(text)), tables=(table,) if table.rows else (), findings=tuple(_findings(text)),
    )  # fmt: skip


def _statements(source: SourceFile) -> Iterable[Statement]:
    """Yield each figure that is stated once; of one that is repeated, the lowest, the highest and the last."""
    for name, (figures_, lines) in _Statements.of(source).stated.items():
        where, first = f"{source.path}:{lines.first}", figures_[0]
        if len(figures_) == 1:
            yield Statement("number", first.names, first.value, where, one_line(lines.text), first.unit)
            continue
        by_value = sorted(figures_, key=lambda figure: figure.value)
        for which, figure in (("lowest", by_value[0]), ("highest", by_value[-1]), ("last", figures_[-1])):
            names = tuple(f"{which} {known}" for known in figure.names)
            yield Statement("number", names, figure.value, where, f"{name}: {figure.written}", figure.unit)


class _Statements:
    """The statements of a text, line by line.

    Attributes:
        stated: each time that the text states a figure, by its name, and the lines.
        faults: lines that report the same fault, by its id and their text without numbers.
    """

    def __init__(self) -> None:
        self.lines = self.read = 0
        self.stated: dict[str, tuple[list[_Figure], CitedLines]] = {}
        self.faults: dict[tuple[str, str], CitedLines] = {}
        self.tracebacks: list[Traceback] = []
        self._tables, self._open = _Tables(), Tracebacks(self._keep)

    @classmethod
    def of(cls, source: SourceFile) -> _Statements:
        """Read all lines."""
        text = cls()
        for number, line in source.lines():
            text.line(number, line)
        text._open.end()
        return text

    def line(self, number: int, text: str) -> bool:
        """Read a line; return True if it states anything."""
        self.lines += 1
        within = self._open.line(number, text[:_LONGEST])
        row = self._tables.row(text)
        stated = list(_figures(text) if row is None else row)
        for figure in stated:
            self._state(figure, number, text)
        understood = within or bool(stated) or row is not None
        id = "" if understood else _fault(text)
        if id:
            self._report(id, number, text)
        self.read += understood or bool(id)
        return understood or bool(id)

    def _keep(self, ended: Traceback) -> None:
        if len(self.tracebacks) < KEPT:
            self.tracebacks.append(ended)

    def _state(self, figure: _Figure, number: int, text: str) -> None:
        if figure.name not in self.stated and len(self.stated) >= KEPT:
            return
        known, lines = self.stated.setdefault(figure.name, ([], CitedLines()))
        if len(known) < KEPT:
            known.append(figure)
        lines.see(number, text[:_LONGEST])

    def _report(self, id: str, number: int, text: str) -> None:
        key = (id, _message(text))
        if key in self.faults or len(self.faults) < KEPT:
            self.faults.setdefault(key, CitedLines()).see(number, text[:_LONGEST])


def _facts(text: _Statements) -> Iterator[Fact]:
    for traceback in text.tracebacks[:_SHOWN]:
        said = one_line(traceback.exception or "a traceback that does not end") + _innermost(traceback)
        yield Fact(id="traceback", title="Traceback", text=said, cites=(_cite(traceback.first, traceback.last, said),))
    for (id, _), lines in list(text.faults.items())[:_SHOWN]:
        times = f"{lines.count}×: " if lines.count > 1 else ""
        yield Fact(id=id, title=_TITLES[id], text=times + one_line(lines.text), cites=(lines.excerpt,))


def _innermost(traceback: Traceback) -> str:
    if not traceback.frames:
        return ""
    file, line, name = traceback.frames[-1]
    return f" ({file}:{line}{name and ' in '}{name})"


def _table(text: _Statements) -> FactTable:
    rows = []
    for name, (statements, lines) in list(text.stated.items())[:_SHOWN]:
        values = [figure.value for figure in statements]
        low, high = (statements[values.index(extreme)].written for extreme in (min(values), max(values)))
        where = str(lines.first) if lines.first == lines.last else f"{lines.first}–{lines.last}"
        spread = (low, high) if len(values) > 1 else ("", "")
        rows.append((name, statements[-1].written, *spread, f"{len(values):,}", where))
    columns = ("figure", "value (the last)", "lowest", "highest", "times", "lines")
    return FactTable(id="figures", title="Scores, times and rates", columns=columns, rows=tuple(rows))


def _findings(text: _Statements) -> Iterator[CitedFinding]:
    for id, title in _TITLES.items():
        cites = [lines.excerpt for (of, _), lines in text.faults.items() if of == id]
        cites += [
            _cite(traceback.first, traceback.last, traceback.exception)
            for traceback in text.tracebacks
            if _fault(traceback.exception) == id
        ]
        cites.sort(key=lambda cite: cite.first)
        if cites:
            number = f"{len(cites):,} different ones; the first: " if len(cites) > 1 else ""
            yield _finding(id, title, f"{number}{cites[0].text}", tuple(cites[:5]))
    yield from _of_tracebacks(text.tracebacks)
    for name, (statements, lines) in text.stated.items():
        stated = statements[-1]
        if stated.unit is None and 0 <= stated.value <= 1:
            cite = lines.excerpt
            task = stated.task or name.partition(" ")[0]
            yield from filter(None, [below_guessing(task, stated.value, 0, name, (), (cite,))])


def _of_tracebacks(tracebacks: Sequence[Traceback]) -> Iterator[CitedFinding]:
    if not tracebacks:
        return
    last = next((traceback for traceback in reversed(tracebacks) if traceback.exception), tracebacks[-1])
    which = f"The last of {len(tracebacks):,} tracebacks" if len(tracebacks) > 1 else "The traceback"
    ends = f"ends in: {one_line(last.exception)}" if last.exception else "does not end"
    cites = tuple(_cite(traceback.first, traceback.last, traceback.exception) for traceback in tracebacks[:5])
    yield _finding("traceback", "Traceback", f"{which} {ends}", cites)


def _finding(id: str, title: str, diagnosis: str, cites: tuple[Excerpt, ...]) -> CitedFinding:
    """Make a warning: that something failed proves no wrong answers."""
    return CitedFinding(
        id=id, title=title, severity="warning", where=f"line {cites[0].first:,}", diagnosis=diagnosis, evidence=(),
        reproduce="", cites=cites,
    )  # fmt: skip


def _cite(first: int, last: int, text: str) -> Excerpt:
    return Excerpt(first=first, last=last, text=one_line(text))


def _fault(text: str) -> str:
    """Return the id of the fault that a line reports; empty if it reports none."""
    text = text[:_LONGEST]
    lower = text.lower()
    for id, pattern in _COMPILED:
        if pattern.search(lower):
            return id
    return "error" if _LEVEL.match(text) or _LEVEL_WITHIN.search(text, 0, _PREFIX) else ""


def _message(text: str) -> str:
    """Strip a line of its numbers: what two lines that report the same share."""
    return _DIGIT.sub("0", text[:_LONGEST])


READER = FormatReader("text", "Text of an unknown program", _recognises, _read, _statements)
