"""Runs work in a separate process that may crash, hang, or start others. The caller continues, and nothing is left behind.

::

    outcome = run(Job("package.module:function", {"kernel": "mine:forward"}), on_event=show, limits=Limits(step_s=60))
    match outcome:
        case Done(result): ...
        case Crashed() | TimedOut(): outcome.how, outcome.during, outcome.events

``python -m assay.worker JOB`` calls the function as ``function(journal=..., **arguments)``. Only importable names and JSON cross
the process boundary: JOB is a file with the function's name and its arguments, and the process appends events to a journal of JSON
lines, which its caller reads as they arrive. So everything written before the process ended is kept. Around a call that may not
return, write `Journal.begin` and `Journal.end`: the outcome then states where the process ended, and `Limits.step_s` applies.

The process runs under `assay.harness.engines.guardian`, which ends everything that it started, however the process or its caller
ends. The same holds for commands of `run_command`.

Importing torch and assay takes two seconds. So a process that runs jobs keeps a template, which has imported them and done nothing
else: guardian and process of a job are forks of it. A kernel's module is imported in the job, and a job that runs others has a
template of its own, forked before the job began, so that a job's process is always as a new one.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from assay.harness.engines import guardian
from assay.harness.errors import AssayError
from assay.harness.text import how_ended

# PyTorch compiles in up to 32 processes, Triton in one per kernel.
_PROCESSES = 256
_GRACE_S = 1.0
_POLL_S = 0.01
_BLOCK = 2**20
_FLAGS = ("-P", "-X", "faulthandler", "-m", "assay.worker")
_DONE, _RAISED, _BEGINS, _ENDS = "done", "raised", "begins", "ends"

# A line of the journal: the event's name as ``event``, and the facts that the function wrote with it.
Event = Mapping[str, Any]


OnEvent = Callable[[Event], None]


@dataclass(frozen=True)
class Job:
    """A job for a process.

    Attributes:
        function: an importable function, as ``package.module:function``. It gets a `Journal` as ``journal``, and
            returns JSON or a pydantic model.
        arguments: its arguments by name, as JSON.
    """

    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds, or None without a limit.

    Attributes:
        start_s: time until the first event.
        step_s: time between `Journal.begin` and `Journal.end`.
        total_s: time until the job is done.
    """

    start_s: float | None = None
    step_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True)
class Done:
    """A finished job.

    Attributes:
        result: the function's return value, as JSON.
        events: the events in its journal.
    """

    result: Any
    events: Sequence[Event] = ()


@dataclass(frozen=True)
class Crashed:
    """A process that ended before its job was done.

    Attributes:
        how: the way it ended, as a predicate: "was killed by SIGSEGV".
        during: the step that had begun but not ended, or empty.
        events: the events in its journal until then.
    """

    how: str
    during: str = ""
    events: Sequence[Event] = ()


@dataclass(frozen=True)
class TimedOut(Crashed):
    """A process that was ended because it exceeded a limit, which `how` states."""


Outcome = Done | Crashed


class Journal:
    """The journal of a job, on the side of its process.

    Args:
        append: called with each event, or None if nobody reads them.
    """

    def __init__(self, append: Callable[[Event], object] | None = None) -> None:
        self._append = append

    def write(self, event: str, **facts: Any) -> None:
        """Append an event. Pydantic models among its facts are written as JSON."""
        if self._append is not None:
            self._append({"event": event, **facts})

    def begin(self, step: str) -> None:
        """Record that a step begins that may not return. `step` describes it."""
        self.write(_BEGINS, step=step)

    def end(self) -> None:
        """Record that the step has returned or raised."""
        self.write(_ENDS)


UNREAD = Journal()
"""A journal that nobody reads, for calling a function without a process."""


