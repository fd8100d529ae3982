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
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

CHUNK = 1 << 20
_LARGEST_EVENT = 1 << 23
"""Characters after which an event that does not end is taken for broken."""
_GZIP_HEADER = 16 + zlib.MAX_WBITS
GZIP = b"\x1f\x8b"
_DECODER = json.JSONDecoder(strict=False)
_ARRAY = re.compile(r'"traceEvents"\s*:\s*\[')
_BRACKET = re.compile(r"[][{}]")
_LOOKED_AHEAD = 1 << 16
_DEEPEST = 500
"""Brackets around a value of an event; Python's decoder gives up at about 1,000."""
_SPACE = re.compile(r"[\s,]*")
_NEXT = re.compile(r'\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id)"\s*:')


_STRING = r'"(?:[^"\\]|\\.)*"'
_EVENT = re.compile(rf'\{{(?:\s*{_STRING}\s*:(?:\s*{_STRING}\s*|[^{{}}\[\]",]+),)*?\s*"ph"\s*:')
"""How an event begins, if only numbers and texts stand before its phase, as all known writers have it."""


class Event(NamedTuple):
    """One element of the array.

    Attributes:
        number: counted from 1.
        value: the event; None where it is not JSON.
        text: what it begins with, where it is not JSON.
    """

    number: int
    value: Any
    text: str = ""


@dataclass
class EventStream:
    """Reads the events of a file.

    Attributes:
        path: the file, which may be compressed with gzip.
        ended: why the array did not end as it should; empty if it did, or while `events` runs.
        head: what stands before the array, of an object: its other members, as text.
    """

    path: Path
    ended: str = ""
    head: str = field(default="", repr=False)

    def events(self) -> Iterator[Event]:
        """Yield all events in order."""
        with self.path.open("rb") as raw:
            compressed = raw.read(2) == GZIP
            raw.seek(0)
            yield from self._events(self._text(self._unpacked(raw) if compressed else _chunks(raw)))

    def _text(self, chunks: Iterator[bytes]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        for data in chunks:
            yield decoder.decode(data)
        yield decoder.decode(b"", True)

    def _unpacked(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield the unpacked bytes of a gzip file, up to where it is damaged, which Python's own reader does not give."""
        member, begun = zlib.decompressobj(_GZIP_HEADER), False
        try:
            for chunk in _chunks(file):
                packed = chunk
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

    def _events(self, chunks: Iterator[str]) -> Iterator[Event]:
        buffer, at = self._begin(chunks)
        number, more, lost = 0, True, False
        while more or at < len(buffer):
            at = _SPACE.match(buffer, at).end()  # type: ignore[union-attr]
            if at < len(buffer) and buffer[at] == "]":
                return
            lost = lost and _EVENT.match(buffer, at) is None
            value, end = _decoded(buffer, at)
            following = None if end and not lost else _NEXT.search(buffer, at + 1 if end else _within_depth(buffer, at))
            if end and (not lost or _is_event(value)):
                number, lost = number + 1, False
                yield Event(number, value)
                at = end
            elif following is not None and (end or not _incomplete(buffer, at)):
                if not lost:
                    number += 1
                    yield Event(number, None, buffer[at : at + 200])
                # What follows may lie inside of the broken event, and then is no event itself.
                at, lost = following.start(), True
            elif more and len(buffer) - at < _LARGEST_EVENT:
                text = next(chunks, None)
                more = text is not None
                buffer, at = buffer[at:] + (text or ""), 0
            elif at < len(buffer):
                if not lost:
                    yield Event(number + 1, None, buffer[at : at + 200])
                    number, lost = number + 1, True
                at = following.start() if following is not None else len(buffer)
        self.ended = self.ended or "the array of events has no end"

    def _begin(self, chunks: Iterator[str]) -> tuple[str, int]:
        """Read the text from the first event on."""
        buffer = ""
        for text in chunks:
            buffer += text
            begin = buffer.lstrip()
            if begin.startswith("["):
                return begin, 1
            if found := _ARRAY.search(buffer):
                self.head = buffer[: found.start()][: 1 << 16]
                return buffer[found.end() :], 0
            if len(buffer) > _LARGEST_EVENT:
                break
        self.ended = "there is no array of events"
        return "", 0


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while data := file.read(CHUNK):
        yield data


def _decoded(buffer: str, at: int) -> tuple[Any, int]:
    """Decode the JSON value at a place and return where it ends; an end of 0 if there is none."""
    try:
        return _DECODER.raw_decode(buffer, at)
    except (json.JSONDecodeError, RecursionError, ValueError):  # ValueError: an integer with thousands of digits
        return None, 0


def _within_depth(buffer: str, at: int) -> int:
    """Return where the search for the next event begins, behind a place at which there is no JSON value.

    That is behind the place, or, where brackets are nested deeper than any value that can be decoded, behind `_DEEPEST` of them,
    so that each is tried once.
    """
    deep = 0
    for found in _BRACKET.finditer(buffer, at, at + _LOOKED_AHEAD):
        deep += 1 if found[0] in "[{" else -1
        if deep <= 0:
            break
        if deep > _DEEPEST:
            return found.start()
    return at + 1


def _is_event(value: Any) -> bool:
    return isinstance(value, dict) and "ph" in value


def _incomplete(buffer: str, at: int) -> bool:
    """Return True if a value may only lack its end, which is still to be read."""
    try:
        _DECODER.raw_decode(buffer, at)
    except json.JSONDecodeError as error:
        return error.pos >= len(buffer) - 8 or error.msg.startswith("Unterminated string")
    except (RecursionError, ValueError):
        return False
    return False
