"""Blocks of several lines: tracebacks, warnings of Python, sections of pytest, tables of benchmarks, calls of kernels.

A line of a block is known by its form; only what has no form of its own (source lines) needs the block around it. So a block
survives lines of other writers in between.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from assay.harness.ingest.result import CitedLines
from assay.harness.ingest.sglang_facts import Log
from assay.harness.tracebacks import CHAINED, FRAME, HEADER, Frame, Traceback, Tracebacks

# /x/torch/cuda/__init__.py:61: FutureWarning: The pynvml package is deprecated.
_WARNING = re.compile(r"\S+\.py:\d+: \w{0,60}(?:Warning|Deprecation)\w{0,60}: .*")
# =========================== short test summary info ============================
_TITLE = re.compile(r"={3,} (?P<title>\S.*?) ={3,}")
# 1 failed, 3 passed, 1 warning in 319.15s (0:05:19)
_COUNTS = re.compile(
    r"(?:\d+ (?:failed|passed|skipped|deselected|xfailed|xpassed|warnings?|errors?|rerun)(?:, )?)+ in [\d.]+s(?: \([\d:]+\))?"
    r"|no tests ran in [\d.]+s"
)
_SECTIONS = {
    "test session starts": "session", "FAILURES": "failures", "ERRORS": "failures", "warnings summary": "warnings",
    "short test summary info": "summary", "PASSES": "failures", "rerun test summary info": "summary",
}  # fmt: skip
_FAILURE = re.compile(
    r"_{3,} .+ _{3,}|(?:_ )+_?|[\w./<>-]+:\d+: (?:in \S+|\w*)|E {3,}.*|E|> {3,}.*|-{3,} Captured .* -{3,}|\w+ += .*"
)
# __________________________________ test_mmlu ___________________________________
_FAILED = re.compile(r"_{3,} (?P<name>[^_ ].*?) _{3,}")
# E       assert 0.125 >= 0.6
_RAISED = re.compile(r"E {3,}(?P<what>\S.*)")
# test_eval.py:3: AssertionError
_AT = re.compile(r"(?P<file>[\w./<>-]+):(?P<line>\d+): (?P<kind>[A-Za-z_]\w*)")
# FAILED test_eval.py::test_mmlu - assert 0.125 >= 0.6
_SUMMARY = re.compile(
    r"(?P<outcome>FAILED|PASSED|ERROR|SKIPPED|XFAIL|XPASS)(?: \[\d+\])? (?P<id>\S+::\S+|\S+\.py(?::\d+)?)(?: - (?P<why>.*)|:? .*)?"
)
# 99.12s call     test/test_x.py::TestX::test_mmlu
_DURATION = re.compile(
    r"(?P<seconds>[\d.]+)s (?P<phase>call|setup|teardown) +(?P<id>\S+)|\(\d+ durations < [\d.]+s hidden\..*\)"
)
_PLACE = re.compile(r"\S+\.py:\d+|\S+::\S+|\S+\.py: \d+ warnings?|  \S.*|    .*|  ")
# Output token throughput (tok/s):         96.49
_ROW = re.compile(r"(?P<name>[A-Z][\w (),/.%#-]*): +(?P<value>\S+)")
# ====== Offline Throughput Benchmark Result =======
_TABLE = re.compile(r"=+ *(?P<title>(?:\w[\w ]{0,80})?Result) *=+")
_RULED = re.compile(r"-{4}[\w ()-]*-{4}")
# Lines of other writers that a block survives.
_PATIENCE = 200


class LogBlocks:
    """Follows the blocks of one log. `test` returns the index of the test that runs."""

    def __init__(self, log: Log, test: Callable[[], int]) -> None:
        self._log, self._running = log, test
        self._section = ""
        self._rows: list[tuple[str, str, int]] | None = None
        self._tracebacks = Tracebacks(lambda trace: self._keep(trace, self._test), _PATIENCE)
        self._test = -1
        self._warned = 0
        self._failed = -1
        self._raised: tuple[int, str] | None = None

    @property
    def failed(self) -> int:
        """Index of the test whose failure pytest reports here, with what it had printed; -1 elsewhere."""
        return self._failed if self._section == "failures" else -1

    def record(self, number: int, message: str) -> str:
        """Read a logged message that begins a block."""
        if message.endswith(HEADER):
            self._begin(number, message)
            if message != HEADER:
                self._log.note("crash", number, message)
            return "traceback"
        return ""

    def bare(self, number: int, text: str) -> str:
        """Read a line without a time that is known by its form. Returns its kind; empty otherwise."""
        start = text[:1]
        if start == "=":
            return self._title(number, text)
        if text == HEADER:
            self._begin(number, text)
            return "traceback"
        if start in " +|" and (self._tracebacks.form(number, text) or FRAME.fullmatch(text)):
            return "traceback"
        if start in "DT" and CHAINED.fullmatch(text):
            return "traceback"
        if "Warning" in text or "Deprecat" in text:
            return self._warning(number, text) or self._sectioned(number, text)
        return self._sectioned(number, text)

    def _warning(self, number: int, text: str) -> str:
        if _WARNING.fullmatch(text) and self._section != "failures":
            self._warned = number
            return "python-warning"
        return ""

    def _begin(self, number: int, text: str) -> None:
        self._tracebacks.form(number, text)
        self._test = self._running()

    def _keep(self, trace: Traceback, test: int) -> None:
        self._log.traces.append((trace, test))

    def _title(self, number: int, text: str) -> str:
        title = _TITLE.fullmatch(text)
        if title and (title["title"] in _SECTIONS or title["title"].startswith("slowest ")):
            self._section = _SECTIONS.get(title["title"], "durations")
            return "pytest-section"
        if title and _COUNTS.fullmatch(title["title"]):
            self._log.summary, self._section = (title["title"], number), ""
            return "pytest-summary"
        table = _TABLE.fullmatch(text)
        if table:
            self._rows = []
            self._log.blocks.append((table["title"].strip(), self._rows))
            return "table"
        if self._rows is not None and not text.strip("="):
            self._rows = None
            return "table"
        return ""

    def _sectioned(self, number: int, text: str) -> str:
        if self._rows is not None:
            row = _ROW.fullmatch(text.rstrip())
            if row:
                self._rows.append((row["name"].strip(), row["value"], number))
                return "table"
            return "table" if _RULED.fullmatch(text) else ""
        if self._section == "summary":
            return self._summary(number, text)
        if self._section == "durations":
            return self._duration(text)
        if self._section == "failures":
            self._failure(number, text)
        pattern = {"failures": _FAILURE, "warnings": _PLACE}.get(self._section)
        return "pytest-detail" if pattern and pattern.fullmatch(text) else ""

    def _failure(self, number: int, text: str) -> None:
        """Read a line of pytest's own report of a failure: the test, what it raised (``E``), and where (``path:line: Error``)."""
        title, raised, place = _FAILED.fullmatch(text), _RAISED.fullmatch(text), _AT.fullmatch(text)
        if title:
            self._failed = self._index(title["name"])
            self._raised = None
        elif raised and self._raised is None:
            self._raised = (number, raised["what"])
        elif place and self._raised:
            line, what = self._raised
            kind = place["kind"]
            said = what if what.startswith(kind) else f"{kind}: {what}"
            frames = [Frame(place["file"], int(place["line"]))]
            self._keep(Traceback(line, number, "", frames, said, line), self._failed)
            self._raised = None

    def _index(self, name: str) -> int:
        """Find the test that a section of failures is about, by its id's end: ``TestClass.test_name[case]``; -1 if none."""
        name = name.removeprefix("ERROR at setup of ").removeprefix("ERROR at teardown of ")
        ends = [at for id, at in self._log.ids.items() if id.partition("::")[2].replace("::", ".") == name]
        return ends[0] if len(ends) == 1 else -1

    def _summary(self, number: int, text: str) -> str:
        match = _SUMMARY.fullmatch(text)
        if not match:
            return ""
        index = self._log.ids.get(match["id"])
        known = index is not None and any(test == index for _, test in self._log.traces)
        if index is not None and match["why"] and not known:
            self._keep(Traceback(number, number, "", [], match["why"], number), index)
        if index is not None and not self._log.tests[index].outcome:
            self._log.tests[index].outcome, self._log.tests[index].outcome_line = match["outcome"].lower(), number
        return "pytest-detail"

    def _duration(self, text: str) -> str:
        match = _DURATION.fullmatch(text)
        if not match:
            return ""
        index = self._log.ids.get(match["id"] or "")
        if index is not None and match["phase"] == "call":
            self._log.tests[index].seconds = float(match["seconds"])
        return "pytest-detail"

    def inside(self, number: int, text: str) -> str:
        """Read a line that is known only by the block that it is in. Returns its kind; empty if it is in none."""
        if self._tracebacks.inside(number, text):
            return "traceback"
        if self._warned and number - self._warned <= _PATIENCE and text.startswith("  "):
            return "python-warning"
        if self._section == "failures" and text.startswith("    "):
            return "pytest-detail"
        return ""

    def end(self) -> None:
        """End the traceback that is open."""
        self._tracebacks.end()


