"""Calls of kernels that SGLang writes into its log: the text of ``SGLANG_KERNEL_API_LOGLEVEL`` (1 names, 3 shapes, 5 statistics).

Read in SGLang 0.5.23, ``kernels/kernel_api_logging.py``. The text has no tensors: they are in the folders that level 10 writes
(``SGLANG_KERNEL_API_DUMP_DIR``), which `assay.harness.ingest.tensors` reads.
"""

from __future__ import annotations

import re

from assay.harness.ingest.result import CitedLines
from assay.harness.ingest.sglang_log.facts import KEPT, Log

_KIND = "kernel-call"
_CALL = "SGLang Kernel API Call: "
_EXCEPTION = "SGLang Kernel API Exception: "
_SECTIONS = {"Positional input arguments:": "input", "Keyword input arguments:": "input", "Output:": "output"}
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
            if self._name in self._log.calls or len(self._log.calls) < KEPT:
                self._log.calls[self._name] += 1
            return _KIND
        if message.startswith(_EXCEPTION):
            self._log.notices.setdefault(("crash", message[:200]), CitedLines()).see(number, message)
            return _KIND
        return ""

    def bare(self, number: int, text: str) -> str:
        """Read a line of the call's arguments or of its result. Returns its kind; empty for any other line."""
        if not self._name:
            return ""
        if text in _SECTIONS:
            self._section = _SECTIONS[text]
            return _KIND
        if self._section and _VALUE.fullmatch(text):
            count = _COUNT.fullmatch(text)
            if count and int(count[1]):
                self._not_finite(number, text)
            return _KIND
        return _KIND if _DUMPED.fullmatch(text) else ""

    def _not_finite(self, number: int, text: str) -> None:
        """Note NaN in a result of a call whose inputs had none. Inputs may be buffers that were never written to."""
        if self._section == "input":
            self._finite = False
        elif self._finite and (self._name in self._log.nan_from or len(self._log.nan_from) < KEPT):
            self._log.nan_from.setdefault(self._name, CitedLines()).see(number, text)
