"""The protocol of executors: run these tasks, at most so many at once, and yield what became of each as it ends.

A task is a function of a `Workplace`, in whose folder it keeps its evidence. Where a worker is lost, the task starts again in a
folder that holds what was there: evidence is resumed, not begun anew. No file system need be shared: what a task needs travels with
it, and its evidence travels back while it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Workplace:
    """What a task finds where it runs.

    Attributes:
        folder: its own, which exists. It holds what earlier attempts left.
        inputs: the files and folders that it was given, by name.
        worker: name of the machine.
        attempt: 1 for the first.
        environment: variables of the processes that it starts, besides those of this one: which GPUs they see.
        say: tells whoever waits for the task what it is doing, in a line.
        cancelled: is set once the task is to end early.
    """

    folder: Path
    inputs: Mapping[str, Path]
    worker: str
    attempt: int
    environment: Mapping[str, str]
    say: Callable[[str], None]
    cancelled: threading.Event


@dataclass(frozen=True)
class Needs:
    """What a task needs of a worker.

    Attributes:
        cpus: cores.
        gpus: GPUs; the task sees no others.
        memory_gb: memory; 0 for any.
        accelerator: kind of GPU, such as "H100"; empty for any.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory_gb: float = 0.0
    accelerator: str = ""


@dataclass(frozen=True)
class Task(Generic[Result]):
    """One piece of work.

    Attributes:
        key: its name; no other task of the executor has it.
        work: does it. It can be pickled, as can what it returns and raises.
        folder: where its folder is kept on this machine; None for work that leaves no files.
        needs: what it needs of a worker.
        inputs: files and folders of this machine that it reads, by name.
    """

    key: str
    work: Callable[[Workplace], Result]
    folder: Path | None = None
    needs: Needs = Needs()
    inputs: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended(Generic[Result]):
    """A task that has ended.

    Attributes:
        task: which.
        value: what its work returned; None if it raised or was lost.
        error: what its work raised, or that its workers were lost too often; None if it returned.
        attempts: times that it was started.
        worker: name of the machine on which it ended; empty if it never ran.
    """

    task: Task[Result]
    value: Result | None
    error: Exception | None
    attempts: int
    worker: str


class Executor(Protocol):
    """Runs tasks. As a context, it ends all that it has started when it is left, however that happens."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: Any) -> None: ...

    @property
    def slots(self) -> int:
        """Tasks that run at once, as far as is known now."""
        ...

    def submit(self, task: Task[Any]) -> None:
        """Have a task run as soon as there is room for it."""
        ...

    def ended(self) -> Iterator[Ended[Any]]:
        """Yield tasks as they end, until none is left. More may be submitted meanwhile."""
        ...