# The text of SGLANG_KERNEL_API_LOGLEVEL (1 names, 3 shapes, 5 statistics), read in SGLang 0.5.23, kernels/kernel_api_logging.py:
#   [2026-11-22 23:28:20] SGLang Kernel API Call: norm.rmsnorm
#   Positional input arguments:
#     arg[0]=Tensor(
#         shape=(2, 3, 4)
_KERNEL = "kernel-call"
_CALL = "SGLang Kernel API Call: "
_EXCEPTION = "SGLang Kernel API Exception: "
_VALUES_OF = {"Positional input arguments:": "input", "Keyword input arguments:": "input", "Output:": "output"}
_COUNT = re.compile(r" +nan_count=(\d+)")
_VALUE = re.compile(
    r"  [\w\[\]]+=.*"
    r"|    +(?:(?:shape|dtype|device|requires_grad|is_contiguous|min|max|mean|nan_count|inf_count|statistics|repr)=.*"
    r"|[)\]}]|\[\d+\] .*|'\w+': .*|\.\.\. \(\d+ more items\))"
)
_DUMPED = re.compile(r"Dumped (?:in|out)puts to: .*|Tensor dump skipped: .*")


class KernelCalls:
    """Follows the calls of one log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._name, self._section, self._finite = "", "", True

    def record(self, number: int, message: str) -> str:
        """Read a message that begins a call, or reports that it failed. Returns its kind; empty for any other."""
        if message.startswith(_CALL):
            self._name, self._section, self._finite = message.removeprefix(_CALL), "", True
            self._log.calls[self._name] += 1
            return _KERNEL
        if message.startswith(_EXCEPTION):
            self._log.note("crash", number, message)
            return _KERNEL
        return ""

    def bare(self, number: int, text: str) -> str:
        """Read a line of the call's arguments or of its result. Returns its kind; empty for any other line."""
        if not self._name:
            return ""
        if text in _VALUES_OF:
            self._section = _VALUES_OF[text]
            return _KERNEL
        if self._section and _VALUE.fullmatch(text):
            count = _COUNT.fullmatch(text)
            if count and int(count[1]):
                self._not_finite(number, text)
            return _KERNEL
        return _KERNEL if _DUMPED.fullmatch(text) else ""

    def _not_finite(self, number: int, text: str) -> None:
        """Note NaN in a result of a call whose inputs had none. Inputs may be buffers that were never written to."""
        if self._section == "input":
            self._finite = False
        elif self._finite:
            self._log.nan_from.setdefault(self._name, CitedLines()).see(number, text)
