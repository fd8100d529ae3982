"""The facts of a log, counted while it streams by. Only lists of what is rare grow with the log, and those are bounded.

A long log consists of three kinds of lines, which a server counts itself: prefill batches and decode batches, in the formats of
SGLang's scheduler 0.4.6 to 0.5.23 ("Prefill batch." and "Prefill batch [12]" are older ones), and uvicorn's access log.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from assay.harness.conditions import CACHED_PREFIX_TOKENS
from assay.harness.ingest.result import CitedLines
from assay.harness.tracebacks import Traceback

T = TypeVar("T")
KEPT = 10_000
"""Entries that a list of facts keeps: a log of any length takes bounded memory."""
_TAIL = r"(?:, [#\w][\w #()/.-]*: [^\s,:\[\]]+)*(?:, ?)?"
# Prefill batch, #new-seq: 1, #new-token: 41, #cached-token: 77, token usage: 0.00, #running-req: 0, #queue-req: 0,
_PREFILL = re.compile(
    rf"Prefill batch(?: \[\d+\])?[,.] #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+)(?=,){_TAIL}"
)
# Decode batch, #running-req: 18, #token: 3456, token usage: 0.03, cuda graph: True, gen throughput (token/s): 96.49,
_DECODE = re.compile(rf"Decode batch(?: \[\d+\])?[,.] #running-req: (\d+)(?=,){_TAIL}")
_THROUGHPUT = re.compile(r"gen throughput \(token/s\): ([\d.]+)(?=,|$)")
# INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK
# Group 1: a request for an answer.
_REQUEST = re.compile(
    r'INFO: +[\w.:-]+ - "(?:(POST /(?:v1/chat/completions|v1/completions|generate))|[A-Z]+ \S+?)(?:\?\S*)? HTTP/[\d.]+" (\d{3})'
    r"(?: [A-Za-z -]+)?"
)
# Sequences in a batch, or answers with none between them, that make a wave.
_WAVE = 4
# SGLang's default of ``decode_log_interval``.
_INTERVAL = 40


class _Kept(list[T]):
    """A list that takes at most `KEPT` entries."""

    def append(self, item: T, /) -> None:
        """Add an entry, unless the list is full."""
        if len(self) < KEPT:
            super().append(item)


@dataclass
class Server:
    """A server, or an offline engine, from the line with its arguments to that of the next one.

    Attributes:
        arguments: as text; empty if the log does not have them.
        whole: whether the list of arguments is complete.
        test: index of the test in which it started, or -1.
        decode_steps: lines of decode batches x ``decode_log_interval``.
        decode_tokens: the sum of running requests x ``decode_log_interval`` over them.
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
    bursts: _Kept[tuple[CitedLines, int]] = field(default_factory=_Kept)
    facts: dict[str, tuple[str, CitedLines]] = field(default_factory=dict)
    _wave: int = 0
    _burst: CitedLines = field(default_factory=CitedLines)

    @property
    def backend(self) -> str:
        """Its attention backend; "?" if the log does not state it."""
        return self.arguments.get("attention_backend", "?").strip("'\"")

    def count(self, number: int, text: str) -> str:
        """Count a batch or a request. Returns the kind of the line; empty if it is neither."""
        if match := _PREFILL.fullmatch(text):
            self._prefill(number, text, *map(int, match.groups()))
            return "prefill"
        if match := _DECODE.fullmatch(text):
            self._decode(number, text, int(match[1]))
            return "decode"
        if match := _REQUEST.fullmatch(text):
            if match[1] and match[2] == "200":
                self.answered.see(number, text)
                self._burst.see(number, text)
            elif match[1]:
                self.refused.see(number, text)
            return "request"
        return ""

    def _prefill(self, number: int, text: str, sequences: int, new: int, cached: int) -> None:
        self.close()
        self.prefills.see(number, text)
        self.sequences += sequences
        self.new_tokens += new
        self.cached_tokens += cached
        if sequences and cached >= CACHED_PREFIX_TOKENS * sequences:
            self.prefix_batches.see(number, text)
        if sequences >= _WAVE:
            self._wave = self.decode_steps

    def _decode(self, number: int, text: str, running: int) -> None:
        given = self.arguments.get("decode_log_interval", "")
        interval = int(given) if given.isdecimal() else _INTERVAL
        self.close()
        self.decodes.see(number, text)
        self.decode_graph += "graph: True" in text
        self.decode_steps += interval
        self.decode_tokens += running * interval
        if rate := _THROUGHPUT.search(text):
            self.throughput = max(self.throughput, float(rate[1]))

    def close(self) -> None:
        """End a burst of answers: a batch followed it, or the log ends."""
        if self._burst.count >= _WAVE:
            self.bursts.append((self._burst, self.decode_steps - self._wave))
        self._burst = CitedLines()


