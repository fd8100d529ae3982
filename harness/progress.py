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
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from assay.harness.text import one_line

_LINE_INTERVAL_S = 30.0
_NOTE_INTERVAL_S = 1.0
_BAR_WIDTH = 16
# Steps that must have been timed before the remaining time is estimated.
_FEWEST_FOR_ETA = 2


@dataclass
class _Count:
    """The state of a count: when it was first seen, how much was done then, when it was last shown, and how far it is."""

    since: float
    before: int
    said: float
    done: int = 0
    total: int = 0


class ProgressDisplay(AbstractContextManager["ProgressDisplay"]):
    """Shows the stages and counts of a command on a console. Thread-safe: both roles are asked at the same time.

    On a terminal they share one line, which disappears at the end; elsewhere each has its own lines.

    Args:
        console: where to show them; nothing is shown on a quiet one.
        interval_s: seconds between two lines about the same count, if the console is not a terminal.
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
        shown = console.is_terminal and not console.quiet
        self._line = Progress(*columns, console=console, transient=True) if shown else None

    def __enter__(self) -> Self:
        if self._line:
            self._line.add_task("", total=None, note="")
            self._line.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._line:
            self._line.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt) and (ran := self.ran()):
            self._print(f"Interrupted after {ran}.")

    def ran(self) -> str:
        """Say how far each count is, or return an empty string if nothing was counted."""
        return ", ".join(f"{what}: {entry.done:,} of {entry.total:,}" for what, entry in self._counts.items())

    def _print(self, text: str) -> None:
        line = f"[{time.monotonic() - self._start:5.0f} s] {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=self._line is None)

    def _move(self, what: str, done: int = 0, total: int | None = None, note: str = "") -> None:
        """Let the line of a terminal show something else."""
        if self._line and (ids := self._line.task_ids):
            self._line.tasks[0].total = total  # `update` would keep the old total for None
            self._line.update(ids[0], description=what, completed=done, note=note)

    def say(self, text: str, stays: bool = False) -> None:
        """Show that a stage began or ended; on a terminal until the next one, unless it stays."""
        if self._line is None or stays:
            self._print(text)
        else:
            self._move(text)

    def count(self, what: str, done: int, total: int, *, may_stop: bool = False) -> None:
        """Show that `done` of `total` of `what` are done, and about how long the rest takes.

        Args:
            what: the same text for every step, such as "candidate: questions".
            done: steps that are done, including those of an earlier run.
            total: all steps.
            may_stop: whether fewer steps may be enough, so that asking may stop early: the estimate is then an upper limit.
        """
        now = time.monotonic()
        with self._lock:
            entry = self._counts.setdefault(what, _Count(now, done, now))
            entry.done, entry.total = done, total
            left = "" if done >= total else _eta(now - entry.since, done - entry.before, total - done, may_stop)
            self._move(what, done, total, left)
            if self._line is None and (done >= total or now - entry.said > self._interval_s):
                entry.said = now
                self._print(f"{what}: {done:,} of {total:,}{left and ', ' + left}")

    @contextmanager
    def waiting(self, what: str, note: Callable[[], str] = lambda: "") -> Iterator[None]:
        """Show a wait that cannot be counted: its name, its duration, and its latest message.

        Args:
            what: the event to wait for, such as "starting reference triton".
            note: returns its latest message, such as the last line of a server's log; called from a thread, at most once a second.
        """
        ended, start = threading.Event(), time.monotonic()
        self._move(what)

        def watch() -> None:
            before = ""
            while not ended.wait(_NOTE_INTERVAL_S if self._line else self._interval_s):
                last = one_line(note(), 160)
                new, before = last if last != before else "", last
                self._move(what, note=last)
                if self._line is None:
                    self._print(f"{what}: {duration(time.monotonic() - start)}{new and ': ' + new}")

        watcher = threading.Thread(target=watch, name="assay-progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


class _State(ProgressColumn):
    """Next to a bar: the count if it exists, the elapsed time, and the remaining time or the current activity."""

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
    """Estimate as text how long `left` steps take if `done` took `seconds`, or return an empty string if too little was timed."""
    if done < _FEWEST_FOR_ETA or seconds <= 0:
        return ""
    return f"{'at most' if may_stop else 'about'} {duration(seconds / done * left)} left"


def duration(seconds: float) -> str:
    """Format seconds: "7 s", "3 min 20 s", "2 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
