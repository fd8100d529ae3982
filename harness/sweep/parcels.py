"""Folders as parcels: files travel between machines that share no file system, whole, and only those that have changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from assay.harness.files import LOCK

PARCEL = 256 * 2**20
"""Most bytes that travel at once."""
_SMALL = 2**20
"""Most bytes of a file that is compared by its contents. One that is mapped into memory changes without a change of its time."""
_NEVER = (0, -1)
Files = Mapping[str, bytes | None]
"""Contents by path in a folder; None for a file that is gone. The path "" stands for a file that is no folder."""


def pack(path: Path) -> dict[str, bytes]:
    """Return the files of a folder, or the one that a path leads to; nothing if it does not exist."""
    if path.is_file():
        return {"": path.read_bytes()}
    changes, files = Changes(path), dict[str, bytes]()
    while more := {name: content for name, content in changes.collect(at_rest=True).items() if content is not None}:
        files |= more
    return files


def unpack(files: Files, path: Path) -> None:
    """Write files below a folder, or one to a path, each so that no reader sees half of it.

    Raises:
        ValueError: a name leads out of the folder.
    """
    for name, content in files.items():
        to = path / name if name else path
        if not to.resolve().is_relative_to(path.resolve()):
            raise ValueError(f"{name} leads out of {path}")
        if content is None:
            to.unlink(missing_ok=True)
            continue
        to.parent.mkdir(parents=True, exist_ok=True)
        # Not `write_whole`: what a power failure leaves is not taken for evidence, since its hash is another.
        part = to.with_name(f".{to.name}.{os.getpid()}.part")
        part.write_bytes(content)
        part.replace(to)


def _effects_first(file: tuple[str, Path]) -> int:
    """Return the place of a file in the order in which a folder is read that is written to.

    A server admits a request, counts its calls, and its answer is recorded. Read in the opposite order, no copy has an answer whose
    calls it lacks, or calls whose request it lacks.
    """
    return next((place for place, name in enumerate(("records.jsonl", ".i64")) if file[0].endswith(name)), 2)


@dataclass
class Changes:
    """What has changed in a folder since the last look.

    Attributes:
        folder: which.
    """

    folder: Path
    _stamps: dict[str, tuple[int, int]] = field(default_factory=dict)
    _contents: dict[str, bytes] = field(default_factory=dict)

    def collect(self, at_rest: bool = False) -> dict[str, bytes | None]:
        """Return the files that are new, changed or gone since the last call. Locks and unfinished files are left out.

        One parcel holds `PARCEL` bytes, and what does not fit comes with the next call.

        Args:
            at_rest: whether nothing changes any more. Then large files are compared by their contents, as small ones always are,
                and those that are larger than a parcel come too, each in one of its own.
        """
        there: dict[str, tuple[int, int]] = {}
        changed: dict[str, bytes | None] = {}
        room = PARCEL
        for key, path in sorted(self._files(), key=_effects_first):
            with suppress(OSError):  # it was removed meanwhile
                status = path.stat()
                stamp = (status.st_mtime_ns, status.st_size)
                there[key] = self._stamps.get(key, _NEVER)
                if stamp == there[key] and status.st_size > _SMALL and not at_rest:
                    continue
                if status.st_size > room and not (at_rest and room == PARCEL):
                    continue
                content = path.read_bytes()
                digest = hashlib.sha256(content).digest()
                there[key] = stamp
                if self._contents.get(key) != digest:
                    self._contents[key] = digest
                    changed[key] = content
                    room -= len(content)
        for key in self._stamps.keys() - there.keys():
            changed[key] = None
            self._contents.pop(key, None)
        self._stamps = there
        return changed

    def _files(self) -> Iterator[tuple[str, Path]]:
        """Yield the files of the folder that travel."""
        for root, _, names in os.walk(self.folder):
            for path in (Path(root, name) for name in names):
                unfinished = path.name.startswith(".") and path.name.endswith(".part")
                if path.name != LOCK and not unfinished and not path.is_symlink() and path.is_file():
                    yield path.relative_to(self.folder).as_posix(), path
