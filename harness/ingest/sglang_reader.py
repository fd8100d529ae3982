"""Reads a log line by line: the kind of each piece of a line, and its facts.

Most lines are recognised by their form alone (`assay.harness.ingest.sglang_patterns`). Some belong to a block: a traceback, a
Python warning, a pytest section, a benchmark table. If a block's lines have a recognisable form too, the block survives lines of
other writers in between.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime

from assay.harness.evidence.accuracy_lines import weight_of
from assay.harness.ingest.result import CitedLines
from assay.harness.ingest.sglang_facts import Log, LogMetric, Server, Test, parse_arguments
from assay.harness.ingest.sglang_patterns import (
    BARE,
    ENDED_BY_ANOTHER,
    HEADINGS,
    NUMBER,
    RECORDS,
    SECTIONS,
    STATED,
    VLLM,
    LineTable,
    pieces,
)
from assay.harness.tracebacks import FRAME, HEADER, Frame, Traceback, Tracebacks

# [2026-11-22 23:28:20 TP0] The server is fired up and ready to roll!
_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)?((?: [A-Z]+\d+)*)\](?: |$)")
# server_args=ServerArgs(model_path='meta-llama/Llama-3.1-8B-Instruct', attention_backend='triton', ...
_ARGUMENTS = re.compile(r"server_args=(?:ServerArgs\(|\{)")
_SCORE = re.compile(rf"'([^']{{1,80}})': (?:np\.\w+\()?({NUMBER}|nan)")
_LIMIT = re.compile(r"self\.max_tokens=(\d+)(?: |$)")
# Facts from a server's startup, by the kind of line that states them.
_START_UP = {
    "weights-end": (("model", r"type=(\w+)"), ("dtype", r"dtype=([\w.]+)"), ("weights", r"mem usage=([\d.]+ GB)")),
    "kv-cache": (("KV tokens", r"#tokens: (\d+)"),),
    "graph-sizes": (("graph batches", r"(\[.*\])"),),
    "graph-end": (("graph seconds", r"elapsed[:=] ?([\d.]+) s"), ("graph memory", r"mem usage=([\d.]+ GB)")),
    "sizes": (("free memory", r"available_\w+_mem=([\d.]+ GB)"),),
}
# Kinds of lines that may matter.
_NOTED = ("kernel-not-loaded", "offline-retry", "crash", "retract", "fallback", "option-chosen", "warning", "error")
# Longest line that patterns are tried on, in characters. A line with a list of arguments may be `_LONGEST_LIST` long.
_LONGEST = 1 << 15
_LONGEST_LIST = 1 << 20
# Writers that buffer may put a line this many seconds after a later one.
_BACK_SECONDS = 2
# Most lines of other writers that a block survives.
_PATIENCE = 200
_WORDS = {"ok": "passed", "fail": "failed", "xfail": "xfailed", "xpass": "xpassed"}
# /x/torch/cuda/__init__.py:61: FutureWarning: The pynvml package is deprecated.
_WARNING = re.compile(r"\S+\.py:\d+: \w{0,60}(?:Warning|Deprecation)\w{0,60}: .*")


def read_log(lines: Iterable[tuple[int, str]]) -> Log:
    """Read the facts from a log's numbered lines, before anything is concluded from them."""
    reader = _LogReader()
    log = reader.log
    for number, text in lines:
        log.lines += 1
        if reader.read(number, text):
            log.read += 1
        elif log.unread and log.unread[-1].last == number - 1:
            log.unread[-1].see(number, text)
        else:
            log.unread.append(CitedLines.of(number, text))
    reader.end()
    return log


