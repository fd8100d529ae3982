"""A log that was read → the facts, tables and findings of a report."""

from __future__ import annotations

from collections.abc import Iterable

from assay.harness.ingest.result import Document, Excerpt, Fact, FileRead, Table
from assay.harness.ingest.sglang_log import server_args
from assay.harness.ingest.sglang_log.citing import cite
from assay.harness.ingest.sglang_log.facts import KEPT, Log
from assay.harness.ingest.sglang_log.findings import findings, next_steps
from assay.harness.ingest.sglang_log.reader import seconds_between
from assay.harness.ingest.source import Source
from assay.harness.text import one_line, percent, ranges

_SHOWN = 50
"""Most rows of a table, and most excerpts of unread lines."""
_START = ("model", "dtype", "weights", "KV tokens", "graph batches", "graph seconds", "graph memory", "free memory")


def document(log: Log, source: Source, id: str, title: str) -> Document:
    """Make the document of one log."""
    unread = log.lines - log.read
    excerpts = [Excerpt(first=one.first, last=one.last, text=one_line(one.text)) for one in log.unread[:_SHOWN]]
    file = FileRead.of(source, id, title, log.read, unread, excerpts=excerpts, notes=_notes(log, source))
    tables = [
        table
        for table in (
            _tests(log),
            _servers(log),
            _started(log),
            _arguments(log),
            _metrics(log),
            _blocks(log),
            _calls(log),
            _kinds(log),
        )
        if table.rows
    ]
    found = tuple(findings(log))
    return Document(
        file=file, facts=tuple(_facts(log)), tables=tuple(tables), findings=found, next_steps=next_steps(log, found)
    )


def _notes(log: Log, source: Source) -> Iterable[str]:
    yield from source.encoding_notes()
    if log.disordered.count:
        yield (
            f"the time goes back {log.disordered.count} times (first in line {log.disordered.first}): the log may be of several "
            "processes, whose figures are then not separated"
        )
    if log.loose_outcomes.count:
        yield (
            f"{log.loose_outcomes.count} outcomes were printed while no test or several were running (first in line "
            f"{log.loose_outcomes.first})"
        )
    for name, count in log.beyond.items():
        yield f"{count} {name} beyond the first {KEPT:,} are counted but not listed, and nothing follows from them"
    cut = [server.line for server in log.servers if not server.whole]
    if cut:
        yield f"the arguments of the server in line {ranges(cut)} are cut off"


def _facts(log: Log) -> Iterable[Fact]:
    if log.began:
        yield Fact(id="time", title="Time", text=f"{log.began} to {log.ended}")
    if log.summary[0]:
        yield Fact(
            id="summary", title="pytest's summary", text=log.summary[0], cites=cite((log.summary[1], log.summary[0]))
        )
    for group in log.groups:
        named = ", ".join(f"{name} {value:.3g}" for name, value in group.scores.items() if not name.endswith(":std"))
        yield Fact(id="scores", title="Scores by group", text=named, cites=cite((group.line, group.text)))
    for command in log.commands:
        yield Fact(
            id="command", title="Command", text=one_line(command.text, 600), cites=cite((command.line, command.text))
        )
    for (kind, text), where in list(log.notices.items())[:_SHOWN]:
        yield Fact(
            id=kind,
            title=kind.replace("-", " ").capitalize(),
            text=f"{where.count}×: {one_line(text)}",
            cites=cite(where),
        )
    for trace in log.traces[:_SHOWN]:
        text = one_line(trace.exception or "a traceback that does not end")
        yield Fact(
            id="traceback",
            title="Traceback",
            text=text,
            cites=(Excerpt(first=trace.first, last=trace.last, text=text),),
        )


