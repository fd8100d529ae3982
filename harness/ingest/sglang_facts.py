"""The facts in a log, counted while the log streams by. Only lists of rare lines grow with the log, and they are bounded."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from assay.harness.conditions import CACHED_PREFIX_TOKENS
from assay.harness.ingest.lm_eval import PrintedTables
from assay.harness.ingest.result import CitedLines
from assay.harness.tracebacks import Traceback

# Most distinct notices kept. Even a long log has few, unless every notice has a different text.
_KEPT = 10_000
# Fewest sequences in a batch, or answers without a batch between them, that count as a wave.
_WAVE = 4
# SGLang's default ``decode_log_interval``.
_INTERVAL = 40


@dataclass
class Server:
    """A server, or an offline engine, from the line with its arguments to the next such line.

    Attributes:
        arguments: the arguments as text, or empty if the log does not have them.
        test: index of the test in which it started, or -1.
        decode_steps: lines of decode batches x ``decode_log_interval``.
        decode_tokens: the sum of running requests x ``decode_log_interval`` over these lines.
        bursts: requests answered with no batch between them, and the decode steps from the last wave of prefills (4 sequences or
            more) to the first of these answers. Lines of decode batches give the steps, so they are a multiple of
            ``decode_log_interval``.
        graph_batches: the batch sizes of its CUDA graphs, as text, or empty.
        graph_memory: the memory of these graphs, as text with a unit, or empty, and the line that states it.
    """

    number: int
    line: int
    arguments: dict[str, str]
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
    answered: CitedLines = field(default_factory=CitedLines)
    refused: CitedLines = field(default_factory=CitedLines)
    bursts: list[tuple[CitedLines, int]] = field(default_factory=list)
    graph_batches: str = ""
    graph_memory: tuple[str, CitedLines] = ("", CitedLines())
    _wave: int = 0
    _burst: CitedLines = field(default_factory=CitedLines)

    @property
    def backend(self) -> str:
        """Its attention backend, or "?" if the log does not state it."""
        return self.arguments.get("attention_backend", "?").strip("'\"")

    def prefill(self, number: int, text: str, sequences: int, new: int, cached: int) -> None:
        """Count a prefill batch, and remember where a wave of requests began."""
        self.close()
        self.prefills.see(number, text)
        self.sequences += sequences
        self.new_tokens += new
        self.cached_tokens += cached
        if sequences and cached >= CACHED_PREFIX_TOKENS * sequences:
            self.prefix_batches.see(number, text)
        if sequences >= _WAVE:
            self._wave = self.decode_steps

    def decode(self, number: int, text: str, running: int) -> None:
        """Count the decode batches that a line stands for."""
        given = self.arguments.get("decode_log_interval", "")
        interval = int(given) if given.isdecimal() else _INTERVAL
        self.close()
        self.decodes.see(number, text)
        self.decode_graph += "graph: True" in text
        self.decode_steps += interval
        self.decode_tokens += running * interval

    def request(self, number: int, text: str, status: str) -> None:
        """Count a request for an answer, by its HTTP status."""
        if status == "200":
            self.answered.see(number, text)
            self._burst.see(number, text)
        else:
            self.refused.see(number, text)

    def close(self) -> None:
        """End a burst of answers: a batch followed it, or the log ends."""
        if self._burst.count >= _WAVE:
            self.bursts.append((self._burst, self.decode_steps - self._wave))
        self._burst = CitedLines()


@dataclass
class Test:
    """A test, and its outcome in lower case, which is empty while unknown."""

    id: str
    line: int
    outcome: str = ""
    outcome_line: int = 0


@dataclass(frozen=True)
class LogMetric:
    """A named number: a ``[METRIC]`` line, or a line such as "Score: 0.125" or "Output token throughput (tok/s): 96.49"."""

    name: str
    value: float
    at: CitedLines
    test: int


@dataclass
class Log:
    """All facts read from a log.

    Attributes:
        ids: index of each test by its id.
        groups: the scores by group in a line, the line, and the test.
        bars: a progress bar's last value and its line, by test, label and total.
        unread: lines that begin like a line with a fact, but that cannot be read.
        notices: lines that matter by themselves, by kind and text.
        of_sglang: number of lines that SGLang logged.
        of_vllm: number of pieces of lines that vLLM logged.
        printed: tables of scores that lm-eval printed.
        disordered: lines whose time is more than two seconds earlier than the one before.
    """

    lines: int = 0
    read: int = 0
    unread: list[CitedLines] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    tests: list[Test] = field(default_factory=list)
    servers: list[Server] = field(default_factory=list)
    metrics: list[LogMetric] = field(default_factory=list)
    groups: list[tuple[dict[str, float], CitedLines, int]] = field(default_factory=list)
    traces: list[tuple[Traceback, int]] = field(default_factory=list)
    bars: dict[tuple[int, str, int], tuple[int, int]] = field(default_factory=dict)
    notices: dict[tuple[str, str], CitedLines] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    summary: tuple[str, int] = ("", 0)
    disordered: CitedLines = field(default_factory=CitedLines)
    of_sglang: int = 0
    of_vllm: int = 0
    printed: PrintedTables = field(default_factory=PrintedTables)
    answer_limit: tuple[int, CitedLines] = field(default_factory=lambda: (0, CitedLines()))

    def name_of(self, test: int, outside: str = "the log") -> str:
        """Return the name of a test by its index. The index -1 stands for lines outside all tests."""
        return self.tests[test].id.rpartition("::")[2] if test >= 0 else outside

    def failed(self, test: int) -> bool:
        """Return True if a test failed."""
        return test >= 0 and self.tests[test].outcome in ("failed", "error")

    def note(self, kind: str, number: int, text: str) -> None:
        """Count a line that may matter."""
        key = (kind, text[:200])
        if key in self.notices or len(self.notices) < _KEPT:
            self.notices.setdefault(key, CitedLines()).see(number, text)


_TOKENS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[()\[\]{},]|[^'"()\[\]{},]+|['"]""")
# attention_backend='triton'    or    'attention_backend': 'triton'
_NAME = re.compile(r"""\s*(?:(\w+)=|'(\w+)':\s)""")
PER_SERVER = frozenset({"random_seed", "port", "nccl_port", "dist_init_addr", "mem_fraction_static", "host"})
"""Arguments that differ between any two servers: random ones, ones that depend on free memory, and addresses."""


def parse_arguments(text: str) -> tuple[dict[str, str], bool]:
    """Split a list of arguments at its top-level commas.

    Args:
        text: the text after the opening bracket.

    Returns:
        The values as written, by name, and whether the list is complete. A truncated value is left out.
    """
    arguments: dict[str, str] = {}
    start = depth = 0
    for token in _TOKENS.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth < 0 or (token[0] == "," and not depth):
            if named := _NAME.match(text[start : token.start()]):
                arguments[named[1] or named[2]] = text[start + named.end() : token.start()].strip()
            start = token.end()
        if depth < 0:
            return arguments, not text[start:].strip()
    return arguments, False


def differing_arguments(servers: list[dict[str, str]]) -> list[tuple[str, tuple[str, ...]]]:
    """List the arguments that differ between servers, except `PER_SERVER`: the name, and each server's value or "not stated"."""
    names = dict.fromkeys(name for server in servers for name in server if name not in PER_SERVER)
    rows = [(name, tuple(server.get(name, "not stated") for server in servers)) for name in names]
    return [(name, values) for name, values in rows if any(a != b for a, b in pairwise(values))]
