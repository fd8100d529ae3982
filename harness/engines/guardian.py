"""A process between assay and a server that makes sure no process of the server outlives assay. Linux, standard library only.

    python -I -S guardian.py GRACE_S SCRATCH [--most=N] COMMAND...

Runs COMMAND in its own session. Ends it, and whatever it started, at the end of standard input (only assay holds the other end
of that pipe, so the kernel closes it however assay ends, SIGKILL included), on SIGTERM, when COMMAND exits, or when there are more
than N processes of it at a time. Then removes the folder SCRATCH, and the shared memory that these processes left in /dev/shm, and
ends as COMMAND did, with the same exit status or signal; by the signal `TOO_MANY` if there were too many processes.

It is single-threaded: the kernel sends a parent-death signal when the *thread* that forked ends, not its process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import select
import shutil
import signal
import sys
import time
from pathlib import Path

TYPE_CHECKING = False  # as in typing, whose import would take a third of the guardian's start
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import IO, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
# The helpers of a killed main process have this long to exit: Python's resource tracker uses it to remove shared memory that would
# otherwise be left behind.
HELPER_GRACE_S = 1.0
_UNKILLABLE_TIMEOUT_S = 30.0
# The signal, SIGRTMAX, by which the guardian ends if COMMAND started too many processes: it can exit with any status.
TOO_MANY = 64
# Seconds between two counts of the processes. The system's own limit, RLIMIT_NPROC, counts all processes of a user, and not root's.
_COUNT_INTERVAL_S = 0.25
# Seconds between two looks at the files in /dev/shm that the processes have mapped, if the kernel does not report their creation;
# and from such a report to a second look. The mappings of a process cannot be found after it was killed.
LOOK_INTERVAL_S, LOOK_AGAIN_S = 2.0, 0.1
_IN_CREATE, _IN_NONBLOCK = 0x100, os.O_NONBLOCK  # linux/inotify.h
# Files of one family of processes: semaphores and shared memory of Python's multiprocessing, and those of SGLang, PyTorch and NCCL.
_SHARED_MEMORY = "/dev/shm"
_SHARED = re.compile(r"sem\.mp-|psm_|sglang_|torch_|nccl-")
_WORD = 8
_libc = ctypes.CDLL(None, use_errno=True)


class _Family:
    """The server's main process and everything that descends from it."""

    def __init__(self, become: Callable[[], object]) -> None:
        # Orphans of the server become children of this process, so they cannot escape into another session.
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.status: int | None = None
        self._shared: set[str] = set()
        self.main = os.fork()
        if self.main == 0:
            _detach()
            become()
            os._exit(0)

    def look(self) -> None:
        """Record the shared memory that the processes have mapped."""
        for pid in _descendants(os.getpid()):
            self._shared |= _shared_files(pid)

    def remove_shared(self) -> None:
        """Remove the recorded shared memory that is left."""
        for path in self._shared:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def reap(self) -> bool:
        """Collect ended processes. Return True if none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            if pid == self.main:
                self.status = status

    def end(self, grace_s: float) -> None:
        """End all processes: SIGTERM, then SIGKILL after ``grace_s`` seconds."""
        self.look()
        if self.status is None:
            os.killpg(self.main, signal.SIGTERM)
        if self._gone_within(grace_s):
            return
        if self.status is None:
            os.kill(self.main, signal.SIGKILL)
        if self._gone_within(HELPER_GRACE_S):
            return
        deadline = time.monotonic() + _UNKILLABLE_TIMEOUT_S
        while time.monotonic() < deadline:
            _tell(_descendants(os.getpid()), signal.SIGKILL)
            if self._gone_within(0.1):
                return

    def kill_too_many(self, most: int) -> bool:
        """Kill all processes if there are more than ``most``. Return True if there were."""
        if len(_running()) <= most:
            return False
        stopped: set[int] = set()
        deadline = time.monotonic() + _UNKILLABLE_TIMEOUT_S
        while (more := [pid for pid in _running() if pid not in stopped]) and time.monotonic() < deadline:
            _tell(more, signal.SIGSTOP)  # a stopped process cannot start others while they are killed
            stopped.update(more)
        _tell(_running(), signal.SIGKILL)
        return True

    def _gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.reap():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


def _descendants(ancestor: int) -> list[int]:
    """Process ids of all children of ``ancestor``, of their children, and so on."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The second field, the name, is in parentheses and may contain spaces and parentheses.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue
    family = [ancestor]
    for pid in family:
        family += [child for child, parent in parents.items() if parent == pid]
    return family[1:]


def _running() -> list[int]:
    """List the descendants of this process that have not ended."""
    running = []
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(OSError):
            running += [pid] if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "XZ" else []
    return running


