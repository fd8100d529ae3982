"""What watches a running cell: its time, memory, files and the number of its processes."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from assay.harness.engines import guardian
from assay.harness.engines.process import ServerProcess
from assay.harness.sweep.spec import Limits

PROCESSES = 2048
"""Most processes of a cell at a time. Servers have dozens, and a kernel on its own has its own limit, of 256."""
_GB = 10**9
_EXPENSIVE_S = 1.0
"""Seconds between two looks at what takes the longest to find out: memory and files."""


class Watch:
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