@dataclass
class Test:
    """A test: outcome in lower case (empty while unknown), first and last time in the log, seconds by pytest's own table."""

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
    unread: _Kept[CitedLines] = field(default_factory=_Kept)
    kinds: Counter[str] = field(default_factory=Counter)
    ids: dict[str, int] = field(default_factory=dict)
    tests: _Kept[Test] = field(default_factory=_Kept)
    servers: _Kept[Server] = field(default_factory=_Kept)
    metrics: _Kept[LogMetric] = field(default_factory=_Kept)
    groups: _Kept[tuple[dict[str, float], CitedLines, int]] = field(default_factory=_Kept)
    traces: _Kept[tuple[Traceback, int]] = field(default_factory=_Kept)
    bars: dict[tuple[int, str, int], tuple[int, int]] = field(default_factory=dict)
    blocks: _Kept[tuple[str, list[tuple[str, str, int]]]] = field(default_factory=_Kept)
    commands: _Kept[CitedLines] = field(default_factory=_Kept)
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

    def note(self, kind: str, number: int, text: str) -> None:
        """Count a line that may matter; nothing if `kind` is empty."""
        key = (kind, text[:200])
        if kind and (key in self.notices or len(self.notices) < KEPT):
            self.notices.setdefault(key, CitedLines()).see(number, text)


_TOKENS = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[()\[\]{},]|[^'"()\[\]{},]+|['"]""")
_NAME = re.compile(r"""\s*(?:(\w+)=|'(\w+)':\s)""")
PER_SERVER = frozenset({"random_seed", "port", "nccl_port", "dist_init_addr", "mem_fraction_static", "host"})
"""Arguments that differ between any two servers: chosen at random, by the machine's free memory, or to be out of the way."""


def parse_arguments(text: str) -> tuple[dict[str, str], bool]:
    """Split a list of arguments at its top-level commas.

    Args:
        text: from behind the opening bracket on.

    Returns:
        Values as they are written, by name, and whether the list ends. A value that is cut off is left out.
    """
    arguments: dict[str, str] = {}
    start = 0
    while (end := _end(text, start)) >= 0:
        if named := _NAME.match(text[start:end]):
            arguments[named[1] or named[2]] = text[start + named.end() : end].strip()
        start = end + 1
        if text[end] != ",":
            return arguments, not text[start:].strip()
    return arguments, False


def _end(text: str, start: int) -> int:
    """Find where an argument ends: at a comma, or at the bracket that closes the list; -1 if it is cut off."""
    depth = 0
    for match in _TOKENS.finditer(text, start):
        token = match.group()
        if token in "([{":
            depth += 1
        elif token == "," and not depth:
            return match.start()
        elif token in ")]}":
            depth -= 1
            if depth < 0:
                return match.start()
    return -1


def differing_arguments(servers: list[dict[str, str]]) -> list[tuple[str, tuple[str, ...]]]:
    """List the arguments that differ between servers, without `PER_SERVER`: the name, and each server's value, or "not stated"."""
    names = dict.fromkeys(name for server in servers for name in server if name not in PER_SERVER)
    rows = [(name, tuple(server.get(name, "not stated") for server in servers)) for name in names]
    return [(name, values) for name, values in rows if any(a != b for a, b in pairwise(values))]


