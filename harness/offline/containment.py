"""The processes that a kernel starts: they are counted, and none of them outlives the process of the kernel. Linux only.

The system's own limit, ``RLIMIT_NPROC``, is no help: it counts all processes of a user, and does not hold for root.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from assay.harness.engines.guardian import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, descendants
from assay.harness.errors import ExitCode

PROCESSES = 256
"""Most processes of a kernel at a time: PyTorch compiles in up to 32, Triton in one for each kernel."""
TOO_MANY = -64
"""How a process ends whose kernel had started more: by the last signal of Linux, SIGRTMAX. A kernel can exit with any status."""
_ORPHANED = signal.SIGUSR1
"""What a keeper gets when its supervisor ends."""
LOOK_S = 0.25
"""Seconds between two looks at how many there are."""
_ENDING_S = 10.0
"""Seconds in which a killed process should be gone: one that the system cannot end is left."""


def keep(supervisor: int, passed_on: Collection[signal.Signals] = ()) -> None:
    """Have all that this process starts from now on end with it. To be called in a process that was just forked.

    The process forks: its copy returns from here and does the work, and the process itself stays, as its keeper, in a session of
    its own if it can: what kills a whole group of processes leaves the keeper to clear up. It ends once the copy has ended, as
    that did, and before that ends what the copy has left; at SIGTERM, and when the supervisor ends, it ends all.

    Args:
        supervisor: id of the process that has forked this one.
        passed_on: signals that the copy gets too; SIGTERM among them ends nothing then.
    """
    if sys.platform != "linux":
        return
    adopt_orphans()
    ending = {_ORPHANED, signal.SIGTERM} - {*passed_on}
    woken = {signal.SIGCHLD, *ending, *passed_on}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*woken, signal.SIGINT, signal.SIGHUP})
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, _ORPHANED)
    if os.getppid() != supervisor:
        os._exit(ExitCode.NO_VERDICT)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, there would be no exit status
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    with suppress(PermissionError):  # it leads a group, as what the guardian starts does
        os.setsid()
    code: int | None = None
    while code is None:
        told = signal.sigtimedwait(woken, LOOK_S)
        code = reaped(worker)
        if told is not None and told.si_signo in ending:
            code = 0 if code is None else code
        elif told is not None and told.si_signo in passed_on:
            _tell([worker], signal.Signals(told.si_signo))
        elif code is None and _too_many():
            code = TOO_MANY
    end_all()
    if code < 0:
        _die_of(-code)
    os._exit(code)


def adopt_orphans() -> None:
    """Make this process the parent of whatever its descendants leave behind, so that it can be found."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def reaped(worker: int) -> int | None:
    """Collect the children of this process that have ended: the exit code of this one, -n for a signal n; None if it has not."""
    code = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _too_many() -> bool:
    """Return True if this process has more than `PROCESSES` descendants. All of them are then stopped."""
    if len(_living()) <= PROCESSES:
        return False
    stopped = set[int]()
    until = time.monotonic() + _ENDING_S
    while (more := [pid for pid in _living() if pid not in stopped]) and time.monotonic() < until:
        _tell(more, signal.SIGSTOP)  # what is stopped starts no process while the others are ended
        stopped |= {*more}
    return True


def end_all() -> None:
    """Kill all descendants of this process, and collect those that become its children."""
    until = time.monotonic() + _ENDING_S
    while time.monotonic() < until:
        _tell(_living(), signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:  # none of them has ended yet
                time.sleep(0.002)
        except ChildProcessError:
            return


def _living() -> list[int]:
    """List the descendants of this process that have not ended."""
    own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    if own.exists() and not own.read_text():  # cheap, and mostly all
        return []
    return [pid for pid in descendants(os.getpid()) if _state(pid) not in "XZ"]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _tell(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _die_of(number: int) -> None:
    """End this process by a signal, as another has ended, without a core dump of its own."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # SIGKILL has no handler
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
