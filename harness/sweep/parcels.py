"""Folders as parcels: files travel between machines that share no file system, whole, and only those that have changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from assay.harness.files import LOCK

PARCEL = 256 * 2**20
"""Most bytes that travel at once."""
Files = Mapping[str, bytes | None]
"""Contents by path in a folder; None for a file that is gone. The path "" stands for a file that is no folder."""


def pack(path: Path) -> dict[str, bytes]:
    """Return the files of a folder, or the one that a path leads to; nothing if it does not exist."""
    if path.is_file():
        return {"": path.read_bytes()}
    changes, files = Changes(path), dict[str, bytes]()
    while more := {name: content for name, content in changes.collect(large=True).items() if content is not None}:
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


@dataclass
class Changes:
    """What has changed in a folder since the last look.

    Attributes:
        folder: which.
    """

    folder: Path
    _seen: dict[str, tuple[int, int]] = field(default_factory=dict)

    def collect(self, large: bool = False) -> dict[str, bytes | None]:
        """Return the files that are new, changed or gone since the last call. Locks and unfinished files are left out.

        One parcel holds `PARCEL` bytes, and what does not fit comes with the next call.

        Args:
            large: whether to return larger files too, each of which is then more than a parcel.
        """
        now: dict[str, tuple[int, int]] = {}
        changed: dict[str, bytes | None] = {}
        room = PARCEL
        for root, _, names in os.walk(self.folder):
            for name in names:
                path = Path(root, name)
                if name == LOCK or name.endswith(".part") or path.is_symlink():
                    continue
                with suppress(OSError):  # it was removed meanwhile
                    status, key = path.stat(), path.relative_to(self.folder).as_posix()
                    stamp = (status.st_mtime_ns, status.st_size)
                    if not path.is_file():
                        continue
                    if self._seen.get(key) != stamp:
                        if status.st_size > room and not (large and room == PARCEL):
                            now[key] = self._seen.get(key, (0, -1))
                            continue
                        changed[key] = path.read_bytes()
                        room -= status.st_size
                    now[key] = stamp
        changed.update(dict.fromkeys(self._seen.keys() - now.keys()))
        self._seen = now
        return changed
