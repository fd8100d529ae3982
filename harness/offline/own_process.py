"""Work with a kernel in a process of its own, for a process that has more to do than that: a test session, a notebook, a pipeline.

A kernel can end its process with any exit code, crash it, or raise what a test framework takes for the outcome of a test. What it
does then happens to a process that nobody else needs, and what is known of it comes back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any, TypeVar

from assay.harness.errors import AssayError, ExitCode
from assay.harness.offline.containment import PROCESSES, TOO_MANY, keep
from assay.harness.offline.handover import Handover, dumps, loads

if TYPE_CHECKING:
    from assay.harness.offline.interrupted import Known
    from assay.harness.offline.watcher import Watcher

T = TypeVar("T")
Callbacks = Mapping[str, Callable[..., None]]
Work = Callable[["Watcher", Callbacks], T]
"""Gets a watcher to tell what happens, and the callbacks by name."""

_POLL_S = 0.05
"""Seconds after which an ended process is noticed: one that it forked may keep their pipe open."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_RETURNED, _RAISED, _ENDED, _UNFIT, _CALLED = "returned", "raised", "ended", "unfit", "called"


@dataclass(frozen=True)
class _Answer:
    """The result of the work: what it returned or raised, how its process ended; or that this process cannot do it."""

    kind: str
    value: Any = None


def in_own_process(
    work: Work[T],
    ended: Callable[[Known], T],
    *,
    shared: Sequence[object] = (),
    callbacks: Callbacks | None = None,
) -> T:
    """Do work in a process that is forked from this one, and so has everything that this one has. It changes nothing here.

    PyTorch has one thread there if this process has several: OpenMP's threads do not survive a fork. Neither does CUDA. Where this
    process has used a GPU, or only asked CUDA for one, a fresh process does the work, if it can be pickled: it imports the kernel
    anew, once for all work. What cannot be pickled either, such as a function within a test, runs in this process: what it raises
    is known then too, but it can end the process. So it is outside of Linux.

    Args:
        work: what to do.
        ended: makes the result if the kernel ends the process, of what is known then.
        shared: objects that the work returns or reports, and that stay themselves.
        callbacks: called here when the work calls them, by name.

    Returns:
        What the work returns.

    Raises:
        AssayError: the kernel ended the process before anything was known. Else whatever the work raises.
    """
    __tracebackhide__ = True
    # Asking CUDA whether there is a GPU would prevent a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for do in (_forked, _fresh, _here):
        handover = Handover(shared)
        try:
            if (answer := do(work, handover, callbacks or {})).kind != _UNFIT:
                return _result(answer, handover, ended)
        finally:
            handover.close()
    raise AssertionError("work can always be done in this process")


def _result(answer: _Answer, handover: Handover, ended: Callable[[Known], T]) -> T:
    __tracebackhide__ = True
    if answer.kind == _RETURNED:
        value: T = answer.value
        return value
    if answer.kind == _RAISED:
        raise answer.value
    known = handover.known() if handover.ended(answer.value) else None
    if known is None:
        raise ended_early(answer.value, "there is no verdict")
    return ended(known)


def _forked(work: Work[T], handover: Handover, callbacks: Callbacks) -> _Answer:
    """Do the work in a forked process."""
    if sys.platform != "linux" or _cuda_is_initialised():
        return _Answer(_UNFIT)
    handover.open()
    receiver, sender = Pipe(duplex=False)
    threads, supervisor = len(os.listdir("/proc/self/task")), os.getpid()
    _flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork with threads
        child = os.fork()
    if child == 0:
        try:
            keep(supervisor)
            end_with(os.getppid())
            enable_faulthandler()
            if threads > 1 and "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(1)
            unfit = "torch" in sys.modules and sys.modules["torch"].cuda._is_in_bad_fork()
            answer = _Answer(_UNFIT) if unfit else _done(work, handover, tuple(callbacks), sender)
            sender.send_bytes(dumps(answer, handover.shared))
        finally:
            os._exit(0)
    sender.close()
    running = _Child(child)
    try:
        return _answer(receiver, running, handover.shared, callbacks)
    finally:
        receiver.close()
        running.terminate()
        running.wait()


