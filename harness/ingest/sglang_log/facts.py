"""The facts of a log, counted while it streams by. Only lists of what is rare grow with the log, and those are bounded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from assay.harness.ingest.result import CitedLines
from assay.harness.tracebacks import Traceback

KEPT = 10_000
"""Entries that a list of facts keeps; what lies beyond is counted only."""


@dataclass
class Server:
    """A server, or an offline engine, from the line with its arguments to that of the next one.

    Attributes:
        arguments: as text; empty if the log does not have them.
        whole: whether the list of arguments is complete.
        test: index of the test in which it started, or -1.
        decode_steps: lines of decode batches × ``decode_log_interval``.
        decode_tokens: the sum of running requests × ``decode_log_interval`` over them.
        bursts: requests that were answered with no batch between them, and the decode steps between the last wave of prefills
            (4 sequences or more) and the first of these answers, as far as the lines of decode batches tell: a multiple of
            ``decode_log_interval``.
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
    decodes: CitedLines = field(default_factory=CitedLines)
    decode_graph: int = 0
    decode_steps: int = 0
    decode_tokens: int = 0
    throughput: float = 0.0
    answered: CitedLines = field(default_factory=CitedLines)
    refused: CitedLines = field(default_factory=CitedLines)
    bursts: list[tuple[CitedLines, int]] = field(default_factory=list)
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


@dataclass
class Log:
    """All that was read of one log.

    Attributes:
        kinds: pieces of lines by their kind.
        ids: index of a test by its id.
        beyond: tests, servers and metrics that are counted but not listed, since there are more than `KEPT`.
        groups: scores by group, from one line, and the test.
        bars: how far a progress bar came and in which line, by test, label and total.
        blocks: tables of benchmarks: the title, and of each row name, value and line.
        notices: lines that may matter, by kind and text.
        calls: logged calls of kernels, by function.
        nan_from: results with NaN of calls whose inputs had none, by function.
        loose_outcomes: outcomes that could not be given to one test, since several were open.
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
    groups: list[tuple[dict[str, float], CitedLines, int]] = field(default_factory=list)
    traces: list[tuple[Traceback, int]] = field(default_factory=list)
    bars: dict[tuple[int, str, int], tuple[int, int]] = field(default_factory=dict)
    blocks: list[tuple[str, list[tuple[str, str, int]]]] = field(default_factory=list)
    commands: list[CitedLines] = field(default_factory=list)
    notices: dict[tuple[str, str], CitedLines] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    nan_from: dict[str, CitedLines] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    loose_outcomes: CitedLines = field(default_factory=CitedLines)
    summary: tuple[str, int] = ("", 0)
    disordered: CitedLines = field(default_factory=CitedLines)
    began: str = ""
    ended: str = ""
    answer_limit: tuple[int, CitedLines] = field(default_factory=lambda: (0, CitedLines()))