def _tell(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _shared_files(pid: int) -> set[str]:
    """Return the files in shared memory, of the kinds of `_SHARED`, that a process has mapped. A process that has ended has none.

    They are recognised by their inodes: the C library makes a semaphore under another name, and then renames it.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        mapped = {int(line.split(maxsplit=5)[4]) for line in maps if f"{_SHARED_MEMORY}/" in line}
        with os.scandir(_SHARED_MEMORY) as files:
            return {file.path for file in files if _SHARED.match(file.name) and file.inode() in mapped}
    except OSError:
        return set()


def _watch_shared_memory() -> int:
    """Return a descriptor that is readable when a file is created in /dev/shm, or -1."""
    events: int = _libc.inotify_init1(_IN_NONBLOCK | os.O_CLOEXEC)
    if events >= 0 and _libc.inotify_add_watch(events, _SHARED_MEMORY.encode(), _IN_CREATE) < 0:
        os.close(events)
        return -1
    return events


def _detach() -> None:
    """Put this process, the guardian's child, into a session without input, and bind its life to the guardian's."""
    guardian = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:
        os._exit(1)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _execute(command: list[str]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and children inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error}", file=sys.stderr, flush=True)
        os._exit(127)


def start(
    command: Sequence[str], scratch: Path, grace_s: float, *, folder: Path | None, environment: Mapping[str, str],
    output: IO[bytes] | int, errors: IO[bytes] | int, most: int | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a command under a guardian, which ends it and removes `scratch` as the module's docstring describes.

    Raises:
        OSError: `folder` does not exist.
    """
    import subprocess  # takes longer than all other imports of the guardian

    limit = [] if most is None else [f"--most={most}"]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(grace_s), str(scratch), *limit, *command],
        stdin=subprocess.PIPE, stdout=output, stderr=errors, cwd=folder, env=environment,
        start_new_session=True,  # out of reach of the terminal's Ctrl-C
    )  # fmt: skip


class Forked:
    """A guardian that another process forks, and that reports to this one: what `end` uses of a `subprocess.Popen`."""

    def __init__(self, stdin: IO[bytes], ended: int) -> None:
        self.stdin: IO[bytes] | None = stdin
        self._ended, self._said = ended, b""

    @classmethod
    @contextlib.contextmanager
    def made(cls) -> Iterator[tuple[Forked, tuple[int, int]]]:
        """Yield one, and the descriptors for the process that forks it, which are closed here in the end: see `guard_fork`."""
        (read, write), (said, ended) = os.pipe(), os.pipe()
        made = cls(os.fdopen(write, "wb", 0), said)
        try:
            yield made, (read, ended)
        finally:
            os.close(read)
            os.close(ended)

    def poll(self) -> int | None:
        """Return the exit status, -n for a signal n, or None while it runs."""
        return self._status(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises `subprocess.TimeoutExpired`."""
        if (status := self._status(timeout)) is None:
            import subprocess

            raise subprocess.TimeoutExpired("a guardian", timeout or 0.0)
        pid, until = int.from_bytes(self._said[:_WORD], "little"), time.monotonic() + HELPER_GRACE_S
        with contextlib.suppress(ProcessLookupError):  # which says that it has ended after its last message
            while pid and time.monotonic() < until:
                os.kill(pid, 0)
                time.sleep(0.001)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None and self._said:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int.from_bytes(self._said, "little"), number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _status(self, seconds: float | None) -> int | None:
        until = None if seconds is None else time.monotonic() + seconds
        while len(self._said) < 2 * _WORD:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._ended], [], [], left)[0]:
                return None
            if not (more := os.read(self._ended, 2 * _WORD)):  # it was killed
                more = bytes(_WORD - len(self._said)) + (-signal.SIGKILL).to_bytes(_WORD, "little", signed=True)
            self._said += more
            if len(self._said) == 2 * _WORD:
                os.close(self._ended)
        return int.from_bytes(self._said[_WORD:], "little", signed=True)


def guard_fork(become: Callable[[], object], grace_s: float, scratch: str, most: int | None, ended: int) -> NoReturn:
    """Be a `Forked` guardian: `guard`, report process id and status to the descriptor `ended`, and end."""
    os.write(ended, os.getpid().to_bytes(_WORD, "little"))
    status = guard(become, grace_s, scratch, most) or 0
    os.write(ended, status.to_bytes(_WORD, "little", signed=True))
    os._exit(0)


def end(process: subprocess.Popen[bytes] | Forked, grace_s: float) -> None:
    """End a guarded command and everything that it started. Idempotent."""
    import subprocess

    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)  # a stopped guardian would not notice
    try:
        process.wait(grace_s + HELPER_GRACE_S + _UNKILLABLE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # the parent-death signal then ends the command too
        process.wait()


def guard(become: Callable[[], object], grace_s: float, scratch: str, most: int | None) -> int | None:
    """Fork a process that calls `become`, and guard it as the module's docstring describes.

    Returns:
        Its exit status, -n for a signal n, or None if it was ended here.
    """
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    told_to_stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: told_to_stop.append(number))
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # the default disposition would not wake select

    family = _Family(become)
    events = _watch_shared_memory()
    unasked = None if events >= 0 else LOOK_INTERVAL_S
    wait_s = unasked
    too_many = False
    while family.status is None and not told_to_stop and not too_many:
        timeout = wait_s if most is None else min(wait_s or _COUNT_INTERVAL_S, _COUNT_INTERVAL_S)
        ready, _, _ = select.select([0, woken, *([events] if events >= 0 else [])], [], [], timeout)
        too_many = most is not None and family.kill_too_many(most)
        if events in ready or not ready:
            family.look()
            wait_s = LOOK_AGAIN_S if ready else unasked  # a file is created before it is mapped
        if events in ready:
            os.read(events, 65536)
        if woken in ready:
            os.read(woken, 4096)
        family.reap()
        if 0 in ready and not os.read(0, 4096):
            break
    status = TOO_MANY if too_many else family.status
    family.end(grace_s)
    family.remove_shared()
    shutil.rmtree(scratch, ignore_errors=True)
    return None if status is None else os.waitstatus_to_exitcode(status)


def main() -> None:
    grace_s, scratch, command = float(sys.argv[1]), sys.argv[2], sys.argv[3:]
    most = int(command.pop(0).removeprefix("--most=")) if command[0].startswith("--most=") else None
    status = guard(lambda: _execute(command), grace_s, scratch, most) or 0
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the server's own core dump is enough
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
