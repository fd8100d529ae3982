"""Reads a log line by line, and collects the facts of the lines that bear one.

Most such lines are recognised by their form alone (`assay.harness.ingest.sglang_patterns`). Some belong to a traceback or to a
section of pytest's output, which survive lines of other writers in between.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime

from assay.harness.evidence.accuracy_lines import weight_of
from assay.harness.ingest.result import CitedLines
from assay.harness.ingest.sglang_facts import Log, LogMetric, Server, Test, parse_arguments
from assay.harness.ingest.sglang_patterns import (
    ENDED_BY_ANOTHER,
    LOGGED,
    NUMBER,
    PRINTED,
    SECTIONS,
    VLLM,
    Forms,
    kind_of,
    pieces,
)
from assay.harness.tracebacks import HEADER, Frame, Traceback, Tracebacks

# [2026-11-22 23:28:20 TP0] The server is fired up and ready to roll!
_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)?((?: [A-Z]+\d+)*)\](?: |$)")
# server_args=ServerArgs(model_path='meta-llama/Llama-3.1-8B-Instruct', attention_backend='triton', ...
_ARGUMENTS = re.compile(r"server_args=(?:ServerArgs\(|\{)")
_SCORE = re.compile(rf"'([^']{{1,80}})': (?:np\.\w+\()?({NUMBER}|nan)")
_LIMIT = re.compile(r"self\.max_tokens=(\d+)(?: |$)")
# Longest line that patterns are tried on, in characters. A line with a list of arguments may be `_LONGEST_LIST` long.
_LONGEST = 1 << 15
_LONGEST_LIST = 1 << 20
# Writers that buffer may put a line this many seconds after a later one.
_BACK_SECONDS = 2
# Most lines of other writers that a traceback survives.
_PATIENCE = 200
_WORDS = {"ok": "passed", "fail": "failed", "xfail": "xfailed", "xpass": "xpassed"}


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
        self._tracebacks = Tracebacks(lambda trace: self._keep(trace, self._traced), _PATIENCE)
        self._traced = -1

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
        """Read a line. Returns False if a piece of it begins like a line with a fact, but cannot be read."""
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
            return True
        self.log.of_sglang += 1
        message = text[stamp.end() :]
        if arguments := _ARGUMENTS.match(message):
            parsed, whole = parse_arguments(message[arguments.end() :])
            self._adopt()
            self._server = Server(len(self.log.servers) + 1, number, parsed, self._test)
            self.log.servers.append(self._server)
            return whole
        return self._hit_exception(number, message) or self._logged(number, message)

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
        return self._logged(number, text, "error" if level in ("ERROR", "CRITICAL") else "")

    def _logged(self, number: int, text: str, level: str = "") -> bool:
        """Read the message of a line that an engine logged. A level makes a line matter that bears no other fact."""
        kind, whole = self._take(LOGGED, number, text)
        if not kind and (
            noted := "accuracy-warned" if weight_of(text) is not None else kind_of(text, logged=True) or level
        ):
            self.log.note(noted, number, text)
        return whole

    def _bare(self, number: int, text: str) -> bool:
        """Read a line without a time."""
        if (text[:1] == "|" or "gen_kwargs" in text) and self.log.printed.read(number, text):
            return True
        if text == HEADER:
            self._begin_traceback(number, text)
            return True
        if text[:1] in " +|" and self._tracebacks.form(number, text):
            return True
        for forms in (SECTIONS.get(self._section), PRINTED):
            kind, whole = self._take(forms, number, text) if forms else ("", True)
            if kind:
                return whole
        if noted := kind_of(text, logged=False):
            self.log.note(noted, number, text)
        else:
            self._tracebacks.inside(number, text)
        return True

    def _take(self, forms: Forms, number: int, text: str) -> tuple[str, bool]:
        """Take the facts of a line by its form. Returns its kind, or "", and whether it has the form of its kind."""
        kind, match = forms.find(text)
        if match is not None:
            getattr(self, f"_take_{kind}")(number, match)
        return kind, not kind or match is not None

    def _take_prefill(self, number: int, match: re.Match[str]) -> None:
        self._server.prefill(number, match[0], *map(int, match.groups()))

    def _take_decode(self, number: int, match: re.Match[str]) -> None:
        self._server.decode(number, match[0], int(match[1]))

    def _take_request(self, number: int, match: re.Match[str]) -> None:
        self._server.request(number, match[0], match[1])

    def _take_graph_sizes(self, number: int, match: re.Match[str]) -> None:
        self._server.graph_batches = match[1]

    def _take_graph_end(self, number: int, match: re.Match[str]) -> None:
        if match[1]:
            self._server.graph_memory = match[1], CitedLines.of(number, match[0])

    def _take_metric(self, number: int, match: re.Match[str]) -> None:
        metric = LogMetric(match["name"], float(match["value"]), CitedLines.of(number, match[0]), self._test)
        self.log.metrics.append(metric)

    _take_assigned = _take_stated = _take_metric

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
            test.outcome, test.outcome_line = _WORDS.get(word, word), number
        self._open = []

    _take_unittest = _take_outcome

    def _start_test(self, number: int, name: str) -> None:
        self._open.append(len(self.log.tests))
        self._add_test(Test(name, number))

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
            if match[1] < self._time and _seconds_between(match[1], self._time) > _BACK_SECONDS:
                self.log.disordered.see(number, text)
            self._time = match[1]
        return match

    def _take_section(self, number: int, match: re.Match[str]) -> None:
        self._section = match[1]

    def _take_counts(self, number: int, match: re.Match[str]) -> None:
        self.log.summary, self._section = (match[1], number), ""

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


def _seconds_between(earlier: str, later: str) -> float:
    """Compute the seconds between two times of a log, or 0 if one of them is not a valid time."""
    try:
        return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
    except ValueError:  # such as the 61st second
        return 0.0
