"""The executor of this machine: so many tasks at once, each with GPUs of its own. No daemon, nothing to install."""

from __future__ import annotations

import os
import platform
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from assay.harness.errors import UsageError
from assay.harness.sweep.executor import Ended, Needs, Task, Workplace

Say = Callable[[str, str], None]
"""Shows a line of a task: its key, and what it says."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_here() -> dict[str, str]:
    """Return the GPUs of this machine that this process may use: name by index, as ``CUDA_VISIBLE_DEVICES`` has it."""
    query = ["nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    named = dict(line.split(", ", 1) for line in listed.splitlines() if ", " in line)
    visible = os.environ.get(_VISIBLE)
    if visible is None:
        return named
    return {index: named.get(index, "GPU") for index in visible.split(",") if index.strip()}


class ThisMachine:
    """Runs tasks here, each in a thread that waits for its processes.

    Args:
        jobs: tasks at a time; None for one, or one for each set of GPUs that a task needs.
        needs: what each task needs.
        say: shows what a task says.

    Raises:
        UsageError: this machine has not what a task needs.
    """

    def __init__(self, needs: Needs, jobs: int | None = None, say: Say = lambda key, line: None) -> None:
        gpus, whole = gpus_here() if needs.gpus else {}, int(needs.gpus)
        kinds = {index: name for index, name in gpus.items() if needs.accelerator.lower() in name.lower()}
        if (needs.gpus and len(kinds) < whole) or (needs.accelerator and not needs.gpus):
            kind = f" of the kind {needs.accelerator}" if needs.accelerator else ""
            raise UsageError(
                f"A cell needs {whole} GPUs{kind}, and this machine has {len(kinds)}.",
                "limits that this machine meets",
                "change [limits], or run the cells elsewhere with --ray ADDRESS",
            )
        fit = len(kinds) // whole if whole else None
        self._slots = min(jobs or fit or 1, fit or jobs or 1)
        self._free = [list(kinds)[slot * whole : (slot + 1) * whole] for slot in range(self._slots)]
        self._say = say
        self._waiting: deque[Task[Any]] = deque()
        self._done: queue.SimpleQueue[Ended[Any]] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._running: set[threading.Thread] = set()
        self._left = 0

    @property
    def slots(self) -> int:
        """Tasks that run at once."""
        return self._slots

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._waiting.clear()
        self._cancelled.set()
        for thread in [*self._running]:
            thread.join()

    def submit(self, task: Task[Any]) -> None:
        """Have a task run as soon as there is room for it."""
        self._left += 1
        self._waiting.append(task)
        self._start()

    def ended(self) -> Iterator[Ended[Any]]:
        """Yield tasks as they end, until none is left."""
        while self._left:
            done = self._done.get()
            self._left -= 1
            self._start()
            yield done

    def _start(self) -> None:
        """Start what there is room for."""
        self._running = {thread for thread in self._running if thread.is_alive()}
        while self._waiting and self._free:
            thread = threading.Thread(target=self._run, args=(self._waiting.popleft(), self._free.pop()))
            self._running.add(thread)
            thread.start()

    def _run(self, task: Task[Any], gpus: Sequence[str]) -> None:
        """Run a task in this thread, with these GPUs."""
        value, error, worker = None, None, platform.node()
        environment = {_VISIBLE: ",".join(gpus)}
        if self._slots > 1 and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // self._slots))
        try:
            with TemporaryDirectory(prefix="assay-task-") as made:
                folder = task.folder or Path(made)
                folder.mkdir(parents=True, exist_ok=True)
                place = Workplace(
                    folder.resolve(), {name: path.resolve() for name, path in task.inputs.items()}, worker, 1, environment,
                    lambda line: self._say(task.key, line), self._cancelled,
                )  # fmt: skip
                value = task.work(place)
        except Exception as raised:
            error = raised
        self._free.append([*gpus])
        self._done.put(Ended(task, value, error, 1, worker))
