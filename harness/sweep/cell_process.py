"""A cell: a command of assay in a process of its own, within limits, and the record of how it ended."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, get_args

from assay.harness.collect.machine import installed_packages
from assay.harness.engines import guardian
from assay.harness.engines.process import ServerProcess
from assay.harness.errors import ExitCode
from assay.harness.evidence.cell import FILE, LOG, OUT, RESULT, CellRecord, read_cell, write_cell
from assay.harness.extras import DISTRIBUTION
from assay.harness.files import timestamp
from assay.harness.sweep.executor import Workplace
from assay.harness.sweep.spec import Limits
from assay.harness.text import how_ended, one_line
from assay.harness.verdict import Verdict, exit_code_of

PACK = "pack"
"""Name of the input that is a replay pack, and of the folder into which a cell records one."""
_COMMIT = "commit"
"""Entry of a cell's environment that says where it was run, and does not decide what it finds."""
_LOG_KEPT = 1_000_000
"""Bytes of the log of a cell that took too much."""
_POLL_S = 0.1
_RESUMES = ("run",)
"""Commands that go on in the folder of ``--out``; others begin anew."""
_KEEPS = (*_RESUMES, "bench")
"""Commands with a folder of evidence, given with ``--out``."""
_VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
PROCESSES = 2048
"""Most processes of a cell at a time. Servers have dozens, and a kernel on its own has its own limit, of 256."""
_GB = 10**9
_EXPENSIVE_S = 1.0
"""Seconds between two looks at what takes the longest to find out: memory and files."""


class _Cancelled(Exception):
    """The cell was to end early. It has no verdict, and what it has measured is kept."""


@dataclass(frozen=True)
class CellWork:
    """The work of a cell, for an executor.

    Attributes:
        key: of the cell.
        command: words of the command, without those that say where it runs: ``--out``, ``--json``, and the pack that was recorded.
        axes: value by name of axis.
        limits: what it may take.
        commit: of the repository in which the sweep was started; empty if there is none.
    """

    key: str
    command: tuple[str, ...]
    axes: Mapping[str, str]
    limits: Limits
    commit: str = ""

    def __call__(self, place: Workplace) -> CellRecord:
        """Run the command, or return what an earlier attempt has found.

        Raises:
            Cancelled: it was to end early.
        """
        if (ended := finished(place.folder, self.key)) is not None:
            return ended
        begun = time.monotonic()
        for name in (FILE, RESULT, PACK, *(() if self.command[0] in _RESUMES else (OUT,))):
            remove(place.folder / name)
        process = self._start(place)
        try:
            excess = self._wait(process, place)
        finally:
            process.stop()
        if excess:
            _discard(place.folder)
        versions = environment() | ({_COMMIT: self.commit} if self.commit else {})
        verdict, headline, problem = self._outcome(place.folder, process, excess)
        record = CellRecord(
            key=self.key, command=self.command, axes=dict(self.axes), verdict=verdict, headline=headline, problem=problem,
            seconds=time.monotonic() - begun, attempts=place.attempt, worker=place.worker, environment=versions,
            created=timestamp(), evidence=hashes(place.folder),
        )  # fmt: skip
        write_cell(place.folder, record)
        return record

    def words(self, place: Workplace) -> list[str]:
        """Return the words of the command as it runs at a place."""
        words = [*self.command]
        if PACK in place.inputs:
            words.append(str(place.inputs[PACK]))
        if words[0] == "record":
            words.append(str(place.folder / PACK))
        return [*words, *(["--out", str(place.folder / OUT)] if words[0] in _KEEPS else []), "--json"]

    def _start(self, place: Workplace) -> ServerProcess:
        """Start the command, which can write no file that is larger than all its files may be."""
        assay = [sys.executable, "-m", "assay", *self.words(place)]
        blocks = int(self.limits.disk_gb * 10**9 / 512)
        limited = ["/bin/sh", "-c", 'ulimit -f "$0"; exec "$@"', str(blocks), *assay]
        return ServerProcess(
            limited, {**os.environ, **place.environment}, Path.cwd(), place.folder / LOG, output=place.folder / RESULT
        )

    def _wait(self, process: ServerProcess, place: Workplace) -> str:
        """Wait until the command has ended, or takes too much: what of, in words."""
        watch, told = _Watch(self.limits, process, place.folder), ""
        while process.exit_status is None:
            if place.cancelled.wait(_POLL_S):
                raise _Cancelled
            if excess := watch.excess():
                return excess
            if (line := process.last_step()) != told:
                place.say(told := line)
        return ""

    def _outcome(self, folder: Path, process: ServerProcess, excess: str) -> tuple[Verdict, str, str]:
        """Return the verdict, the result in a sentence, and why there is none."""
        last = one_line(process.last_line(), 400)
        if excess:
            return "error", "", f"It was ended: {excess}."
        status = process.exit_status
        result = _result(folder / RESULT)
        headline = one_line(str(result.get("headline") or last.partition("): ")[2] or last), 400)
        said = result.get("verdict", "pass" if self.command[0] == "record" and result else None)
        if said in _VERDICTS and status == exit_code_of(said):
            if said == "error":
                return said, "", headline
            return said, headline, ""
        if status in (*ExitCode,) and status != ExitCode.PASS:
            return "error", "", f"Exit code {status}: {last}"
        if status == ExitCode.PASS:
            return "error", "", f"It exited with 0, and its result does not say that it passed: {last}"
        return "error", "", f"Its process {how_ended(status or 0)}: {last}"