def run(
    job: Job,
    *,
    on_event: OnEvent = lambda event: None,
    limits: Limits = Limits(),
    output: IO[bytes] | int = 2,
    environment: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
    python: str = "",
) -> Outcome:
    """Run a job in a process.

    Args:
        on_event: called in this process with each event as it arrives.
        output: file for the process's output; by default standard error.
        environment: its environment variables; by default a copy of this process's.
        stop: ends the process once it is set.
        python: another Python for it, which finds assay on the PYTHONPATH of `environment`; by default this process's, with the
            same modules.

    Raises:
        Exception: the function's exception, if it is one of assay's or Python's own; otherwise a RuntimeError that quotes it.
        OSError: the process cannot be started, or the journal cannot be written.
    """
    __tracebackhide__ = True  # pytest shows the caller instead
    with _process(job, output, os.environ if environment is None else environment, python) as (poll, read):
        events: list[Event] = []
        started = since = time.monotonic()
        while True:
            status = poll()  # first, so that all events from before the end are read
            for event in read():
                since = time.monotonic()
                if event["event"] == _DONE:
                    return Done(event["result"], events)
                if event["event"] == _RAISED:
                    if (error := _raised(event)) is None:
                        return Crashed(f"raised {event['said']}", _during(events), events)
                    raise error
                events.append(event)
                on_event(event)
            if status is not None:
                return Crashed(_how_it_ended(status), _during(events), events)
            now, during = time.monotonic(), _during(events)
            for limit, spent, what in (
                (limits.total_s, now - started, "was not done within"),
                (limits.step_s if during else None, now - since, "did not return within"),
                (None if events else limits.start_s, now - since, "did not start within"),
            ):
                if limit is not None and spent > limit:
                    return TimedOut(f"{what} {limit:g} s", during, events)
            if stop is None:
                time.sleep(_POLL_S)
            elif stop.wait(_POLL_S):
                return Crashed("was stopped", during, events)


def _during(events: Sequence[Event]) -> str:
    """Return the step that began last, or "" if it has ended."""
    last = next((event for event in reversed(events) if event["event"] in (_BEGINS, _ENDS)), None)
    return str(last["step"]) if last and last["event"] == _BEGINS else ""


def _raised(event: Event) -> Exception | None:
    """Remake the function's exception, or return None if it is not an `Exception`, such as a test outcome."""
    if not event["error"]:
        return None
    module, _, name = event["type"].partition(":")
    kind = (
        getattr(importlib.import_module(module), name, None) if module.split(".")[0] in ("assay", "builtins") else None
    )
    if event["arguments"] is None or not isinstance(kind, type) or not issubclass(kind, Exception):
        return RuntimeError(f"{event['said']}\n\nIn its own process:\n{event['traceback']}")
    made = kind(*event["arguments"])
    if not issubclass(kind, (AssayError, AssertionError)):
        made.add_note(f"\nIn its own process:\n{event['traceback']}")
    return made


@contextmanager
def _process(
    job: Job, output: IO[bytes] | int, environment: Mapping[str, str], python: str
) -> Iterator[tuple[Callable[[], int | None], Callable[[], list[dict[str, Any]]]]]:
    """Run a job's process under a guardian, and yield two functions: the exit status (None while it runs), and new events."""
    # The guardian removes this folder. The journal in it stays readable here, since it is open.
    scratch = Path(tempfile.mkdtemp(prefix="assay-worker-"))
    try:
        kept = scratch / "journal.jsonl"
        descriptor = os.open(kept, os.O_RDONLY | os.O_CREAT, 0o600)
        path = [] if python else [folder or os.getcwd() for folder in sys.path]
        environment = {**_PASSIVE, **environment, **({"PYTHONPATH": os.pathsep.join(path)} if path else {})}
        given = {"function": job.function, "arguments": job.arguments, "journal": str(kept), "path": path}
        given |= {"environment": environment, "folder": os.getcwd()}
        (scratch / "job.json").write_bytes(_line(given))
        process: subprocess.Popen[bytes] | guardian.Forked
        if python:
            process = guardian.start(
                [python, *_FLAGS, str(scratch / "job.json")], scratch, _GRACE_S, folder=None, most=_PROCESSES,
                output=output, errors=output, environment=environment,
            )  # fmt: skip
        else:
            process = _fork(scratch / "job.json", output, environment)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    at, begun = 0, b""

    def read() -> list[dict[str, Any]]:
        nonlocal at, begun
        while more := os.pread(descriptor, _BLOCK, at):
            begun, at = begun + more, at + len(more)
        *lines, begun = begun.split(b"\n")
        events = []
        for line in lines:
            with suppress(ValueError):  # not written by the journal
                event = json.loads(line)
                events += [event] if isinstance(event, dict) and "event" in event else []
        return events

    try:
        yield process.poll, read
    finally:
        guardian.end(process, _GRACE_S)
        os.close(descriptor)


