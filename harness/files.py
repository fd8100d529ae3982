"""Files: written so that no reader ever sees half of one; locked folders, safe names, timestamps, and paths in commands that can be
repeated on another machine.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from assay.harness.errors import EvidenceError, UsageError
from assay.harness.reading import regular_file, whole_file

if TYPE_CHECKING:
    from filelock import FileLock

# File of a folder's lock. It holds the id of the process that has the lock.
LOCK = ".lock"
_UNFINISHED = ".*.part"  # the files that `write_whole` is writing


def file_name(text: str) -> str:
    """Turn `text` into the name of a file or folder: everything but letters, digits, "_", "-" and "." becomes "-"."""
    return "".join(c if c.isalnum() or c in "_-." else "-" for c in text)


def file_hash(path: Path) -> str:
    """Hash the content of a file with SHA-256, in hexadecimal.

    Raises:
        OSError: it is missing or cannot be read.
        EvidenceError: it is not a regular file.
    """
    regular_file(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def timestamp() -> str:
    """Return the current time in the format of documents: ISO 8601 in UTC, to the second."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def lock_folder(folder: Path) -> FileLock:
    """Keep other processes from writing to a folder for as long as the returned lock exists; this process can take it twice.

    The operating system releases it when its process ends, for whatever reason.

    Raises:
        UsageError: another process holds the lock.
        EvidenceError: the folder cannot be written.
    """
    from filelock import FileLock, Timeout

    place = folder.resolve() / LOCK
    lock = FileLock(place, timeout=0, is_singleton=True, thread_local=False)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        owner = whole_file(place).decode(errors="replace").strip() or "unknown"
        raise UsageError(
            f"{folder} is in use by another run (process {owner}).",
            "a folder that no other run writes to",
            "wait until it has ended, or name another folder with --out",
        ) from None
    except OSError as error:
        raise EvidenceError(
            f"{folder} cannot be written: {error.strerror}.", "a writable folder", "name another one with --out"
        ) from None
    with suppress(OSError):  # the lock holds, even if a full disk has no room for the id
        place.write_text(f"{os.getpid()}\n")
    return lock


def is_unused(folder: Path, remains: Iterable[str] = ()) -> bool:
    """Return True if a folder does not exist, or holds nothing but a lock, unfinished files, and `remains`."""
    if not folder.exists():
        return True
    ignored = {LOCK, *remains}
    return folder.is_dir() and all(file.name in ignored or file.match(_UNFINISHED) for file in folder.iterdir())


def remove_unfinished(folder: Path) -> None:
    """Remove the files that killed processes left unfinished, in a folder that this process has locked."""
    for file in folder.rglob(_UNFINISHED):
        file.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write a file that appears complete or not at all; until then an older version stays in place.

    Args:
        path: the file. Its folder is created if missing.
        content: text is encoded as UTF-8, with its newlines unchanged.
        durable: whether the file must survive a power failure, which costs a disk about 10 ms. Without it the file still
            survives the death of the process, which is enough for files that a server writes between two forward passes.

    Raises:
        EvidenceError: the folder or the file cannot be written, for instance because the disk is full.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise EvidenceError(
            f"{path} cannot be written: {error.strerror or error}.",
            "a writable folder on a disk with free space",
            "free some space and run the same command again, or choose another folder",
        ) from None


def shown(path: Path) -> str:
    """Shorten a path for a person: relative to the working directory, or with ``~`` below the home folder, or else unchanged."""
    word = portable(str(path))
    home = Path.home()
    if Path(word).is_absolute() and path.is_relative_to(home) and home != Path("/"):
        return f"~/{path.relative_to(home)}"
    return word


def portable(word: str, here: Path | None = None) -> str:
    """Make the path in a word of a command relative to the working directory if it lies below it; leave others unchanged.

    Args:
        word: a path, or a flag with one, such as ``--out=/home/ci/repo/runs/1``.
        here: the working directory; by default that of the process.
    """
    flag, equals, value = word.rpartition("=") if word.startswith("-") else ("", "", word)
    path = Path(value)
    if not path.is_absolute():
        return word
    base = here or Path.cwd()
    for root in (base, base.resolve()):
        if path.is_relative_to(root):
            return f"{flag}{equals}{path.relative_to(root)}"
    return word
