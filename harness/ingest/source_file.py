"""A file as it was given: its bytes, its encoding, and its numbered lines, streamed."""

from __future__ import annotations

import codecs
import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from assay.harness.errors import EvidenceError, UsageError

_HEAD_BYTES = 1 << 16
"""Bytes from which a format is recognised."""
BLOCK = 1 << 20
"""Bytes of lines that are decoded at once."""
LONGEST_LINE = 1 << 27
"""Bytes of the longest line that is read: a sparse file is one line of any length."""
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


@dataclass
class SourceFile:
    """A file or a folder that is ingested.

    Attributes:
        path: as given.
        head: the first `_HEAD_BYTES` bytes; empty for a folder.
        foreign: lines that were not in the file's encoding and were read as Windows-1252, counted while `lines` runs.
        foreign_lines: the numbers of the first of them.
    """

    path: Path
    head: bytes
    foreign: int = 0
    foreign_lines: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path) -> SourceFile:
        """Open a file or a folder.

        Raises:
            UsageError: there is none, or it is the root of the file system.
        """
        if path.is_dir():
            if path.resolve() == Path(path.resolve().anchor):
                raise UsageError(f"{path} leads to the root of the file system.", "a folder of results", "name it")
            return cls(path, b"")
        if not path.is_file():
            raise UsageError(f"There is no file {path}.", "a log, a results file, a trace or a dump", "check the path")
        with path.open("rb") as file:
            return cls(path, file.read(_HEAD_BYTES))

    @property
    def encoding(self) -> str:
        """Encoding by its byte order mark; UTF-8 without one."""
        return next((name for mark, name in _BOMS if self.head.startswith(mark)), "utf-8")

    @property
    def head_text(self) -> str:
        """The head, decoded; bytes that do not decode are replaced."""
        return self.head.decode(self.encoding, "replace").removeprefix("\ufeff")

    @property
    def size(self) -> int:
        """Bytes of the file, or of all files in the folder."""
        files = self.path.rglob("*") if self.path.is_dir() else (self.path,)
        return sum(file.stat().st_size for file in files if file.is_file())

    def encoding_notes(self) -> tuple[str, ...]:
        """Report that lines were not in the file's encoding; empty if all were. `lines` must have run."""
        if not self.foreign:
            return ()
        lead = "line is" if self.foreign == 1 else "lines are"
        return (f"{self.foreign:,} {lead} not {self.encoding.upper()} (the first is line {self.foreign_lines[0]})",)

    def sha256(self) -> str:
        """Hash the whole file, in hexadecimal; empty for a folder."""
        if self.path.is_dir():
            return ""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def is_copy_of(self, other: SourceFile) -> bool:
        """Return True if both hold the same bytes: two files, or all files of two folders by their names."""
        if self.path.is_dir() != other.path.is_dir() or self.size != other.size:
            return False
        if not self.path.is_dir():
            return self.sha256() == other.sha256()
        names = [
            {path.relative_to(side.path) for path in side.path.rglob("*") if path.is_file()} for side in (self, other)
        ]
        return names[0] == names[1] and all(
            SourceFile.of(self.path / name).sha256() == SourceFile.of(other.path / name).sha256() for name in names[0]
        )

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield the lines in order with their numbers from 1, as an editor and ``grep -n`` count, reading a megabyte at a time.

        A line has no line end. A lone carriage return stays: a progress bar rewrites its line.
        A line that does not decode is read as Windows-1252 and counted.
        """
        self.foreign, self.foreign_lines = 0, []
        if self.encoding != "utf-8":
            with self.path.open(encoding=self.encoding, errors="replace", newline="\n") as file:
                for number, text in enumerate(iter(lambda: file.readline(LONGEST_LINE), ""), 1):
                    if len(text) == LONGEST_LINE:
                        raise self._too_long(number)
                    yield number, text.removeprefix("\ufeff").removesuffix("\n").removesuffix("\r")
            return
        number = 1
        with self.path.open("rb") as raw:
            while rows := self._rows(raw, number):
                if number == 1:
                    rows[0] = rows[0].removeprefix(codecs.BOM_UTF8)
                yield from enumerate(self._decoded(rows, number), number)
                number += len(rows)

    def count_lines(self) -> int:
        """Count its lines, whatever their length; the last may lack its end."""
        count, last = 0, b"\n"
        with self.path.open("rb") as raw:
            while block := raw.read(BLOCK):
                count, last = count + block.count(b"\n"), block[-1:]
        return count + (last != b"\n")

    def _rows(self, raw: IO[bytes], number: int) -> list[bytes]:
        """Read the next lines of about `BLOCK` bytes."""
        block = raw.read(BLOCK)
        if block and not block.endswith(b"\n"):
            rest = raw.readline(LONGEST_LINE)
            if len(rest) == LONGEST_LINE and not rest.endswith(b"\n"):
                raise self._too_long(number + block.count(b"\n"))
            block += rest
        return io.BytesIO(block).readlines()

    def _too_long(self, number: int) -> EvidenceError:
        return EvidenceError(
            f"{self.path}: line {number:,} has more than {LONGEST_LINE:,} bytes.",
            "a text file with lines",
            "check that it is the right file",
        )

    def _decoded(self, rows: list[bytes], first: int) -> list[str]:
        """Decode the lines without their ends: all at once where all of them decode, which is four times as fast."""
        try:
            text = b"".join(rows).decode()
        except UnicodeDecodeError:
            return [self._line(row, number) for number, row in enumerate(rows, first)]
        lines = text.split("\n")
        if not lines[-1]:
            lines.pop()
        return [line.removesuffix("\r") for line in lines] if "\r" in text else lines

    def _line(self, row: bytes, number: int) -> str:
        row = row.removesuffix(b"\n").removesuffix(b"\r")
        try:
            return row.decode()
        except UnicodeDecodeError:
            self.foreign += 1
            if len(self.foreign_lines) < 5:
                self.foreign_lines.append(number)
            return row.decode("cp1252", "replace")
