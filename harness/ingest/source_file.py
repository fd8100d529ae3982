"""A file as the user gave it: its bytes, its encoding, and its numbered lines, streamed."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path

from assay.harness.errors import UsageError
from assay.harness.reading import regular_file

# Leading bytes used to recognise a format.
_HEAD_BYTES = 1 << 16
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


@dataclass
class SourceFile:
    """A file or folder to ingest.

    Attributes:
        path: the path as given.
        head: the first `_HEAD_BYTES` bytes, or empty for a folder.
        foreign: number of lines with bytes that are not in the file's encoding, counted while `lines` runs.
        first_foreign: the first such line's number, or 0 if there is none.
    """

    path: Path
    head: bytes
    foreign: int = 0
    first_foreign: int = 0

    @classmethod
    def of(cls, path: Path) -> SourceFile:
        """Open a file or a folder.

        Raises:
            UsageError: the path does not exist.
            EvidenceError: the path is a pipe or a device.
        """
        if path.is_dir():
            return cls(path, b"")
        if not path.exists():
            raise UsageError(
                f"The file {path} does not exist.", "a log, a results file, a trace or a dump", "check the path"
            )
        regular_file(path)
        with path.open("rb") as file:
            return cls(path, file.read(_HEAD_BYTES))

    @property
    def encoding(self) -> str:
        """Encoding according to the byte order mark; UTF-8 without one."""
        return next((name for mark, name in _BOMS if self.head.startswith(mark)), "utf-8")

    @property
    def head_text(self) -> str:
        """The head, decoded. Undecodable bytes are replaced."""
        return self.head.decode(self.encoding, "replace").removeprefix("\ufeff")

    @property
    def _files(self) -> dict[str, Path]:
        """The file, or all files of the folder by their relative names."""
        files = self.path.rglob("*") if self.path.is_dir() else (self.path,)
        return {str(file.relative_to(self.path)): file for file in files if file.is_file()}

    @property
    def size(self) -> int:
        """Size in bytes of the file, or of all files in the folder."""
        return sum(file.stat().st_size for file in self._files.values())

    def encoding_notes(self) -> tuple[str, ...]:
        """Report lines that were not in the file's encoding, if any. `lines` must have run."""
        lead = "line is" if self.foreign == 1 else "lines are"
        note = f"{self.foreign:,} {lead} not {self.encoding.upper()} (the first is line {self.first_foreign})"
        return (note,) if self.foreign else ()

    def is_copy_of(self, other: SourceFile) -> bool:
        """Return True if both hold the same bytes: two files, or two folders whose files match by name."""
        mine, theirs = self._files, other._files
        return mine.keys() == theirs.keys() and all(cmp(mine[name], theirs[name], shallow=False) for name in mine)

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield the lines with their numbers from 1, as an editor and ``grep -n`` count them, without line ends.

        A lone carriage return stays in the line, since progress bars use it to rewrite theirs.
        Undecodable bytes are replaced, and lines with such bytes are counted.
        """
        self.foreign = self.first_foreign = 0
        with self.path.open(encoding=self.encoding, errors="replace", newline="\n") as file:
            for number, text in enumerate(file, 1):
                if not text.isascii() and "\ufffd" in text:
                    self.foreign += 1
                    self.first_foreign = self.first_foreign or number
                if number == 1:
                    text = text.removeprefix("\ufeff")
                yield number, text.removesuffix("\n").removesuffix("\r")
