"""The facts of a log, counted while it streams by. Only lists of what is rare grow with the log, and those are bounded.

A long log consists of three kinds of lines, which a server counts itself: prefill batches and decode batches, in the formats of
SGLang's scheduler 0.4.6 to 0.5.23 ("Prefill batch." and "Prefill batch [12]" are older ones), and uvicorn's access log.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from assay.harness.conditions import CACHED_PREFIX_TOKENS
from assay.harness.ingest.result import CitedLines
from assay.harness.tracebacks import Traceback

KEPT = 10_000
"""Entries that a list of facts keeps; what lies beyond is counted only."""
_TAIL = r"(?:, [#\w][\w #()/.-]*: [^\s,:\[\]]+)*(?:, ?)?"
# Prefill batch, #new-seq: 1, #new-token: 41, #cached-token: 77, token usage: 0.00, #running-req: 0, #queue-req: 0,
_PREFILL = re.compile(
    rf"Prefill batch(?: \[\d+\])?[,.] #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+)(?=,){_TAIL}"
)
# Decode batch, #running-req: 18, #token: 3456, token usage: 0.03, cuda graph: True, gen throughput (token/s): 96.49,
_DECODE = re.compile(rf"Decode batch(?: \[\d+\])?[,.] #running-req: (\d+)(?=,){_TAIL}")
_THROUGHPUT = re.compile(r"gen throughput \(token/s\): ([\d.]+)(?=,|$)")
# INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK
_REQUEST = re.compile(
    r'INFO: +[\w.:-]+ - "(?:(POST /(?:v1/chat/completions|v1/completions|generate))|[A-Z]+ \S+?)(?:\?\S*)? HTTP/[\d.]+" (\d{3})'
    r"(?: [A-Za-z -]+)?"
)
"""Group 1: a request for an answer."""
_WAVE = 4
"""Sequences in a batch, or answers with none between them, that make a wave."""
_INTERVAL = 40
"""SGLang's default of ``decode_log_interval``."""


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
    _wave: int = 0
    _burst: CitedLines = field(default_factory=CitedLines)

    @property
    def backend(self) -> str:
        """Its attention backend; "?" if the log does not state it."""
        return self.arguments.get("attention_backend", "?").strip("'\"")

    @property
    def _interval(self) -> int:
        given = self.arguments.get("decode_log_interval", "")
        return int(given) if given.isdecimal() else _INTERVAL

    def prefill(self, number: int, text: str) -> bool:
        """Read a prefill batch; False if the line is not one."""
        match = _PREFILL.fullmatch(text)
        if not match:
            return False
        self.close()
        sequences, new, cached = map(int, match.groups())
        self.prefills.see(number, text)
        self.sequences += sequences
        self.new_tokens += new
        self.cached_tokens += cached
        if sequences and cached >= CACHED_PREFIX_TOKENS * sequences:
            self.prefix_batches.see(number, text)
        if sequences >= _WAVE:
            self._wave = self.decode_steps
        return True

    def decode(self, number: int, text: str) -> bool:
        """Read a decode batch; False if the line is not one."""
        match = _DECODE.fullmatch(text)
        if not match:
            return False
        if self._burst.count:
            self.close()
        running = int(match[1])
        self.decodes.see(number, text)
        self.decode_graph += "graph: True" in text
        self.decode_steps += self._interval
        self.decode_tokens += running * self._interval
        rate = _THROUGHPUT.search(text)
        if rate:
            self.throughput = max(self.throughput, float(rate[1]))
        return True

    def request(self, number: int, text: str) -> bool:
        """Read a line of the access log; False if the line is not one."""
        match = _REQUEST.fullmatch(text)
        if not match:
            return False
        if match[1]:
            if match[2] == "200":
                self.answered.see(number, text)
                self._burst.see(number, text)
            else:
                self.refused.see(number, text)
        return True

    def close(self) -> None:
        """End a burst of answers: a batch followed it, or the log ends."""
        burst, self._burst = self._burst, CitedLines()
        if burst.count >= _WAVE and len(self.bursts) < KEPT:
            self.bursts.append((burst, self.decode_steps - self._wave))


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
_COMPILED = {kind: tuple((name, re.compile(p)) for name, p in rows) for kind, rows in _START_UP.items()}


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
        if len(log.metrics) < KEPT:
            log.metrics.append(LogMetric(match["name"], float(match["value"]), number, text, test))
        else:
            log.beyond["metrics"] += 1
        return kind
    if text.startswith("{'"):
        return _read_scores(log, number, text, test)
    limit = _LIMIT.match(text)
    if limit:
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
    if len(log.groups) < KEPT:
        log.groups.append((scores, CitedLines.of(number, text), test))
    return "scores"


def read_start_up(kind: str, number: int, message: str, server: Server) -> None:
    """Add what a server reports while it starts to its facts."""
    for name, pattern in _COMPILED.get(kind, ()):
        match = pattern.search(message)
        if match:
            server.facts[name] = (match[1], CitedLines.of(number, message))
