"""The entry point of ``assay``: a command that runs a kernel does so in a process of its own, which a supervisor waits for.

A kernel can end its process with any exit code (``os._exit(0)``), crash it, or compute forever. Since exit code 0 means pass, an
exit code counts only if the command itself named it at its end. A second process reports what the command had found before.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from assay.harness.cli.app import CTRL_C, INTERRUPTED, errors, handover, report_error
from assay.harness.cli.app import main as run_command
from assay.harness.cli.streams import keep_open
from assay.harness.errors import ExitCode, UsageError
from assay.harness.offline.containment import LOOK_S, adopt_orphans, end_all, keep, reaped
from assay.harness.offline.own_process import enable_faulthandler, end_with, ended_early, how_ended

GRACE_S = 5.0
"""Seconds that a command has to end after a signal; then it is killed, since a kernel in native code keeps Python from noticing."""


def main() -> None:
    """Run the command, supervised if it runs a kernel."""
    keep_open()
    try:
        os.getcwd()
    except OSError:
        gone = UsageError("The working folder is not there any more.", "a folder", "change to one that is there")
        report_error(gone)
        sys.exit(gone.exit_code)
    if _runs_kernel(sys.argv[1:]):
        _wait_passively(sys.argv[1:])
        sys.exit(_supervise(run_command))
    run_command()


def _runs_kernel(arguments: Sequence[str]) -> bool:
    """Return True if a command runs a kernel in its own process."""
    name = arguments[0] if arguments else ""
    return name in ("check", "replay", "doctor")


def _wait_passively(arguments: Sequence[str]) -> None:
    """Let OpenMP's threads sleep while they wait, for commands that time nothing and unless the user has set it.

    It has to be done before torch is imported. Calls of the small matrix take less time than threads spend waiting for each other:
    with ``OMP_NUM_THREADS=2`` on two busy cores, checking a correct kernel took 19 s of CPU, and takes 3 s.
    """
    if arguments[0] in ("check", "replay"):
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _supervise(command: Callable[[], None]) -> int:
    """Run a command in a forked process, which has to be done before anything starts a thread, and wait for it.

    If it does not come to its end, but had found something, it runs once more to report that: without the kernel.

    Returns:
        The command's exit code, or "no verdict" if it did not come to its end.
    """
    handover.open()
    forwarded = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, there would be no exit status
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, *forwarded})
    code, signalled = _attend(command, before, forwarded)
    if not signalled and isinstance(code, str) and handover.ended(code):
        report_error(ended_early(code, "what it had found is below"))
        code, signalled = _attend(command, before, forwarded)
    if isinstance(code, int):
        return code
    if signalled:
        errors.print(INTERRUPTED, markup=False)
    else:
        report_error(ended_early(code, "there is no verdict"))
    return ExitCode.NO_VERDICT


def _attend(
    command: Callable[[], None], mask: set[signal.Signals | int], forwarded: Sequence[signal.Signals]
) -> tuple[int | str, bool]:
    """Run the command in a process with this mask of signals: its exit code, or how it ended early; whether a signal told it to."""
    supervisor, (ended, end) = os.getpid(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ended)
        keep(supervisor, forwarded)
        end_with(os.getppid())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _run(command, end)
    os.close(end)
    code, signalled = _wait(child, forwarded)
    end_all()
    os.set_blocking(ended, False)  # a process that a kernel forked may keep the other end open
    with suppress(BlockingIOError):
        if os.read(ended, 1) == bytes([code % 256]):
            return code, signalled
    return how_ended(code), signalled


def _run(command: Callable[[], None], end: int) -> NoReturn:
    """Run the command in this process, and name its exit code at its end."""
    enable_faulthandler()
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt_once)
    code = 0
    try:
        command()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except KeyboardInterrupt:
        code = CTRL_C
    if code == CTRL_C:  # before assay's own handler was in place
        errors.print(INTERRUPTED, markup=False)
        code = ExitCode.NO_VERDICT
    os.write(end, bytes([code % 256]))
    sys.exit(code)


def _interrupt_once(number: int, frame: FrameType | None) -> NoReturn:
    """End the command at the first SIGINT. A process group and the supervisor may both pass it on: the second one is ignored."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _wait(child: int, forwarded: Sequence[signal.Signals]) -> tuple[int, bool]:
    """Return the exit code of a child that has ended, -n for a signal n, and True with it if a signal asked it to end.

    A terminal sends its signals to the whole process group; those that a process sent are passed on.
    """
    deadline: float | None = None
    waited = {signal.SIGCHLD, *forwarded}
    while True:
        if (code := reaped(child)) is not None:
            return code, deadline is not None
        told = signal.sigtimedwait(waited, LOOK_S)
        if deadline is not None and time.monotonic() > deadline:
            end_all()
            return -signal.SIGKILL, True
        if told is None or told.si_signo == signal.SIGCHLD:
            continue
        deadline = deadline or time.monotonic() + GRACE_S
        if told.si_code <= 0:  # sent by a process: SI_USER, not SI_KERNEL
            os.kill(child, told.si_signo)
