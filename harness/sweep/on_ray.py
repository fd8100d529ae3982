"""The executor on Ray: a task for each task, placed by what it needs. Needs the extra ``ray``.

A task runs in a temporary folder of its worker. While it runs, what has changed there comes back every few seconds, so that this
machine has its evidence when the worker is lost: the next attempt begins with it. Ray places tasks and notices what is lost;
attempts are counted here. What a task has started ends with its worker (`assay.harness.engines.guardian`), and workers with this
process.
"""

from __future__ import annotations

import os
import platform
import queue
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from assay.harness.errors import EngineError, UsageError
from assay.harness.extras import require
from assay.harness.sweep.executor import Ended, Needs, Task, Workplace
from assay.harness.sweep.parcels import Changes, Files, pack, unpack
from assay.harness.text import one_line

Say = Callable[[str, str], None]
LOCAL = "local"
"""The address with which Ray is started on this machine for as long as the executor exists, even beside another one."""
_ATTEMPTS = 8
"""Times that a task is started before its lost workers count as its own doing: more than preemption explains."""
IN_FLIGHT = 512
"""Most tasks that Ray is given at a time: enough to keep a large cluster busy, and for its autoscaler to see what waits."""
_SHIP_S, _SHIP_SHARE = 5.0, 20
"""Seconds between two parcels of a running task, and at least so many times as long as the last one took to make."""
_GATHER_S = 0.05
"""Seconds in which the parcels of other tasks may come, once one has: each look at hundreds of tasks takes milliseconds."""
_GRACE_S = 10.0
"""Seconds that cancelled tasks have to end their processes before their workers are killed."""
_TEMPORARY = "assay-task-"


@dataclass(frozen=True)
class _Parcel:
    """What comes back from a running task.

    Attributes:
        files: those that have changed.
        lines: what it has said.
        ended: its value or error, once it has ended; else None.
    """

    files: dict[str, bytes | None]
    lines: tuple[str, ...]
    worker: str
    ended: tuple[Any, Exception | None] | None = None


def attempt(
    work: Callable[[Workplace], Any], number: int, kept: Files, names: Sequence[str], *inputs: Files
) -> Iterator[_Parcel]:
    """Run a task on a worker: yield what has changed in its folder, and at the end what became of it.

    Args:
        work: of the task.
        number: 1 for the first attempt.
        kept: files of its folder that an earlier attempt left.
        names: of its inputs.
        inputs: the files of each.
    """
    _clear_remains()
    made = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{os.getpid()}-"))
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    ended, cancelled, worker = threading.Event(), threading.Event(), platform.node()
    outcome: list[tuple[Any, Exception | None]] = []

    def run(place: Workplace) -> None:
        try:
            outcome.append((work(place), None))
        except Exception as error:
            outcome.append((None, error))
        finally:
            ended.set()

    try:
        folder, given = made / "folder", {name: made / "inputs" / name for name in names}
        folder.mkdir()
        unpack(kept, folder)
        for path, files in zip(given.values(), inputs, strict=True):
            unpack(files, path)
        changes = Changes(folder)
        while changes.collect(at_rest=True):  # what was kept is there already
            pass
        place = Workplace(folder, given, worker, number, {}, lines.put, cancelled)
        thread = threading.Thread(target=run, args=(place,))
        thread.start()
        wait_s = _SHIP_S
        while not ended.wait(wait_s):
            begun = time.monotonic()
            parcel = _Parcel(changes.collect(), _said(lines), worker)
            wait_s = max(_SHIP_S, _SHIP_SHARE * (time.monotonic() - begun))
            yield parcel
        thread.join()
        last = changes.collect(at_rest=True)
        while more := changes.collect(at_rest=True):
            yield _Parcel(last, (), worker)
            last = more
        yield _Parcel(last, _said(lines), worker, outcome[0])
    finally:
        cancelled.set()
        ended.wait(_GRACE_S)
        shutil.rmtree(made, ignore_errors=True)


def _said(lines: queue.SimpleQueue[str]) -> tuple[str, ...]:
    return tuple(lines.get() for _ in range(lines.qsize()))


