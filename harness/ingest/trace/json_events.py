"""The events of a Chrome trace, one at a time: a profile of 100 MB is never in memory as a whole.

The format is Google's "Trace Event Format": either a JSON array of events, whose closing bracket may be missing, or an object whose
``traceEvents`` is that array. PyTorch's profiler writes the object with an event on several lines, SGLang's merger of ranks writes
it on one line, MLC-LLM's recorder writes the array on one line.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

CHUNK = 1 << 20
GZIP = b"\x1f\x8b"
_GZIP_HEADER = 16 + zlib.MAX_WBITS
_LARGEST_EVENT = 1 << 23
"""Characters after which an event that does not end is taken for broken."""
_TRIED = 100
"""Places behind an event that does not end at which the next one is looked for."""
_DEEPEST = 500
"""Brackets around a value beyond which none can be decoded."""
_DECODER = json.JSONDecoder(strict=False)
_ARRAY = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,}]*")
"""What stands between two events, with what a broken one closes too often."""
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
"""A string, which may lack its end, or a bracket outside of one."""
_CLOSING = {"{": "}", "[": "]"}
_NEXT = re.compile(r'\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id)"\s*:')
"""How an event begins."""


class EventStream:
    """Reads the events of a file, which may be compressed with gzip.

    Attributes:
        ended: why the array did not end as it should; empty if it did, or while `events` runs.
        head: what stands before the array, of an object: its other members, as text.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.ended, self.head = path, "", ""

    def events(self) -> Iterator[tuple[int, Any, str]]:
        """Yield all elements of the array in order: its number from 1 and its value; None, with what it begins with, if no JSON."""
        with self._path.open("rb") as raw:
            compressed = raw.read(2) == GZIP
            raw.seek(0)
            chunks = iter(lambda: raw.read(CHUNK), b"")
            texts = codecs.iterdecode(self._unpacked(raw) if compressed else chunks, "utf-8-sig", "replace")
            for number, (value, text) in enumerate(self._values(texts), 1):
                yield number, value, text

    def _unpacked(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield the unpacked bytes of a gzip file, up to where it is damaged, which Python's own reader does not give."""
        member, begun = zlib.decompressobj(_GZIP_HEADER), False
        try:
            while packed := file.read(CHUNK):
                while packed:
                    begun = True
                    yield member.decompress(packed, CHUNK)
                    packed = member.unconsumed_tail
                    if member.eof:
                        packed, member, begun = member.unused_data, zlib.decompressobj(_GZIP_HEADER), False
        except zlib.error as error:
            self.ended = f"the compressed data is damaged ({error})"
            return
        if begun:
            self.ended = "the compressed data is damaged (it ends early)"

    def _values(self, texts: Iterator[str]) -> Iterator[tuple[Any, str]]:
        buffer, at, more = self._begin(texts), 0, True
        while more or at < len(buffer):
            at = _BETWEEN.match(buffer, at).end()  # type: ignore[union-attr]
            if at < len(buffer) and buffer[at] == "]":
                return
            value, end = _decoded(buffer, at)
            if end:
                yield value, ""
                at = end
            elif end := _end_of_broken(buffer, at):
                yield None, buffer[at : at + 200]
                at = end
            elif more and len(buffer) - at < _LARGEST_EVENT:
                text = next(texts, None)
                more = text is not None
                buffer, at = buffer[at:] + (text or ""), 0
            elif at < len(
                buffer
            ):  # it does not end: what follows may lie inside of it, and has a phase if it is an event
                yield None, buffer[at : at + 200]
                begins = (match.start() for match in islice(_NEXT.finditer(buffer, at + 1), _TRIED))
                at = next((start for start in begins if _is_event(_decoded(buffer, start)[0])), len(buffer))
        self.ended = self.ended or "the array of events has no end"

    def _begin(self, texts: Iterator[str]) -> str:
        """Read the text from the first event on."""
        buffer = ""
        for text in texts:
            buffer += text
            begin = buffer.lstrip()
            if begin.startswith("["):
                return begin[1:]
            if array := _ARRAY.search(buffer):
                self.head = buffer[: array.start()][: 1 << 16]
                return buffer[array.end() :]
            if len(buffer) > _LARGEST_EVENT:
                break
        self.ended = "there is no array of events"
        return "]"


def _is_event(value: Any) -> bool:
    return isinstance(value, dict) and "ph" in value


def _end_of_broken(buffer: str, at: int) -> int:
    """Return where a value ends that is no JSON: behind the bracket that closes it; 0 if none in the buffer does."""
    closing: list[str] = []
    for match in _TOKEN.finditer(buffer, at):
        if match[0] in _CLOSING:
            closing.append(_CLOSING[match[0]])
        elif match[0] in _CLOSING.values() and closing and closing.pop() != match[0]:
            return 0
        if not closing:
            return match.end()
        if len(closing) > _DEEPEST:
            return 0
    return 0


def _decoded(buffer: str, at: int) -> tuple[Any, int]:
    """Decode the JSON value at a place and return where it ends; an end of 0 if there is none."""
    try:
        return _DECODER.raw_decode(buffer, at)
    except (RecursionError, ValueError):  # ValueError: no JSON, or an integer with thousands of digits
        return None, 0
