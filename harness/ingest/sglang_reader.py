"""Reads a log line by line: the kind of each piece of a line, and what it states."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime

from assay.harness.ingest.result import CitedLines
from assay.harness.ingest.sglang_blocks import KernelCalls, LogBlocks
from assay.harness.ingest.sglang_facts import KEPT, Log, Server, Test, parse_arguments, read_number, read_start_up
from assay.harness.ingest.sglang_lines import BARE, RECORDS, plain, split

_TIME = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)?((?: [A-Z]+\d+)*)\](?: |$)")
_ARGUMENTS = re.compile(r"server_args=(?:ServerArgs\(|\{)")
_OUTCOME = re.compile(r"(PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS|RERUN)(?: \(.*\))?(?: +\[ *\d+%\])?")
_UNITTEST = re.compile(r"(?P<id>\w+ \([\w.]+\)) \.\.\. (?:(?P<outcome>ok|FAIL|ERROR|skipped .*|expected failure))?")
_COMMAND = re.compile(r"(?:command=|\+ |\$ )(?P<text>\S.*)")
# Characters of a line that rules are tried on, apart from a list of arguments, which may be `_LONGEST_LIST` long.
_LONGEST = 1 << 15
_LONGEST_LIST = 1 << 20
# Writers that buffer put a line behind a later one by this much.
_BACK_SECONDS = 2
_WORDS = {"ok": "passed", "FAIL": "failed", "ERROR": "error", "XFAIL": "xfailed", "XPASS": "xpassed"}


def read_log(lines: Iterable[tuple[int, str]]) -> Log:
    """Read the numbered lines of a log: what it states, before anything is concluded from it."""
    return _LogReader().read(lines)


class _LogReader:
    """Takes lines, and counts what they state in `log`."""

    def __init__(self) -> None:
        self.log = Log()
        self._server = Server(0, 0, {})
        self._open: list[int] = []
        self._time = ""
        self._blocks = LogBlocks(self.log, self._test)
        self._kernels = KernelCalls(self.log)

    def _test(self) -> int:
        """Return the index of the test that is running, or whose output pytest shows again; -1 if none or several are."""
        return self._open[0] if len(self._open) == 1 else self._blocks.failed

    def read(self, lines: Iterable[tuple[int, str]]) -> Log:
        """Read all lines. The log is complete when this returns."""
        log, count, read = self.log, 0, 0
        for number, text in lines:
            count += 1
            if self._read(number, text):
                read += 1
            else:
                self._unread(number, text)
        log.lines, log.read = count, read
        self._adopt()
        self._blocks.end()
        return log

    def _read(self, number: int, text: str) -> bool:
        if len(text) > _LONGEST and ("server_args=" not in text[:200] or len(text) > _LONGEST_LIST):
            return False
        if plain(text):
            return self._text(number, text)
        # A list: each piece counts, whatever the others are.
        understood = [self._piece(number, *piece) for piece in split(text)]
        return all(understood)

    def _piece(self, number: int, kind: str, text: str, bar: tuple[str, str, str]) -> bool:
        if kind == "progress":
            self._bar(number, *bar)
        elif kind == "test-start":
            self._start_test(number, text)
        elif kind == "text":
            return self._text(number, text)
        self.log.kinds[kind] += 1
        return True

    def _text(self, number: int, text: str) -> bool:
        kind = self._record(number, text) if text[:1] == "[" and text[1:2].isdecimal() else self._bare(number, text)
        if kind:
            self.log.kinds[kind] += 1
        return bool(kind)

    def _record(self, number: int, text: str) -> str:
        """Read a line that SGLang logged, with its time. Returns its kind; empty if there is no rule about it."""
        stamp = self._at(number, text)
        if not stamp:
            return ""
        message = text[stamp.end() :]
        arguments = _ARGUMENTS.match(message)
        if arguments:
            parsed, whole = parse_arguments(message[arguments.end() :])
            self._start_server(parsed, number, whole)
            return "arguments" if whole else ""
        kind = self._server.count(number, message) or self._blocks.record(number, message)
        if kind := kind or self._kernels.record(number, message):
            return kind
        kind, notice = RECORDS.of(message)
        if message and not kind:
            kind, notice = BARE.of(message)
        self.log.note(notice, number, message)
        read_start_up(kind, number, message, self._server)
        return kind

    def _bare(self, number: int, text: str) -> str:
        """Read a line without a time. Rules are tried only where a cheap look allows them: most lines are far from most rules."""
        if kind := self._kernels.bare(number, text):
            return kind
        first = text[:1]
        if first in "PFSEXR" or " ... " in text:
            kind = self._outcome(number, text)
        kind = kind or self._blocks.bare(number, text)
        if not kind and first in "c+$":
            kind = self._command(number, text)
        if not kind and first != " ":
            kind = read_number(self.log, number, text, self._test())
        return kind or self._ruled(number, text) or self._blocks.inside(number, text)

    def _ruled(self, number: int, text: str) -> str:
        kind, notice = BARE.of(text)
        self.log.note(notice, number, text)
        return kind

    def _command(self, number: int, text: str) -> str:
        match = _COMMAND.fullmatch(text)
        if not match:
            return ""
        self.log.commands.append(CitedLines.of(number, match["text"]))
        return "command"

    def _outcome(self, number: int, text: str) -> str:
        if match := _OUTCOME.fullmatch(text):
            self._end_test(number, text, _WORDS.get(match[1], match[1].lower()))
            return "outcome"
        if match := _UNITTEST.fullmatch(text):
            self._start_test(number, match["id"])
            if match["outcome"]:
                word = match["outcome"].partition(" ")[0]
                self._end_test(number, text, _WORDS.get(word, word))
            return "outcome"
        return ""

    def _start_test(self, number: int, name: str) -> None:
        if len(self.log.tests) < KEPT:
            self.log.ids[name] = len(self.log.tests)
            self._open.append(len(self.log.tests))
            self.log.tests.append(Test(name, number, began=self._time))

    def _end_test(self, number: int, text: str, outcome: str) -> None:
        """Record a printed outcome: of the test that is open, if there is just one."""
        self.log.outcomes[outcome] += 1
        if len(self._open) == 1:
            test = self.log.tests[self._open[0]]
            test.outcome, test.outcome_line, test.ended = outcome, number, self._time
        else:
            self.log.loose_outcomes.see(number, text)
        if len(self._open) == 1 or self.log.loose_outcomes.count >= len(self._open):
            self._open = []

    def _start_server(self, arguments: dict[str, str], number: int, whole: bool) -> None:
        self._adopt()
        server = Server(len(self.log.servers) + 1, number, arguments, whole, self._test())
        self.log.servers.append(server)
        self._server = server

    def _adopt(self) -> None:
        """End the figures of a server. One whose arguments the log does not have is a server if it computed anything."""
        self._server.close()
        server = self._server
        if not server.number and (server.prefills.count or server.decodes.count):
            server.number, server.line = 1, server.prefills.first or server.decodes.first
            self.log.servers.append(server)

    def _at(self, number: int, text: str) -> re.Match[str] | None:
        """Return the time of a line, and remember it; None if it has none."""
        match = _TIME.match(text)
        if match and match[1] != self._time:
            if match[1] < self._time and seconds_between(match[1], self._time) > _BACK_SECONDS:
                self.log.disordered.see(number, text)
            self._time = match[1]
            self.log.began = min(self.log.began or match[1], match[1])
            self.log.ended = max(self.log.ended, match[1])
            for index in self._open:
                test = self.log.tests[index]
                test.began, test.ended = test.began or match[1], match[1]
        return match

    def _bar(self, number: int, label: str, done: str, total: str) -> None:
        if done.isdecimal() and total.isdecimal():
            self.log.bars[self._test(), label.partition("(")[0].strip(), int(total)] = (int(done), number)

    def _unread(self, number: int, text: str) -> None:
        unread = self.log.unread
        if unread and unread[-1].last == number - 1:
            unread[-1].see(number, text)
        else:
            unread.append(CitedLines.of(number, text))


def seconds_between(earlier: str, later: str) -> float:
    """Compute the seconds from one time of a log to another; 0 where one of them is no time."""
    try:
        return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
    except ValueError:  # such as the 61st second
        return 0.0