def _how_it_ended(status: int) -> str:
    if status == -guardian.TOO_MANY:
        return f"was ended because it had started more than {_PROCESSES} processes at a time,"
    return how_ended(status)


def run_command(
    words: Sequence[str],
    folder: Path,
    *,
    log: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    output: Path | None = None,
    stop: threading.Event | None = None,
) -> int | None:
    """Run a command under a guardian, and leave none of its processes running.

    Args:
        log: file that its output is appended to.
        environment: its environment variables; by default a copy of this process's.
        output: file for its standard output instead.

    Returns:
        Its exit status, -n for a signal n, or None if it was ended here.

    Raises:
        OSError: the command cannot be started, or a file cannot be written.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    scratch, until = Path(tempfile.mkdtemp(prefix="assay-")), time.monotonic() + seconds
    with log.open("ab") as logged, output.open("wb") if output else nullcontext(logged) as printed:
        environment = {**(os.environ if environment is None else environment), "TMPDIR": str(scratch)}
        process = guardian.start(
            words, scratch, _GRACE_S, folder=folder, environment=environment, output=printed, errors=logged
        )
    try:
        while (status := process.poll()) is None and time.monotonic() < until and not (stop and stop.is_set()):
            time.sleep(_POLL_S)
        return status
    finally:
        guardian.end(process, _GRACE_S)


def _line(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts, default=_as_json).encode("utf-8", "replace") + b"\n"


def _as_json(what: Any) -> Any:
    """Return a pydantic model as JSON, including non-finite numbers."""
    if not hasattr(what, "model_dump"):
        raise TypeError(f"a job takes and returns JSON, which {type(what).__name__} is not")
    return what.model_dump()


class _Template(NamedTuple):
    """A process that has imported what jobs need. It forks a guardian with a job for each message, and ends with its socket.

    Attributes:
        environment: its environment variables: some decide what an import does.
        control: the socket.
        process: the process, or None if it is a fork of a fork of this one.
    """

    environment: Mapping[str, str]
    control: socket.socket
    process: subprocess.Popen[bytes] | None = None


_template: _Template | None = None
_one_at_a_time = threading.Lock()
# Environment variables that jobs of one template may differ in: the import path is set again, pytest sets the second one, and
# importing threadpoolctl the third one.
_VARYING = ("PYTHONPATH", "PYTEST_CURRENT_TEST", "KMP_DUPLICATE_LIB_OK")
# Waiting OpenMP threads burn CPU time: without this, a correct kernel took 19 s instead of 3 s on two busy cores.
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}


def _fork(file: Path, output: IO[bytes] | int, environment: Mapping[str, str]) -> guardian.Forked:
    """Have a template fork a guardian for the job in a file. Raises OSError if there is no template and none can be started."""
    global _template
    fixed = {name: value for name, value in environment.items() if name not in _VARYING}
    with guardian.Forked.made() as (forked, given), open(os.devnull, "wb") as nothing, _one_at_a_time:
        printed = (
            nothing.fileno() if output == subprocess.DEVNULL else output if isinstance(output, int) else output.fileno()
        )
        for attempt in range(2):
            if _template is None or _template.environment != fixed or attempt:
                _template = _started(environment, fixed)
            with suppress(BrokenPipeError, ConnectionResetError):  # it was killed: start another
                socket.send_fds(_template.control, [os.fsencode(file)], [*given, printed])
                break
    return forked


def _started(environment: Mapping[str, str], fixed: Mapping[str, str]) -> _Template:
    """Start a template in place of the one there is."""
    if _template is not None:
        _template.control.close()
        if _template.process is not None:
            _template.process.wait()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *_FLAGS, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    return _Template(fixed, ours, process)


def _serve(control: socket.socket) -> NoReturn:
    """Be a template: fork a guardian for the job in each file that is named, until nobody is left to name one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a guardian reports its own end
    while True:
        named, given, _, _ = socket.recv_fds(control, 4096, 3)
        if not named:
            os._exit(0)
        with suppress(OSError):  # without the file, nobody waits for the job any more
            job = json.loads(Path(os.fsdecode(named)).read_bytes())
            _import(job["function"].partition(":")[0])
            if _forked() == 0:
                control.close()
                _guard(Path(os.fsdecode(named)), job, *given)
        for descriptor in given:
            os.close(descriptor)