class _Child:
    """A forked process that keeps others, with the methods of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None

    def poll(self, options: int = os.WNOHANG) -> int | None:
        """Return its exit code, -n for a signal n; None if it has not ended."""
        if self._code is None:
            try:
                ended, status = os.waitpid(self._pid, options)
            except ChildProcessError:  # somebody else has waited for it
                self._code = 0
            else:
                self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def wait(self) -> int:
        """Wait until it has ended, and return its exit code."""
        return self.poll(0) or 0

    def terminate(self) -> None:
        """Have it end what it keeps, and itself, if it has not ended."""
        if self.poll() is None:
            os.kill(self._pid, signal.SIGTERM)
            os.kill(self._pid, signal.SIGCONT)  # it may be stopped


def _done(work: Work[T], handover: Handover, names: Sequence[str], sender: Connection) -> _Answer:
    """Do the work in this process. A copy of the process that a kernel has forked does not return from here."""
    process = os.getpid()

    def forwarded(name: str) -> Callable[..., None]:
        return lambda *given: sender.send_bytes(dumps(_Answer(_CALLED, (name, given)), handover.shared))

    try:
        answer = _Answer(_RETURNED, work(handover.put, {name: forwarded(name) for name in names}))
    except BaseException as error:
        answer = _raised(error)
    if os.getpid() != process:
        os._exit(0)
    _flush()
    try:
        loads(dumps(answer, handover.shared), handover.shared)
    except Exception as why:
        what = answer.value if answer.kind == _RAISED else why
        answer = _Answer(
            _RAISED, RuntimeError("\n".join([f"{type(what).__name__}: {what}", *getattr(what, "__notes__", ())]))
        )
    return answer


def _raised(error: BaseException) -> _Answer:
    """Make an answer of an exception.

    One that is no error, such as the outcome of a test, is not the work's: a kernel raised it.
    """
    if not isinstance(error, (Exception, KeyboardInterrupt)):
        return _Answer(_ENDED, f"raised {type(error).__name__}: {error}")
    if isinstance(error, Exception) and not isinstance(error, (AssayError, AssertionError)):
        from assay.harness.localize.raised import traceback_of

        error.add_note(f"\nIn the process of the kernel:\n{traceback_of(error)}")  # pickling leaves tracebacks out
    return _Answer(_RAISED, error)


def _answer(
    receiver: Connection, process: _Child | subprocess.Popen[bytes], shared: Sequence[object], callbacks: Callbacks
) -> _Answer:
    """Receive the answer of a process, or how it ended without one."""
    while True:
        while not receiver.poll(_POLL_S) and process.poll() is None:
            pass
        try:
            answer: _Answer | None = loads(receiver.recv_bytes(), shared) if receiver.poll(0) else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            return _Answer(_ENDED, how_ended(process.wait()))
        if answer.kind != _CALLED:
            return answer
        name, given = answer.value
        callbacks[name](*given)


def _fresh(work: Work[T], handover: Handover, callbacks: Callbacks) -> _Answer:
    """Do the work in a process that shares nothing with this one, if it can be pickled."""
    global _process
    try:
        job = dumps((sys.path, dumps(work), tuple(callbacks)))
    except Exception:  # anything may be raised by what cannot be pickled
        return _Answer(_UNFIT)
    _process = _process or _FreshProcess()
    handover.open(os.dup(_process.records))
    handover.clear()
    handover.shared = ()
    answer = _Answer(_ENDED)
    try:
        _process.pipe.send_bytes(job)
        answer = _answer(_process.pipe, _process.process, (), callbacks)
        return answer
    finally:
        if answer.kind == _ENDED:
            _process.stop()
            _process = None


class _FreshProcess:
    """A process that imports what it is asked to do, one work after the other, and ends with this one."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        self._records = Handover()
        self.records = self._records.open()
        code = f"from {__name__} import serve; serve({os.getpid()}, {theirs.fileno()}, {self.records})"
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code], env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self.records),
            )  # fmt: skip

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait()
        self.pipe.close()
        self._records.close()


_process: _FreshProcess | None = None


def serve(parent: int, pipe: int, records: int) -> None:
    """Do the work that another process sends, until it ends.

    Args:
        parent: the id of that process.
        pipe: descriptor of the pipe that work comes from, and answers go to.
        records: descriptor of the file of a `Handover`.
    """
    keep(parent)
    end_with(os.getppid())
    enable_faulthandler()
    connection, handover = Connection(pipe), Handover()
    handover.open(records)
    while True:
        try:
            path, work, names = loads(connection.recv_bytes())
        except EOFError:
            return
        sys.path[:] = path
        try:
            made: Work[Any] = loads(work)
        except Exception:  # it names what only the other process has, such as a function of its main module
            answer = _Answer(_UNFIT)
        else:
            answer = _done(made, handover, names, connection)
        connection.send_bytes(dumps(answer))


def _here(work: Work[T], handover: Handover, callbacks: Callbacks) -> _Answer:
    """Do the work in this process."""
    try:
        return _Answer(_RETURNED, work(lambda *_: None, callbacks))
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return _raised(error)


def _cuda_is_initialised() -> bool:
    return "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()


def _flush() -> None:
    """Empty the buffers of Python and of C: a forked process has copies, and ends without looking at them."""
    import ctypes

    with suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).fflush(None)


def end_with(supervisor: int) -> None:
    """Have this process killed when its supervisor ends, however that ends. Linux only; elsewhere it goes on."""
    import ctypes

    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(ExitCode.NO_VERDICT)


def enable_faulthandler() -> None:
    """Have a crash of this process write its stack to standard error."""
    import faulthandler

    with suppress(AttributeError, OSError, ValueError):  # there may be no standard error
        if not faulthandler.is_enabled():
            faulthandler.enable()


def how_ended(code: int) -> str:
    """Describe how a process ended, in words that follow "it". `code` is its exit code, -n for a signal n."""
    if code == TOO_MANY:
        return f"was ended, since the kernel had started more than {PROCESSES} processes at a time,"
    from assay.harness.text import how_ended as in_words  # commands start faster without its expressions

    return in_words(code)


def ended_early(how: str, so: str) -> AssayError:
    """Make the error that a kernel ended its process: how it did so, and what follows."""
    return AssayError(
        f"The process that ran the kernel {how} before its work was done; {so}.",
        "a kernel that returns an output or raises an exception",
        "see what it wrote. If it crashed, its own stack is there; if it was killed by SIGKILL, memory may have run out",
    )
