"""A run's progress: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_LINE_INTERVAL_S = 10.0


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """Shows the stages and counts of a run on a console. Thread-safe: both roles are asked at the same time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._said: dict[str, float] = {}
        self._start = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()

    def say(self, text: str) -> None:
        """Show that a stage began or ended."""
        self._console.print(f"[{time.monotonic() - self._start:5.0f} s] {text}", markup=False, highlight=False)

    def count(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` of `what` are done."""
        with self._lock:
            if self._bars:
                if what not in self._tasks:
                    self._tasks[what] = self._bars.add_task(what, total=total)
                self._bars.update(self._tasks[what], completed=done)
            elif done == total or time.monotonic() - self._said.setdefault(what, time.monotonic()) > _LINE_INTERVAL_S:
                self._said[what] = time.monotonic()
                self.say(f"{what}: {done} of {total}")
