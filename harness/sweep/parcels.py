"""Folders as parcels: files travel between machines that share no file system, whole, and only those that have changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from assay.harness.files import LOCK

Files = Mapping[str, bytes | None]
"""Contents by path in a folder; None for a file that is gone. The path "" stands for a file that is no folder."""


def pack(path: Path) -> dict[str, bytes]:
    """Return the files of a folder, or the one that a path leads to; nothing if it does not exist."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {name: content for name, content in Changes(path).collect().items() if content is not None}


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

    def collect(self) -> dict[str, bytes | None]:
        """Return the files that are new, changed or gone since the last call. Locks and unfinished files are left out."""
        now: dict[str, tuple[int, int]] = {}
        changed: dict[str, bytes | None] = {}
        for root, _, names in os.walk(self.folder):
            for name in names:
                path = Path(root, name)
                if name == LOCK or name.endswith(".part") or path.is_symlink():
                    continue
                with suppress(OSError):  # it was removed meanwhile
                    found, key = path.stat(), path.relative_to(self.folder).as_posix()
                    stamp = (found.st_mtime_ns, found.st_size)
                    if path.is_file() and self._seen.get(key) != stamp:
                        changed[key] = path.read_bytes()
                    now[key] = stamp
        changed.update(dict.fromkeys(self._seen.keys() - now.keys()))
        self._seen = now
        return changed