class _LogReader:
    """Takes lines and collects their facts in `log`. The method ``_take_`` + kind handles lines of that kind."""

    def __init__(self) -> None:
        self.log = Log()
        self._server = Server(0, 0, {})
        self._time = ""
        # Indices of the running tests, and of the test whose failure pytest reports (or -1).
        self._open: list[int] = []
        self._failed = -1
        self._section = ""
        # The exception of that failure, until the line that gives its place.
        self._raised: tuple[int, str] | None = None
        # Rows of the open benchmark table.
        self._rows: list[tuple[str, str, int]] | None = None
        self._tracebacks = Tracebacks(lambda trace: self._keep(trace, self._traced), _PATIENCE)
        self._traced = -1
        self._warned = -_PATIENCE - 1

    @property
    def _test(self) -> int:
        """Index of the running test or the test whose output pytest repeats; -1 unless there is exactly one."""
        if len(self._open) == 1:
            return self._open[0]
        return self._failed if self._failing else -1

    @property
    def _failing(self) -> bool:
        """True inside pytest's report of failures, which repeats each test's output."""
        return self._section in ("FAILURES", "ERRORS", "PASSES")

    def read(self, number: int, text: str) -> bool:
        """Read a line. Returns True if every piece of it was understood."""
        if len(text) > _LONGEST and ("server_args=" not in text[:200] or len(text) > _LONGEST_LIST):
            return False
        understood = [self._piece(number, *piece) for piece in pieces(text)]  # a list, so that every piece is read
        return all(understood)

    def end(self) -> None:
        """End all open blocks at the end of the log."""
        self._adopt()
        self._tracebacks.end()

    def _piece(self, number: int, kind: str, text: str, bar: re.Match[str] | None) -> bool:
        if bar and bar["done"].isdecimal() and bar["total"].isdecimal():
            label = text.partition("(")[0].strip()
            self.log.bars[self._test, label, int(bar["total"])] = (int(bar["done"]), number)
        elif kind == "test-start":
            self._start_test(number, text)
        elif kind == "text" and (".py:" in text[:200] or "pid=" in text[:120]) and (engine := VLLM.match(text)):
            self.log.of_vllm += 1
            return self._engine_line(number, text[engine.end() :], (engine["logged"] or "").partition(" ")[0])
        elif kind == "text":
            stamped = text[:1] == "[" and text[1:2].isdecimal()
            return self._record(number, text) if stamped else self._bare(number, text)
        return True

    def _record(self, number: int, text: str) -> bool:
        """Read a line that SGLang logged with a time."""
        stamp = self._at(number, text)
        if not stamp:
            return False
        message = text[stamp.end() :]
        if arguments := _ARGUMENTS.match(message):
            parsed, whole = parse_arguments(message[arguments.end() :])
            self._adopt()
            self._server = Server(len(self.log.servers) + 1, number, parsed, whole, self._test)
            self.log.servers.append(self._server)
            return whole
        return (
            self._hit_exception(number, message)
            or self._find(RECORDS, number, message)
            or (bool(message) and self._find(BARE, number, message))
        )

    def _hit_exception(self, number: int, message: str) -> bool:
        """Read a logged exception that ends with the header of a traceback."""
        if not message.endswith(HEADER):
            return False
        self._begin_traceback(number, message)
        if message != HEADER:
            self.log.note("crash", number, message)
        return True

    def _engine_line(self, number: int, text: str, level: str) -> bool:
        """Read a line of vLLM after its process, level and place. A line without a level was printed."""
        in_traceback = level in ("", "ERROR", "CRITICAL")
        if self._hit_exception(number, text) or (in_traceback and self._tracebacks.line(number, text)):
            return True
        if self._find(RECORDS, number, text):
            return True
        if level:
            self._note({"CRITICAL": "error"}.get(level, level.lower() if level == "ERROR" else ""), number, text)
        return bool(level) or self._bare(number, text)

    def _bare(self, number: int, text: str) -> bool:
        """Read a line without a time."""
        if (text[:1] == "|" or "gen_kwargs" in text) and self.log.printed.read(number, text):
            return True
        return (
            self._block(number, text)
            or self._find(STATED, number, text)
            or self._find(BARE, number, text)
            or self._inside(number, text)
        )

    def _find(self, table: LineTable, number: int, text: str) -> bool:
        """Read a line by its form: note it if it may matter, and take its facts."""
        kind, match = table.find(text)
        if match is None:
            return False
        self._note(kind, number, text)
        if take := getattr(self, f"_take_{kind}", None):
            take(number, match)
        for name, pattern in _START_UP.get(kind, ()):
            if stated := re.search(pattern, text):
                self._server.facts[name] = (stated[1], CitedLines.of(number, text))
        return True

    def _note(self, kind: str, number: int, text: str) -> None:
        kind = "accuracy-warned" if weight_of(text) is not None else kind
        if kind in ("accuracy-warned", *_NOTED):
            self.log.note(kind, number, text)

    def _take_prefill(self, number: int, match: re.Match[str]) -> None:
        self._server.prefill(number, match[0], *map(int, match.groups()))

    def _take_decode(self, number: int, match: re.Match[str]) -> None:
        self._server.decode(number, match[0], int(match[1]))

    def _take_request(self, number: int, match: re.Match[str]) -> None:
        if match[1]:
            self._server.request(number, match[0], match[2])

    def _take_command(self, number: int, match: re.Match[str]) -> None:
        self.log.commands.append(CitedLines.of(number, match[1]))

    def _take_number(self, number: int, match: re.Match[str]) -> None:
        self.log.metrics.append(LogMetric(match[1], float(match[2]), CitedLines.of(number, match[0]), self._test))

    def _take_scores(self, number: int, match: re.Match[str]) -> None:
        scores = {name: float(value) for name, value in _SCORE.findall(match[0])}
        self.log.groups.append((scores, CitedLines.of(number, match[0]), self._test))

    def _take_sampler(self, number: int, match: re.Match[str]) -> None:
        if limit := _LIMIT.search(match[0]):
            self.log.answer_limit = (int(limit[1]), CitedLines.of(number, match[0]))

    def _take_outcome(self, number: int, match: re.Match[str]) -> None:
        """Assign a printed outcome to the open test, unless several are open."""
        word = (match["outcome"] or "").partition(" ")[0].lower()
        if match.groupdict().get("id"):
            self._start_test(number, match["id"])
        if not word:
            return
        self.log.outcomes[_WORDS.get(word, word)] += 1
        if len(self._open) == 1:
            test = self.log.tests[self._open[0]]
            test.outcome, test.outcome_line, test.ended = _WORDS.get(word, word), number, self._time
        self._open = []

    def _start_test(self, number: int, name: str) -> None:
        self._open.append(len(self.log.tests))
        self._add_test(Test(name, number, began=self._time))

    def _add_test(self, test: Test) -> None:
        self.log.ids[test.id] = len(self.log.tests)
        self.log.tests.append(test)

    def _adopt(self) -> None:
        """Close a server's figures. A server whose arguments are not in the log counts if it computed anything."""
        self._server.close()
        server = self._server
        seen = [each.first for each in (server.prefills, server.decodes, server.refused) if each.count]
        if not server.number and seen:
            server.number, server.line = 1, seen[0]
            self.log.servers.append(server)

    def _at(self, number: int, text: str) -> re.Match[str] | None:
        """Return a line's time and remember it, or return None if it has no time."""
        match = _TIME.match(text)
        if match and match[1] != self._time:
            if match[1] < self._time and seconds_between(match[1], self._time) > _BACK_SECONDS:
                self.log.disordered.see(number, text)
            self._time = match[1]
            self.log.began = min(self.log.began or match[1], match[1])
            self.log.ended = max(self.log.ended, match[1])
            for test in (self.log.tests[index] for index in self._open):
                test.began, test.ended = test.began or match[1], match[1]
        return match

    def _block(self, number: int, text: str) -> bool:
        """Read a line that begins a block, or has the form of a line in a block."""
        if text == HEADER:
            self._begin_traceback(number, text)
            return True
        if text[:1] in " +|" and (self._tracebacks.form(number, text) or FRAME.fullmatch(text)):
            return True
        if not self._failing and ("Warning" in text or "Deprecat" in text) and _WARNING.fullmatch(text):
            self._warned = number
            return True
        lines = SECTIONS.get("table" if self._rows is not None else self._section)
        return self._find(HEADINGS, number, text) or (lines is not None and self._find(lines, number, text))

    def _inside(self, number: int, text: str) -> bool:
        """Read a line that only its block identifies."""
        warning = number - self._warned <= _PATIENCE and text.startswith("  ")
        return self._tracebacks.inside(number, text) or warning or (self._failing and text.startswith("    "))

    def _take_section(self, number: int, match: re.Match[str]) -> None:
        self._section = "slowest" if match[1].startswith("slowest ") else match[1]

    def _take_counts(self, number: int, match: re.Match[str]) -> None:
        self.log.summary, self._section = (match[1], number), ""

    def _take_title(self, number: int, match: re.Match[str]) -> None:
        self._rows = []
        self.log.blocks.append((match[1].strip(), self._rows))

    def _take_row(self, number: int, match: re.Match[str]) -> None:
        if self._rows is not None:
            self._rows.append((match[1].strip(), match[2], number))

    def _take_rows_end(self, number: int, match: re.Match[str]) -> None:
        self._rows = None

    def _begin_traceback(self, number: int, text: str) -> None:
        self._tracebacks.form(number, text)
        self._traced = self._test

    def _keep(self, trace: Traceback, test: int) -> None:
        self.log.traces.append((trace, test))
        if ENDED_BY_ANOTHER.match(trace.exception):
            self.log.note("crash", trace.exception_line, trace.exception)

    def _take_failed(self, number: int, match: re.Match[str]) -> None:
        """Find the test of a failure section by the end of its id: ``TestClass.test_name[case]``."""
        ends = [at for id, at in self.log.ids.items() if id.partition("::")[2].replace("::", ".") == match[1]]
        self._failed, self._raised = ends[0] if len(ends) == 1 else -1, None

    def _take_raised(self, number: int, match: re.Match[str]) -> None:
        self._raised = self._raised or (number, match[1])

    def _take_place(self, number: int, match: re.Match[str]) -> None:
        if self._raised:
            (line, what), kind = self._raised, match["kind"]
            said = what if what.startswith(kind) else f"{kind}: {what}"
            frames = [Frame(match["file"], int(match["line"]))]
            self._keep(Traceback(line, number, "", frames, said, line), self._failed)
            self._raised = None

    def _take_summary(self, number: int, match: re.Match[str]) -> None:
        if match["id"] not in self.log.ids and match["outcome"] in ("FAILED", "ERROR"):
            self._add_test(Test(match["id"], number))  # the run printed only a letter per test
        index = self.log.ids.get(match["id"])
        if index is None:
            return
        if match["why"] and all(test != index for _, test in self.log.traces):
            self._keep(Traceback(number, number, "", [], match["why"], number), index)
        test = self.log.tests[index]
        if not test.outcome:
            test.outcome, test.outcome_line = match["outcome"].lower(), number


def seconds_between(earlier: str, later: str) -> float:
    """Compute the seconds between two times of a log, or 0 if one of them is not a valid time."""
    try:
        return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
    except ValueError:  # such as the 61st second
        return 0.0
