"""Reads logs of SGLang and vLLM servers, of pytest runs that start them, and of evaluations that print their scores.

From a log come the facts, tables and findings of a report.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from assay.harness.engines import failures
from assay.harness.ingest.lm_eval import is_table, table_results
from assay.harness.ingest.result import CitedLines, Excerpt, Fact, FactTable, FileDocument, FileRead, FormatReader
from assay.harness.ingest.sglang_facts import PER_SERVER, Log, Server, differing_arguments
from assay.harness.ingest.sglang_findings import cite, findings, next_steps
from assay.harness.ingest.sglang_patterns import VLLM_SIGN
from assay.harness.ingest.sglang_reader import read_log
from assay.harness.ingest.source_file import SourceFile
from assay.harness.text import one_line, percent

# Most rows in a table, and most excerpts of unread lines.
_SHOWN = 50
_SERVER = (
    "server", "backend", "test", "prefill batches", "sequences", "new tokens", "cached tokens", "cached", "decode lines",
    "answered", "line",
)  # fmt: skip
# Size in bytes of the largest log searched for the cause of a crash. The search reads the whole log.
_EXPLAINED = 1 << 26
_TIME = r"^\S{0,200}(?:\w{1,60}: )?\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?(?: [A-Z]+\d+)*\] "
_SIGNS = re.compile(
    r"^=+ (?:test session starts|FAILURES|ERRORS|short test summary info) =+\r?$"
    r"|^\[METRIC\] \w+=|^command=python3? -m sglang|^Accuracy: [\d.]+\r?\nInvalid: [\d.]+\r?$"
    rf"|{_TIME}(?:server_args=|(?:Prefill|Decode) batch|INFO:  |\w+ hit an exception|Received sigquit)"
    rf"|^.{{0,120}}?{VLLM_SIGN}"
    r"|^\S{0,200}(?:\w{1,60}: )?\[[-\d]+ [\d:]+\] Load weight |^\S+sglang/launch_server\.py:\d+: ",
    re.MULTILINE,
)


def _recognises(source: SourceFile) -> bool:
    """Recognise a log by a line that only these programs print."""
    return _SIGNS.search(source.head_text) is not None


def _read(source: SourceFile) -> FileDocument:
    """Read the whole log, line by line."""
    log = read_log(source.lines())
    excerpts = [lines.excerpt for lines in log.unread[:_SHOWN]]
    id_, title = (READER.id, READER.title) if _recognises(source) else (TABLE.id, TABLE.title)
    file = FileRead.of(
        source,
        "vllm-log" if log.of_vllm and not log.of_sglang else id_,
        "vLLM log" if log.of_vllm and not log.of_sglang else title,
        log.read,
        log.lines - log.read,
        excerpts=excerpts,
        notes=_notes(log, source),
    )
    cited, facts = tuple(findings(log)), (*_facts(log), *_cause(log, source))
    tables = tuple(table for table in _tables(log) if table.rows)
    return FileDocument(file=file, facts=facts, tables=tables, findings=cited, next_steps=next_steps(log, cited))


def _notes(log: Log, source: SourceFile) -> Iterable[str]:
    yield from source.encoding_notes()
    if log.disordered.count:
        yield (
            f"the time goes back {log.disordered.count} times (first in line {log.disordered.first}): the log may come from "
            "several processes, whose figures are then mixed"
        )


def _facts(log: Log) -> Iterable[Fact]:
    text, line = log.summary
    if text:
        yield Fact(id="summary", title="pytest's summary", text=text, cites=cite(CitedLines.of(line, text)))
    for scores, where, _ in log.groups:
        named = ", ".join(f"{name} {value:.3g}" for name, value in scores.items() if not name.endswith(":std"))
        yield Fact(id="scores", title="Scores by group", text=named, cites=cite(where))
    for trace, _ in log.traces[:_SHOWN]:
        text = one_line(trace.exception or "an incomplete traceback")
        quoted = Excerpt(first=trace.first, last=trace.last, text=text)
        yield Fact(id="traceback", title="Traceback", text=text, cites=(quoted,))


def _cause(log: Log, source: SourceFile) -> Iterable[Fact]:
    """Yield the reason why a server failed if a process crashed, searching the whole log as for assay's own servers."""
    crashed = [where for (kind, _), where in log.notices.items() if kind == "crash"]
    if crashed and not log.of_vllm and source.size <= _EXPLAINED:
        failure = failures.read("\n".join(text for _, text in source.lines()))
        if failure.cause:
            text = f"{failure.line.rstrip('.')}. To resolve: {failure.do}."
            yield Fact(id="cause", title="Why the server failed", text=text, cites=cite(*crashed[:1]))


def _table(id: str, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]], note: str = "") -> FactTable:
    return FactTable(id=id, title=title, columns=tuple(columns), rows=tuple(map(tuple, rows)), note=note)


def _tables(log: Log) -> Iterable[FactTable]:
    tests = [
        (log.name_of(index), test.outcome or "not stated", f"{test.line}–{test.outcome_line or '?'}")
        for index, test in enumerate(log.tests[:_SHOWN])
    ]
    note = ", ".join(f"{count} {outcome}" for outcome, count in log.outcomes.items())
    yield _table("tests", "Tests", ("test", "outcome", "lines"), tests, note)
    servers = log.servers[:_SHOWN]
    yield _table("servers", "Servers", _SERVER, [_server(log, server) for server in servers])
    known = [server for server in servers if server.arguments]
    differing = differing_arguments([server.arguments for server in known])[:_SHOWN]
    most = max((len(server.arguments) for server in known), default=0)
    note = f"{most} arguments; not compared: {', '.join(sorted(PER_SERVER))}"
    columns = ("argument", *(f"server {server.number}" for server in known))
    arguments = [(name, *(one_line(value, 60) for value in values)) for name, values in differing]
    yield _table("arguments", "Arguments that differ between the servers", columns, arguments, note)
    metrics = [
        (metric.name, f"{metric.value:g}", log.name_of(metric.test, "–"), str(metric.at.first))
        for metric in log.metrics[:_SHOWN]
    ]
    yield _table("metrics", "Metrics", ("metric", "value", "test", "line"), metrics)
    yield from log.printed.tables()


def _server(log: Log, server: Server) -> tuple[str, ...]:
    cached = server.cached_tokens / max(1, server.new_tokens + server.cached_tokens)
    counts = (server.prefills.count, server.sequences, server.new_tokens, server.cached_tokens)
    return (
        str(server.number), server.backend, log.name_of(server.test, "–"), *(f"{count:,}" for count in counts),
        percent(cached) if server.prefills.count else "–", f"{server.decodes.count:,}", f"{server.answered.count:,}",
        str(server.line),
    )  # fmt: skip


READER = FormatReader("sglang-log", "log of SGLang, vLLM or pytest", _recognises, _read, compared=False)
TABLE = FormatReader("lm-eval-table", "lm-eval's printed table", is_table, _read, table_results)
