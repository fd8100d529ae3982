"""Commands that can be repeated on another machine: paths below the working directory are written relative to it."""

from __future__ import annotations

from pathlib import Path


def shown(path: Path) -> str:
    """Shorten a path for a person: relative below the working directory, with ``~`` below the home folder, else as it is."""
    word = portable(str(path))
    home = Path.home()
    if Path(word).is_absolute() and path.is_relative_to(home) and home != Path("/"):
        return f"~/{path.relative_to(home)}"
    return word


def portable(word: str, here: Path | None = None) -> str:
    """Make the path in a word of a command relative to the working directory, where it lies below that; else as it is.

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
