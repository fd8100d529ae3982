"""Logs of SGLang servers, and of pytest runs that start them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from assay.harness.ingest.result import Document
from assay.harness.ingest.sglang_log.document import document
from assay.harness.ingest.sglang_log.facts import Log
from assay.harness.ingest.sglang_log.reader import LogReader
from assay.harness.ingest.sglang_log.statements import statements
from assay.harness.ingest.source import Source
from assay.harness.ingest.statement import Statement

_TIME = r"^\S{0,200}(?:\w{1,60}: )?\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?(?: [A-Z]+\d+)*\] "
_SIGNS = re.compile(
    r"^=+ test session starts =+\r?$|^\[METRIC\] \w+=|^command=python3? -m sglang"
    rf"|{_TIME}(?:server_args=|(?:Prefill|Decode) batch|INFO:  |SGLang Kernel API Call: )"
    r"|^\S{0,200}(?:\w{1,60}: )?\[[-\d]+ [\d:]+\] Load weight |^\S+sglang/launch_server\.py:\d+: ",
    re.MULTILINE,
)


class SglangLog:
    """Reads such logs. What a log's lines may be is in `kinds` and `blocks`."""

    id = "sglang-log"
    title = "SGLang or pytest log"

    def recognises(self, source: Source) -> bool:
        """By a line that only these programs print."""
        return _SIGNS.search(source.head_text) is not None

    def read(self, source: Source) -> Document:
        """Read all of it, a line at a time."""
        return document(read_log(source), source, self.id, self.title)

    def statements(self, source: Source) -> Iterable[Statement]:
        """Metrics, scores and outcomes of tests."""
        return statements(read_log(source), str(source.path))


def read_log(source: Source) -> Log:
    """Read what the log states, before anything is concluded from it."""
    return LogReader().read(source.lines())


READER = SglangLog()
