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
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import IO, Any

CHUNK = 1 << 20
GZIP = b"\x1f\x8b"
_GZIP_HEADER = 16 + zlib.MAX_WBITS
_LARGEST_EVENT = 1 << 23
"""Characters after which an event that does not end is taken for broken."""
_TRIED = 100
"""Places behind a broken event at which the next one is looked for, in one chunk."""
_LONGEST_BEGIN = 64
"""Characters that `_NEXT` needs at most."""
_DECODER = json.JSONDecoder(strict=False)
_ARRAY = re.compile(r'"traceEvents"\s*:\s*\[')
_SPACE = re.compile(r"[\s,]*")
_BRACKET = re.compile(r"[\[\]{}]")
_DEEPEST, _LOOKED_AHEAD = 500, 1 << 16
"""Brackets around a value beyond which none can be decoded, and characters in which they are counted."""
_NEXT = re.compile(r'\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id)"\s*:')
_STRING = r'"(?:[^"\\]|\\.)*"'
_EVENT = re.compile(rf'\{{(?:\s*{_STRING}\s*:(?:\s*{_STRING}\s*|[^{{}}\[\]",]+),)*?\s*"ph"\s*:')
"""How an event begins, if only numbers and texts stand before its phase, as all known writers have it."""


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
            at = _SPACE.match(buffer, at).end()  # type: ignore[union-attr]
            if at < len(buffer) and buffer[at] == "]":
                return
            value, end = _decoded(buffer, at)
            if end:
                yield value, ""
                at = end
            elif more and len(buffer) - at < (_LARGEST_EVENT if _incomplete(buffer, at) else CHUNK):
                text = next(texts, None)
                more = text is not None
                buffer, at = buffer[at:] + (text or ""), 0
            elif at < len(buffer):
                yield None, buffer[at : at + 200]
                start = _behind_brackets(buffer, at)
                while (at := (yield from _behind(buffer, start))) == len(buffer) and more:
                    text = next(texts, None)
                    more = text is not None
                    buffer, start = buffer[max(start, at - _LONGEST_BEGIN) :] + (text or ""), 0
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


def _behind(buffer: str, start: int) -> Generator[tuple[Any, str], None, int]:
    """Yield the broken events from a place on, and return where the next whole one begins; the end if none does.

    What follows may lie inside of the broken event, and then is no event itself: an event has a phase.
    """
    for _ in range(_TRIED):
        match = _NEXT.search(buffer, start)
        if match is None:
            return len(buffer)
        value, end = _decoded(buffer, match.start())
        if end and isinstance(value, dict) and "ph" in value:
            return match.start()
        if not end and _EVENT.match(buffer, match.start()):
            if _incomplete(buffer, match.start()):
                return match.start()
            yield None, buffer[match.start() : match.start() + 200]
        start = match.end() if end else max(match.end(), _behind_brackets(buffer, match.start()))
    return start


def _behind_brackets(buffer: str, at: int) -> int:
    """Return where the search goes on behind a place at which no JSON value can be decoded.

    That is the next character or, where brackets are nested deeper than any value that can be decoded, behind `_DEEPEST` of them:
    else each would be tried down to that depth.
    """
    depth = 0
    for bracket in _BRACKET.finditer(buffer, at, at + _LOOKED_AHEAD):
        depth += 1 if bracket[0] in "[{" else -1
        if depth <= 0:
            break
        if depth > _DEEPEST:
            return bracket.start()
    return at + 1


def _decoded(buffer: str, at: int) -> tuple[Any, int]:
    """Decode the JSON value at a place and return where it ends; an end of 0 if there is none."""
    try:
        return _DECODER.raw_decode(buffer, at)
    except (RecursionError, ValueError):  # ValueError: no JSON, or an integer with thousands of digits
        return None, 0


def _incomplete(buffer: str, at: int) -> bool:
    """Return True if a value may only lack its end, which is still to be read."""
    try:
        _DECODER.raw_decode(buffer, at)
    except json.JSONDecodeError as error:
        return error.pos >= len(buffer) - 8 or error.msg.startswith("Unterminated string")
    except (RecursionError, ValueError):
        return False
    return False
