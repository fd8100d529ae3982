"""Lines that state a number: ``[METRIC]`` lines, scores, and what a server reports while it starts."""

from __future__ import annotations

import re

from assay.harness.ingest.result import CitedLines
from assay.harness.ingest.sglang_log.facts import KEPT, Log, LogMetric, Server

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
