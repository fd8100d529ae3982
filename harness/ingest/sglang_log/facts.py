"""The facts of a log, counted while it streams by. Only lists of what is rare grow with the log, and those are bounded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from assay.harness.tracebacks import Traceback

KEPT = 10_000
"""Entries that a list of facts keeps; what lies beyond is counted only."""


@dataclass
class CitedLines:
    """Lines that state the same: how many, the first and the last, and the text of the first.

    Attributes:
        first: its number; 0 while there is none.
    """

    count: int = 0
    first: int = 0
    last: int = 0
    text: str = ""

    @classmethod
    def of(cls, number: int, text: str) -> CitedLines:
        """Cite one line."""
        return cls(1, number, number, text)

    def see(self, number: int, text: str) -> None:
        """Count one more."""
        if not self.count:
            self.first, self.text = number, text
        self.count += 1
        self.last = number


@dataclass
class Burst:
    """Requests that were answered with no batch between them.

    Attributes:
        steps: decode steps between the last wave of prefills (4 sequences or more) and the first of these answers, as far as the
            lines of decode batches tell: a multiple of ``decode_log_interval``.
    """

    size: int
    steps: int
    where: CitedLines


@dataclass
class Server:
    """A server, or an offline engine, from the line with its arguments to that of the next one.

    Attributes:
        arguments: as text; empty if the log does not have them.
        whole: whether the list of arguments is complete.
        test: index of the test in which it started, or -1.
        prefix_new: new tokens of prefill batches with 16 cached tokens or more per sequence.
        decode_steps: lines of decode batches × ``decode_log_interval``.
        decode_tokens: the sum of running requests × ``decode_log_interval`` over them.
        facts: numbers from its start, by a stable name: text and where.
    """

    number: int
    line: int
    arguments: dict[str, str]
    whole: bool = True
    test: int = -1
    prefills: CitedLines = field(default_factory=CitedLines)
    sequences: int = 0
    new_tokens: int = 0
    cached_tokens: int = 0
    prefix_batches: CitedLines = field(default_factory=CitedLines)
    prefix_new: int = 0
    decodes: CitedLines = field(default_factory=CitedLines)
    decode_graph: int = 0
    decode_steps: int = 0
    decode_tokens: int = 0
    most_running: int = 0
    throughput: float = 0.0
    answered: CitedLines = field(default_factory=CitedLines)
    refused: CitedLines = field(default_factory=CitedLines)
    bursts: list[Burst] = field(default_factory=list)
    facts: dict[str, tuple[str, CitedLines]] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """Its attention backend; "?" if the log does not state it."""
        return self.arguments.get("attention_backend", "?").strip("'\"")


@dataclass
class Test:
    """A test.

    Attributes:
        outcome: in lower case, as pytest has it; empty while unknown.
        began: the first time in the log after its start, as text.
        ended: the last one.
        seconds: from pytest's table of durations; None if the log has none.
    """

    id: str
    line: int
    outcome: str = ""
    outcome_line: int = 0
    began: str = ""
    ended: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class LogMetric:
    """A number with a name: a ``[METRIC]`` line, or a line such as "Score: 0.125"."""

    name: str
    value: float
    line: int
    text: str
    test: int
    server: int


@dataclass(frozen=True)
class Group:
    """Scores by group, from one line."""

    scores: dict[str, float]
    line: int
    text: str
    test: int


@dataclass
class ProgressBar:
    """A progress bar: how far it came, of how many."""

    label: str
    done: int
    total: int
    line: int
    test: int


@dataclass
class BenchmarkTable:
    """A table of a benchmark.

    Attributes:
        rows: name, value and line.
    """

    title: str
    rows: list[tuple[str, str, int]] = field(default_factory=list)


@dataclass
class Log:
    """All that was read of one log.

    Attributes:
        kinds: pieces of lines by their kind.
        ids: index of a test by its id.
        beyond: tests, servers and metrics that are counted but not listed, since there are more than `KEPT`.
        notices: lines that may matter, by kind and text.
        calls: logged calls of kernels, by function.
        nan_from: results with NaN of calls whose inputs had none, by function.
        loose_outcomes: outcomes that could not be given to one test, since several were open.
        collected: how many tests pytest collected to run, in which line, and that line; of several sessions, the most.
        disordered: times that are earlier than the one before, by more than two seconds.
    """

    lines: int = 0
    read: int = 0
    unread: list[CitedLines] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    ids: dict[str, int] = field(default_factory=dict)
    beyond: Counter[str] = field(default_factory=Counter)
    tests: list[Test] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)
    metrics: list[LogMetric] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    traces: list[tuple[Traceback, int]] = field(default_factory=list)
    bars: dict[tuple[int, str, int], ProgressBar] = field(default_factory=dict)
    blocks: list[BenchmarkTable] = field(default_factory=list)
    commands: list[CitedLines] = field(default_factory=list)
    notices: dict[tuple[str, str], CitedLines] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    nan_from: dict[str, CitedLines] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    loose_outcomes: CitedLines = field(default_factory=CitedLines)
    summary: tuple[str, int] = ("", 0)
    collected: tuple[int, int, str] = (0, 0, "")
    disordered: CitedLines = field(default_factory=CitedLines)
    began: str = ""
    ended: str = ""
    answer_limit: tuple[int, CitedLines] = field(default_factory=lambda: (0, CitedLines()))