def _import(module: str) -> None:
    """Import a module of assay, with all that it imports; what fails here fails in the job again."""
    gc.disable()  # imports leave little garbage, but collecting it takes a sixth of the time of importing torch
    if module.startswith("assay."):
        with suppress(Exception):
            importlib.import_module(module)
    gc.freeze()  # else the first collection of each job copies the memory of all that was imported


def _forked() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads, and those of NumPy's BLAS are stopped before a fork
        return os.fork()


def _guard(file: Path, job: Mapping[str, Any], read: int, ended: int, output: int) -> NoReturn:
    """Guard a job in this process, a fork of the template."""
    try:
        os.setsid()
        for descriptor, standard in ((read, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, standard)
        os.close(read)
        os.close(output)

        def become() -> None:
            os.close(ended)
            os.chdir(job["folder"])
            os.environ.clear()
            os.environ.update(job["environment"])
            sys.argv[1:] = [str(file)]
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed()  # Python reseeds its own generator
            _keep_template()
            _do(job)

        guardian.guard_fork(become, _GRACE_S, str(file.parent), _PROCESSES, ended)
    finally:
        os._exit(1)


def _keep_template() -> None:
    """Have a fork of this process be its template: a grandchild, since a kernel may wait for all its children."""
    global _template
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (child := _forked()) == 0:
        if _forked() == 0:
            ours.close()
            _serve(theirs)
        os._exit(0)
    os.waitpid(child, 0)
    theirs.close()
    _template = _Template({name: value for name, value in os.environ.items() if name not in _VARYING}, ours)


def main() -> None:
    """Do the job in the file that the command line names; or be a template, if it is the number of a socket."""
    if sys.argv[1].isdigit():
        _serve(socket.socket(fileno=int(sys.argv[1])))
    _do(json.loads(Path(sys.argv[1]).read_bytes()))


def _do(job: Mapping[str, Any]) -> NoReturn:
    """Do a job in this process, and end it."""
    sys.path[:] = job["path"] or sys.path
    process, descriptor = os.getpid(), os.open(job["journal"], os.O_WRONLY | os.O_APPEND)

    def append(event: Event) -> None:
        with suppress(OSError):  # the job continues on a full disk
            os.write(descriptor, _line(event))

    try:
        module, _, name = job["function"].partition(":")
        _import(module)
        function = getattr(importlib.import_module(module), name)
        gc.enable()
        result = function(**job["arguments"], journal=Journal(append))
        last = _line({"event": _DONE, "result": result})
    except BaseException as error:
        last = _line({"event": _RAISED, **_described(error)})
    # A kernel's threads and exit handlers must not keep the process alive, and a forked copy of it must not continue.
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    if os.getpid() == process:
        os.write(descriptor, last)
    os._exit(0)


def _described(error: BaseException) -> dict[str, Any]:
    """Describe an exception so that `_raised` can make it again."""
    arguments = [error.found, error.expected, error.do] if isinstance(error, AssayError) else list(error.args)
    return {
        "type": f"{type(error).__module__}:{type(error).__qualname__}",
        "error": isinstance(error, Exception),
        "arguments": arguments if all(isinstance(argument, str) for argument in arguments) else None,
        "said": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
    }


if __name__ == "__main__":
    importlib.import_module("assay.worker").main()  # so that a job that runs others finds the template