def _tests(log: Log) -> Table:
    rows = tuple(
        (
            test.id.rpartition("::")[2],
            test.outcome or "not stated",
            _duration(test.began, test.ended, test.seconds),
            f"{test.line}–{test.outcome_line or '?'}",
        )
        for test in log.tests[:_SHOWN]
    )
    note = ", ".join(f"{count} {outcome}" for outcome, count in log.outcomes.items())
    return Table(id="tests", title="Tests", columns=("test", "outcome", "seconds", "lines"), rows=rows, note=note)


def _duration(began: str, ended: str, seconds: float | None) -> str:
    if seconds is not None:
        return f"{seconds:g}"
    return f"about {seconds_between(began, ended):.0f}" if began and ended else "not stated"


def _servers(log: Log) -> Table:
    rows = tuple(
        (
            str(server.number),
            server.backend,
            log.tests[server.test].id.rpartition("::")[2] if server.test >= 0 else "–",
            f"{server.prefills.count:,}",
            f"{server.sequences:,}",
            f"{server.new_tokens:,}",
            f"{server.cached_tokens:,}",
            percent(server.cached_share) if server.prefills.count else "–",
            f"{server.decodes.count:,}",
            f"{server.throughput:,.1f}" if server.throughput else "–",
            f"{server.answered.count:,}",
            str(server.line),
        )
        for server in log.servers[:_SHOWN]
    )
    columns = (
        "server",
        "backend",
        "test",
        "prefill batches",
        "sequences",
        "new tokens",
        "cached tokens",
        "cached",
        "decode lines",
        "best tok/s",
        "answered",
        "line",
    )
    return Table(id="servers", title="Servers", columns=columns, rows=rows)


def _started(log: Log) -> Table:
    rows = tuple(
        (str(server.number), *(server.facts[name][0] if name in server.facts else "–" for name in _START))
        for server in log.servers[:_SHOWN]
        if server.facts
    )
    return Table(id="start", title="Start, memory and CUDA graphs", columns=("server", *_START), rows=rows)


def _arguments(log: Log) -> Table:
    known = [server for server in log.servers[:_SHOWN] if server.arguments]
    differing = server_args.differences([one.arguments for one in known])
    most = max((len(one.arguments) for one in known), default=0)
    note = f"{most} arguments; not compared: {', '.join(sorted(server_args.PER_SERVER))}"
    return Table(
        id="arguments",
        title="Arguments that differ between the servers",
        columns=("argument", *(f"server {one.number}" for one in known)),
        rows=tuple((name, *(one_line(value, 60) for value in values)) for name, values in differing[:_SHOWN]),
        note=note,
    )


def _metrics(log: Log) -> Table:
    rows = tuple(
        (
            metric.name,
            f"{metric.value:g}",
            log.tests[metric.test].id.rpartition("::")[2] if metric.test >= 0 else "–",
            str(metric.line),
        )
        for metric in log.metrics[:_SHOWN]
    )
    return Table(id="metrics", title="Metrics", columns=("metric", "value", "test", "line"), rows=rows)


def _blocks(log: Log) -> Table:
    rows = tuple(
        (block.title, name, value, str(line)) for block in log.blocks[:_SHOWN] for name, value, line in block.rows
    )
    return Table(id="benchmarks", title="Benchmarks", columns=("benchmark", "figure", "value", "line"), rows=rows)


def _calls(log: Log) -> Table:
    rows = tuple((one_line(name), f"{count:,}") for name, count in log.calls.most_common(_SHOWN))
    note = (
        "Names and statistics without tensors, which can be neither compared nor replayed: SGLANG_KERNEL_API_LOGLEVEL=10 with "
        "SGLANG_KERNEL_API_DUMP_DIR dumps them for assay tensors diff and assay pack import"
    )
    return Table(
        id="kernel-calls", title="Logged calls of kernels", columns=("function", "calls"), rows=rows, note=note
    )


def _kinds(log: Log) -> Table:
    rows = tuple((kind, f"{count:,}") for kind, count in log.kinds.most_common())
    return Table(
        id="kinds",
        title="Kinds of lines",
        columns=("kind", "pieces"),
        rows=rows,
        note="several writers may share a line",
    )