def _clear_remains() -> None:
    """Remove the temporary folders of workers of this machine that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*-*"):
        pid = path.name.removeprefix(_TEMPORARY).partition("-")[0]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


@dataclass
class _Attempt:
    """A task that Ray has been given."""

    task: Task[Any]
    number: int
    worker: str = ""
    stream: Any = None


@dataclass
class OnRay:
    """Runs tasks on Ray.

    Args:
        address: of a cluster; `LOCAL` to start one here.
        runtime_env: environment of the workers, as Ray has it.
        in_flight: most tasks that Ray is given at a time.
        say: shows what a task says.

    Raises:
        UsageError: Ray is not installed, no cluster answers at the address, or it cannot send what `runtime_env` names.
    """

    address: str
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    in_flight: int = IN_FLIGHT
    say: Say = lambda key, line: None
    _waiting: deque[_Attempt] = field(default_factory=deque)
    _given: dict[Any, _Attempt] = field(default_factory=dict)
    _inputs: dict[Path, Any] = field(default_factory=dict)
    _done: deque[Ended[Any]] = field(default_factory=deque)
    _mine: bool = False

    def __enter__(self) -> Self:
        require("ray", "--ray")
        import ray

        if not ray.is_initialized():
            try:
                ray.init(
                    self.address, runtime_env=dict(self.runtime_env), log_to_driver=False, include_dashboard=False,
                    configure_logging=False,
                )  # fmt: skip
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UsageError(
                    f"--ray {self.address}: {one_line(str(error), 300)}",
                    "the address of a Ray cluster that runs",
                    "see ray status",
                ) from None
            except ray.exceptions.RuntimeEnvSetupError as error:
                ray.shutdown()
                raise UsageError(
                    f"--ray {self.address}: {one_line(str(error), 400)}",
                    "a [runtime_env] that Ray can send to its workers",
                    "correct it, or leave folders out with a .gitignore or its key excludes",
                ) from None
            self._mine = True
        # Ray's own retries would begin a task anew: those here hand its evidence on.
        self._attempt = ray.remote(num_returns="streaming", max_retries=0)(attempt)
        return self

    def __exit__(self, *exc: Any) -> None:
        import ray

        self._waiting.clear()
        streams = [given.stream for given in self._given.values()]
        for gentle in (True, False):
            for stream in streams:
                with suppress(Exception):  # it has ended, or its node has
                    ray.cancel(stream, force=not gentle)
            with suppress(Exception):
                ended = [stream.completed() for stream in streams]
                ray.wait(ended, num_returns=len(ended), timeout=_GRACE_S)
        self._given.clear()
        if self._mine:
            ray.shutdown()

    @property
    def slots(self) -> int:
        """Cores of the cluster, as far as it has grown."""
        import ray

        return min(self.in_flight, max(1, int(ray.cluster_resources().get("CPU", 1))))

    def submit(self, task: Task[Any]) -> None:
        """Have a task run as soon as there is room for it."""
        self._waiting.append(_Attempt(task, 1))
        self._give()

    def ended(self) -> Iterator[Ended[Any]]:
        """Yield tasks as they end, until none is left."""
        import ray

        while self._done or self._given or self._waiting:
            while self._done:
                yield self._done.popleft()
            self._give()
            if not self._given:
                continue
            ready, _ = ray.wait([*self._given], num_returns=1, timeout=1.0)
            if ready:
                time.sleep(_GATHER_S)
                ready, _ = ray.wait([*self._given], num_returns=len(self._given), timeout=0)
            for stream in ready:
                self._receive(stream, self._given[stream])

    def _give(self) -> None:
        """Give Ray the tasks that there is room for."""
        while self._waiting and len(self._given) < self.in_flight:
            given = self._waiting.popleft()
            task = given.task
            kept = pack(task.folder) if task.folder is not None and task.folder.exists() else {}
            inputs = [self._input(path) for path in task.inputs.values()]
            given.stream = _started(self._attempt, task.needs, task.work, given.number, kept, [*task.inputs], *inputs)
            self._given[given.stream] = given

    def _input(self, path: Path) -> Any:
        """Return an input as Ray has it: put there once, however many tasks read it."""
        import ray

        if path not in self._inputs:
            self._inputs[path] = ray.put(pack(path))
        return self._inputs[path]

    def _receive(self, stream: Any, given: _Attempt) -> None:
        """Take the next parcel of a task, or notice that it was lost."""
        import ray

        try:
            parcel = ray.get(next(stream))
        except ray.exceptions.RayError as error:
            del self._given[stream]
            self._lost(given, error)
            return
        except StopIteration:  # it always ends with a parcel that says so
            del self._given[stream]
            self._lost(given, RuntimeError("its worker ended without a word"))
            return
        given.worker = parcel.worker
        if given.task.folder is not None:
            given.task.folder.mkdir(parents=True, exist_ok=True)
            unpack(parcel.files, given.task.folder)
        for line in parcel.lines:
            self.say(given.task.key, line)
        if parcel.ended is not None:
            del self._given[stream]
            value, failed = parcel.ended
            self._done.append(Ended(given.task, value, failed, given.number, given.worker))

    def _lost(self, given: _Attempt, error: Exception) -> None:
        """Start a task again whose worker was lost, or end it."""
        import ray

        its_own = isinstance(error, ray.exceptions.RayTaskError | ray.exceptions.RuntimeEnvSetupError)
        why = one_line(str(error).strip().splitlines()[-1] if its_own else type(error).__name__, 300)
        if its_own or given.number >= _ATTEMPTS:
            lost = f"Its workers were lost {given.number} times: {why}"
            problem = f"It cannot run on a worker: {why}" if its_own else lost
            failure = EngineError(problem, "a worker that has the environment and lasts", "see the logs of Ray")
            self._done.append(Ended(given.task, None, failure, given.number, given.worker))
            return
        self.say(given.task.key, f"worker lost ({why}); goes on with what it had measured")
        self._waiting.appendleft(_Attempt(given.task, given.number + 1))


def _started(remote: Any, needs: Needs, *arguments: Any) -> Any:
    """Give Ray an attempt, and return the stream of its parcels."""
    options: dict[str, Any] = {"num_cpus": needs.cpus, "num_gpus": needs.gpus}
    if needs.memory_gb:
        options["memory"] = int(needs.memory_gb * 10**9)
    if needs.accelerator:
        options["accelerator_type"] = needs.accelerator
    return remote.options(**options).remote(*arguments)
