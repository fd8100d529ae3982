"""A command's progress: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from assay.harness.text import one_line

_LINE_INTERVAL_S = 10.0
_NOTE_INTERVAL_S = 1.0
_BAR_WIDTH = 16
# Steps that must have been timed before the rest is estimated.
_FEWEST_FOR_ETA = 2


@dataclass
class _Count:
    """The state of a count: when it was first seen, how much was done then, when it was last shown, and its bar."""

    since: float
    before: int
    said: float
    bar: TaskID | None = None


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """Shows the stages and counts of a command on a console. Thread-safe: both roles are asked at the same time.

    Args:
        console: where; nothing is shown on a quiet one.
        interval_s: seconds between two lines on the same thing, where the console is no terminal.
    """

    def __init__(self, console: Console, interval_s: float = _LINE_INTERVAL_S) -> None:
        self._console, self._interval_s = console, interval_s
        self._lock = threading.Lock()
        self._counts: dict[str, _Count] = {}
        self._start = time.monotonic()
        columns = (
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(_BAR_WIDTH),
            _State(Column(no_wrap=True, overflow="ellipsis")),
        )
        self._bars = Progress(*columns, console=console) if console.is_terminal and not console.quiet else None

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
        line = f"[{time.monotonic() - self._start:5.0f} s] {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=self._bars is None)

    def count(self, what: str, done: int, total: int, *, may_stop: bool = False) -> None:
        """Show that `done` of `total` of `what` are done, and about how long the rest takes.

        Args:
            what: the same text for every step, such as "candidate: questions".
            done: steps that are done, those of an earlier run included.
            total: all steps.
            may_stop: whether fewer steps may do, as where asking stops once the answers decide: the estimate is then the most.
        """
        now = time.monotonic()
        with self._lock:
            entry = self._counts.setdefault(what, _Count(now, done, now))
            left = "" if done >= total else _eta(now - entry.since, done - entry.before, total - done, may_stop)
            if self._bars:
                if entry.bar is None:
                    entry.bar = self._bars.add_task(what, total=total, note="")
                self._bars.update(entry.bar, completed=done, note=left)
            elif done >= total or now - entry.said > self._interval_s:
                entry.said = now
                self.say(f"{what}: {done:,} of {total:,}{left and ', ' + left}")

    @contextmanager
    def waiting(self, what: str, note: Callable[[], str] = lambda: "") -> Iterator[None]:
        """Show what is waited for, for how long, and what it said last: something that takes minutes and cannot be counted.

        Args:
            what: what is waited for, such as "starting reference triton".
            note: its last words, such as the last line of a server's log; asked from a thread, at most once a second.
        """
        ended, start = threading.Event(), time.monotonic()
        bar = self._bars.add_task(what, total=None, note="") if self._bars else None

        def watch() -> None:
            while not ended.wait(_NOTE_INTERVAL_S if self._bars else self._interval_s):
                last = one_line(note(), 160)
                if self._bars and bar is not None:
                    self._bars.update(bar, note=last)
                else:
                    self.say(f"{what}: {duration(time.monotonic() - start)}{last and ': ' + last}")

        watcher = threading.Thread(target=watch, name="assay-progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            if self._bars and bar is not None:
                self._bars.remove_task(bar)


class _State(ProgressColumn):
    """Behind a bar: the count if there is one, the elapsed time, and the rest: an estimate, or what is going on."""

    def render(self, task: Task) -> Text:
        counted = [] if task.total is None else [f"{task.completed:,.0f}/{task.total:,.0f}"]
        note = str(task.fields.get("note", ""))
        return Text(
            " ".join(
                [
                    *counted,
                    duration((task.finished_time if task.finished else task.elapsed) or 0.0),
                    *([f" {note}"] if note else []),
                ]
            )
        )


def _eta(seconds: float, done: int, left: int, may_stop: bool = False) -> str:
    """Estimate how long the steps that are left take if `done` took `seconds`, in words; empty while too little was timed."""
    if done < _FEWEST_FOR_ETA or seconds <= 0:
        return ""
    return f"{'at most' if may_stop else 'about'} {duration(seconds / done * left)} left"


def duration(seconds: float) -> str:
    """Format seconds in words: "7 s", "3 min 20 s", "2 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