def finished(folder: Path, key: str) -> CellRecord | None:
    """Return the record of a cell that has ended with its evidence as it was; None if it has to run.

    A cell that ended in an error has to: what failed may work the next time.
    """
    record = read_cell(folder)
    if record is None or record.key != key or record.verdict == "error":
        return None
    return record if record.evidence == hashes(folder) else None


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a cell's evidence, by its path in the cell's folder."""
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        hidden = any(part.startswith(".") for part in Path(name).parts)
        if path.is_file() and not path.is_symlink() and not hidden and name not in (FILE, LOG):
            with path.open("rb") as file:
                files[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return files


@cache
def environment() -> dict[str, str]:
    """Return the versions of what can change a result here; that of assay with the hash of its source code."""
    assay = f"{_installed_version()} {_source_hash()[:8]}"
    return {"python": platform.python_version(), "assay": assay, **installed_packages()}


def _installed_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "not installed"  # on the path only


def _source_hash() -> str:
    root = Path(__file__).parents[2]
    total = hashlib.sha256()
    for part in sorted(path for path in root.iterdir() if path.is_dir()):
        for path in sorted(part.resolve().rglob("*.py")):  # in a checkout, the parts are links
            name = path.relative_to(part.resolve())
            total.update(f"{part.name}/{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _discard(folder: Path) -> None:
    """Remove what a cell has left that took too much, but for the end of its log."""
    log = folder / LOG
    kept = b""
    if log.is_file():
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_KEPT))
            kept = file.read()
    for path in [*folder.iterdir()]:
        remove(path)
    log.write_bytes(kept)


def _result(file: Path) -> dict[str, Any]:
    """Read what a command printed with ``--json``; empty if that is no object."""
    try:
        result = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


class _Watch:
    """Watches one running cell.

    Args:
        limits: of the cell.
        process: its process.
        folder: its folder.
    """

    def __init__(self, limits: Limits, process: ServerProcess, folder: Path) -> None:
        self._limits, self._process, self._folder = limits, process, folder
        self._begun = self._looked = time.monotonic()

    def excess(self) -> str:
        """Return in words what the cell takes too much of; empty for nothing."""
        now, limits = time.monotonic(), self._limits
        if now - self._begun > limits.minutes * 60:
            return f"it did not end within {limits.minutes:g} min"
        if now - self._looked < _EXPENSIVE_S:
            return ""
        self._looked = now
        family = guardian.descendants(self._process.pid)
        if len(family) > PROCESSES:
            return f"it started more than {PROCESSES} processes"
        if limits.memory_gb and _memory(family, limits.memory_gb * _GB) > limits.memory_gb * _GB:
            return f"its processes took more than {limits.memory_gb:g} GB of memory"
        if _size(self._folder) + _size(self._process.scratch) > limits.disk_gb * _GB:
            return f"its files took more than {limits.disk_gb:g} GB"
        return ""


def _memory(family: list[int], most: float) -> float:
    """Return the bytes of memory that processes take together.

    What they share counts once for each of them, unless that would be more than `most`: the exact count is expensive.
    """
    resident = sum(_counted(pid, "status", "VmRSS:") for pid in family)
    return sum(_counted(pid, "smaps_rollup", "Pss:") for pid in family) if resident > most else resident


def _counted(pid: int, file: str, name: str) -> float:
    """Read a number of kB from a file of a process; 0 if it has ended."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder and below."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total
