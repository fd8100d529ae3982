"""Worktrees of assay's own, in a temporary folder: lent to one probe at a time, and kept where a build in them may be used again.

Any number of threads and processes of a machine share the folder; locks of files keep them apart, which the operating system
releases when a process ends. On a machine without the repository, the folder holds a copy of the range beside them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from assay.harness.bisect.commits.repo import Repository

_PREFIX = "assay-worktree-"
_LOCK = "assay.lock"
_HOME = "home"
"""Marks the folder on the machine of the repository; elsewhere, one of the same name has a copy of the range."""
_COPY, _HOLDS = "copy", "holds"
"""The copy; and beside each worktree, the commit that was built in it, which is not there while it is built."""
_SPARE = 8
"""Free worktrees that are kept for what was built in them: other commits are probed between the culprit's first and last probe."""


class Worktree:
    """A worktree that is lent.

    Attributes:
        path: its top.
        built: the commit is checked out here and was built.
    """

    def __init__(self, repository: Repository, path: Path, commit: str) -> None:
        self._repository, self._commit = repository, commit
        self._holds = path.parent / _HOLDS
        self.path, self.built = path, _read(self._holds) == commit

    def check_out(self, keep_ignored: bool) -> None:
        """Check the commit out, with nothing left of another one but, if `keep_ignored`, the files that git ignores.

        Raises:
            GitFailed: git failed, for instance because the disk is full.
        """
        self._holds.unlink(missing_ok=True)
        self._repository.checkout(self.path, self._commit, keep_ignored)

    def keep(self) -> None:
        """Note that the commit was built here, so that its next probe need not build it."""
        self._holds.write_text(self._commit)
        self.built = True


class Worktrees:
    """The worktrees of one bisection on this machine.

    Args:
        repository: of the commits.
        folder: of the worktrees; see `worktrees`.
    """

    def __init__(self, repository: Repository, folder: Path) -> None:
        self._repository, self._folder = repository, folder

    @classmethod
    def at(cls, folder: Path, path: Path, copy: Path | None) -> Worktrees:
        """Open the folder that `worktrees` made, or on another machine one of the same name.

        Args:
            folder: the folder.
            path: of the repository on the machine of `worktrees`.
            copy: what `Repository.write_copy` wrote.

        Raises:
            GitFailed: git failed, for instance because the disk is full.
        """
        if copy is None or (folder / _HOME).exists():
            return cls(Repository(path), folder)
        for other in folder.parent.glob(f"{_PREFIX}*"):
            if other != folder and (other / _COPY).exists():
                _remove_unused(other, None)
        folder.mkdir(exist_ok=True)
        with _locked(folder / f"{_COPY}.lock"):
            there = folder / _COPY / path.name
            if there.exists():
                return cls(Repository(there), folder)
            part = folder / "part"
            shutil.rmtree(part, ignore_errors=True)
            Repository.from_copy(copy, part / path.name)
            part.rename(folder / _COPY)
            return cls(Repository(there), folder)

    @contextmanager
    def lend(self, commit: str) -> Iterator[Worktree]:
        """Lend a worktree for a commit: if it was built in one that is free, that one.

        Raises:
            GitFailed: git cannot create one.
        """
        with _locked(self._folder / _LOCK, fcntl.LOCK_SH):
            place, lock = self._taken(commit)
            try:
                yield Worktree(self._repository, place / self._repository.path.name, commit)
            finally:
                # Without a time of ours, all that is lent within some milliseconds has one time: the system's ticks are that long.
                now = time.time_ns()
                os.utime(place, ns=(now, now))
                os.close(lock)

    def _taken(self, commit: str) -> tuple[Path, int]:
        """Choose a place and lock it; return it with its lock."""
        with _locked(self._folder / "choice.lock"), ExitStack() as others:
            places = sorted(self._folder.glob("[0-9]*"), key=lambda place: place.stat().st_mtime_ns)
            free = {place: lock for place in places if (lock := _try(place / _LOCK)) is not None}
            for lock in free.values():
                others.callback(os.close, lock)
            built = [place for place in free if _read(place / _HOLDS) == commit]
            empty = [place for place in free if not _read(place / _HOLDS)]
            if not built and not empty and len(free) <= _SPARE:
                place = self._folder / str(len(places))
                self._repository.add_worktree(place / self._repository.path.name, commit)
                return place, _lock(place / _LOCK, fcntl.LOCK_EX)
            chosen = [*built, *empty, *free][0]
            return chosen, os.dup(free[chosen])


@contextmanager
def worktrees(repository: Repository) -> Iterator[Path]:
    """Make a temporary folder for worktrees, which is removed at the end with all that are in it.

    What a killed process left behind is removed first.
    """
    for tree in repository.linked_worktrees():
        # Remove only what is ours: a linked worktree (its .git is a file) in a folder with our prefix and lock.
        if tree.parent.parent.name.startswith(_PREFIX) and not (tree / ".git").is_dir():
            _remove_unused(tree.parent.parent, repository)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()
    (folder / _HOME).touch()
    with _locked(folder / _LOCK, fcntl.LOCK_SH):
        try:
            yield folder
        finally:
            repository.remove_worktrees(folder)


def _remove_unused(folder: Path, repository: Repository | None) -> None:
    """Remove a folder of worktrees, of a repository or of the copy in it, whose process has ended."""
    if not (folder / _LOCK).exists():
        return
    lock = _try(folder / _LOCK)
    if lock is None:
        return  # its bisection is still running
    if repository is not None:
        repository.remove_worktrees(folder)
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


@contextmanager
def _locked(file: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    lock = _lock(file, how)
    try:
        yield
    finally:
        os.close(lock)


def _try(file: Path) -> int | None:
    """Lock a file, which is made if there is none; None if another process or thread has it."""
    try:
        return _lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def _lock(file: Path, how: int) -> int:
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, how)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _read(file: Path) -> str:
    with suppress(OSError):
        return file.read_text()
    return ""
