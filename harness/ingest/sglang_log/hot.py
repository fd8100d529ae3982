"""The three kinds of lines that a long log consists of: prefill batches, decode batches, and requests that were answered.

The formats are those of SGLang's scheduler, 0.4.6 to 0.5.23 ("Prefill batch." and "Prefill batch [12]" are older ones), and of
uvicorn's access log.
"""

from __future__ import annotations

import re

from assay.harness.conditions import CACHED_PREFIX_TOKENS
from assay.harness.ingest.result import CitedLines
from assay.harness.ingest.sglang_log.facts import KEPT, Server

_TAIL = r"(?:, [#\w][\w #()/.-]*: [^\s,:\[\]]+)*(?:, ?)?"
_PREFILL = re.compile(
    rf"Prefill batch(?: \[\d+\])?[,.] #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+)(?=,){_TAIL}"
)
_DECODE = re.compile(rf"Decode batch(?: \[\d+\])?[,.] #running-req: (\d+)(?=,){_TAIL}")
_THROUGHPUT = re.compile(r"gen throughput \(token/s\): ([\d.]+)(?=,|$)")
_REQUEST = re.compile(
    r'INFO: +[\w.:-]+ - "(?:(POST /(?:v1/chat/completions|v1/completions|generate))|[A-Z]+ \S+?)(?:\?\S*)? HTTP/[\d.]+" (\d{3})'
    r"(?: [A-Za-z -]+)?"
)
"""Group 1: a request for an answer."""
_WAVE = 4
"""Sequences in a batch, or answers with none between them, that make a wave."""
_INTERVAL = 40
"""SGLang's default of ``decode_log_interval``."""


class Hot:
    """Counts for one server.

    Attributes:
        server: whose figures they are.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        interval = server.arguments.get("decode_log_interval", "")
        self._interval = int(interval) if interval.isdecimal() else _INTERVAL
        self._wave = 0
        self._burst = CitedLines()

    def prefill(self, number: int, text: str) -> bool:
        """Read a prefill batch; False if the line is not one."""
        match = _PREFILL.fullmatch(text)
        if not match:
            return False
        self.close()
        sequences, new, cached = map(int, match.groups())
        server = self.server
        server.prefills.see(number, text)
        server.sequences += sequences
        server.new_tokens += new
        server.cached_tokens += cached
        if sequences and cached >= CACHED_PREFIX_TOKENS * sequences:
            server.prefix_batches.see(number, text)
        if sequences >= _WAVE:
            self._wave = server.decode_steps
        return True

    def decode(self, number: int, text: str) -> bool:
        """Read a decode batch; False if the line is not one."""
        match = _DECODE.fullmatch(text)
        if not match:
            return False
        if self._burst.count:
            self.close()
        server, running = self.server, int(match[1])
        server.decodes.see(number, text)
        server.decode_graph += "graph: True" in text
        server.decode_steps += self._interval
        server.decode_tokens += running * self._interval
        rate = _THROUGHPUT.search(text)
        if rate:
            server.throughput = max(server.throughput, float(rate[1]))
        return True

    def request(self, number: int, text: str) -> bool:
        """Read a line of the access log; False if the line is not one."""
        match = _REQUEST.fullmatch(text)
        if not match:
            return False
        if match[1]:
            if match[2] == "200":
                self.server.answered.see(number, text)
                self._burst.see(number, text)
            else:
                self.server.refused.see(number, text)
        return True

    def close(self) -> None:
        """End a burst of answers: a batch followed it, or the log ends."""
        burst, self._burst = self._burst, CitedLines()
        if burst.count >= _WAVE and len(self.server.bursts) < KEPT:
            self.server.bursts.append((burst, self.server.decode_steps - self._wave))