_NUMBER = r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
# [METRIC] mmlu_score=0.125 labels={"model": "meta-llama/Llama-3.1-8B-Instruct", "eval": "mmlu"}
_METRIC = re.compile(rf"\[METRIC\] (?P<name>[\w./-]+)=(?P<value>{_NUMBER}|nan|inf)(?: labels=\{{.*\}})?")
# output_throughput=97.5
_PRINTED = re.compile(rf"(?P<name>[a-z]\w*)=(?P<value>{_NUMBER})")
# Total latency: 64.467 s
_LABELLED = re.compile(
    r"(?P<name>Total latency|Score|Accuracy|Invalid|Latency|Output throughput|acc_length|speed): "
    rf"(?P<value>{_NUMBER})(?: ?(?:s|token/s|%))?"
)
# {'other': np.float64(0.1875), 'other:std': np.float64(0.39), 'score': np.float64(0.125)}
_SCORES = re.compile(rf"'(?P<name>[^']{{1,80}})': (?:np\.\w+\()?(?P<value>{_NUMBER}|nan)\)?(?:, |\}}$)")
# AssertionError: np.float64(0.125) not greater than or equal to 0.6
_ASSERTED = re.compile(
    rf"(?<![\d.])(?P<value>(?:np\.\w+\()?{_NUMBER}\)?) not (?P<than>(?:greater|less) than(?: or equal to)?) (?P<bound>{_NUMBER})"
)
# AssertionError: assert 0.125 >= 0.6
_COMPARED = re.compile(rf"assert (?P<value>(?:np\.\w+\()?{_NUMBER}\)?) (?P<than>>=?|<=?) (?P<bound>{_NUMBER})")
_THAN = {">": "greater than", ">=": "greater than or equal to", "<": "less than", "<=": "less than or equal to"}
# ChatCompletionSampler initialized with self.system_message=None self.temperature=0.0 self.max_tokens=2048 ...
_LIMIT = re.compile(r"ChatCompletionSampler .*self\.max_tokens=(\d+)(?: |$)")
_START_UP = {
    "weights-end": (("model", r"type=(\w+)"), ("dtype", r"dtype=([\w.]+)"), ("weights", r"mem usage=([\d.]+ GB)")),
    "kv-cache": (("KV tokens", r"#tokens: (\d+)"),),
    "graph-sizes": (("graph batches", r"(\[.*\])"),),
    "graph-end": (("graph seconds", r"elapsed[:=] ?([\d.]+) s"), ("graph memory", r"mem usage=([\d.]+ GB)")),
    "sizes": (("free memory", r"available_\w+_mem=([\d.]+ GB)"),),
}


def asserted(exception: str) -> tuple[float, str, float] | None:
    """Parse a failed comparison of unittest or pytest: the value, the comparison in unittest's words, and the bound."""
    match = _ASSERTED.search(exception) or _COMPARED.search(exception)
    if not match:
        return None
    value = float(re.sub(r"np\.\w+\(|\)", "", match["value"]))
    return value, _THAN.get(match["than"], match["than"]), float(match["bound"])


def read_number(log: Log, number: int, text: str, test: int) -> str:
    """Add what a line without a time states to a log. Returns its kind; empty if it states no number."""
    match = _METRIC.fullmatch(text) if text[:1] == "[" else None
    kind = "metric"
    if not match:
        match, kind = _LABELLED.fullmatch(text) or _PRINTED.fullmatch(text), "number"
    if match:
        log.metrics.append(LogMetric(match["name"], float(match["value"]), number, text, test))
        return kind
    if text.startswith("{'"):
        return _read_scores(log, number, text, test)
    if limit := _LIMIT.match(text):
        log.answer_limit = (int(limit[1]), CitedLines.of(number, text))
    return ""


def _read_scores(log: Log, number: int, text: str, test: int) -> str:
    scores, at = {}, 1
    for match in _SCORES.finditer(text, 1):
        if match.start() != at:
            return ""
        scores[match["name"]] = float(match["value"])
        at = match.end()
    if at != len(text):
        return ""
    log.groups.append((scores, CitedLines.of(number, text), test))
    return "scores"


def read_start_up(kind: str, number: int, message: str, server: Server) -> None:
    """Add what a server reports while it starts to its facts."""
    for name, pattern in _START_UP.get(kind, ()):
        if match := re.search(pattern, message):
            server.facts[name] = (match[1], CitedLines.of(number, message))
