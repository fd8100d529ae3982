"""The process of a server or a kernel: launched under a guardian, monitored, and ended with everything that it started."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from assay.harness.engines import guardian
from assay.harness.files import shown
from assay.harness.text import how_ended
from assay.harness.tracebacks import HEADER

# Seconds from SIGTERM to SIGKILL. SGLang checks for a SIGTERM every 5 s and has nothing to save that is worth the wait.
GRACE_S = 2.0
# Seconds between two looks at a server's processes.
LOOK_INTERVAL_S = 1.0
TAIL_LINES, _TAIL_BYTES, LINE_WIDTH, _NAME_WIDTH = 20, 256 * 1024, 300, 60

# A warning: Python's, with the indented line of source below it, or one that the server logged. Every server gives some.
_WARNS = re.compile(r"\b\w*Warning: |^\s|\bWARNING\b|\bdeprecated\b", re.IGNORECASE)
# Never the reason for an exit: the "leaks" that nanobind (in Triton) reports at every exit, up to a hundred lines; successful
# requests; SGLang's replies to our readiness queries; and the 400 lines of usage before an argparse error.
_NOISE = re.compile(
    r"nanobind: |See https://nanobind\.|\s+- (leaked (instance|type|function) |\.\.\. skipped remainder)"
    r"|\s+\[-"
    r'|.*"(GET|POST) /\S* HTTP/1\.1" 200 OK|.*"GET /health HTTP/1\.1" 503'
)
_SPAWNED = "multiprocessing.spawn import spawn_main"
# Name for a process that Python's multiprocessing has made and that has not named itself yet.
_UNNAMED = "a process without a name yet"
_ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


class ServerProcess:
    """One launch of a command. It is never restarted: a second launch is another `ServerProcess`.

    log: the file with its output.
        log: the file that has its output.
        scratch: the folder of its temporary files, which is removed when it ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
        secret: str = "",
    ) -> None:
        """Launch ``command`` in ``folder`` with its output appended to ``log``; quotes of the log omit ``secret``.

        Raises:
            OSError: folder or log cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._secret = secret
        self._looked = 0.0
        self._essential: dict[int, str] = {}
        self._ended: dict[int, str] = {}
        self._main: int | None = None
        self._oom_kills = _oom_kills()
        # SGLang leaves sockets and other small files in the temporary folder, so it gets one that is removed with it.
        self.scratch = Path(tempfile.mkdtemp(prefix="assay-"))
        try:
            with log.open("ab") as logged:
                self.log_start, private = logged.tell(), {**environment, "TMPDIR": str(self.scratch)}
                self._guardian = guardian.start(
                    command, self.scratch, GRACE_S, folder=folder, environment=private, output=logged, errors=logged
                )
        except BaseException:
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise

    @property
    def pid(self) -> int:
        """Process id of the guardian; the server's processes descend from it."""
        return self._guardian.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; the negative number of the signal that ended it."""
        return self._guardian.poll()

    @property
    def how_it_ended(self) -> str:
        """Describe the end: "exited with status 2", "was killed by SIGKILL"."""
        status = self.exit_status
        return "is running" if status is None else how_ended(status)

    @property
    def ran_out_of_memory(self) -> bool:
        """True if the OOM killer has killed a process since launch."""
        return _oom_kills() > self._oom_kills

    def log_tail(self) -> str:
        """Return the most informative last lines of this launch's log, indented, under the log's path."""
        lines = "\n".join(f"  {line}" for line in _telling_lines(self.recent_log()))
        log = shown(self.log)
        return f"Its log ({log}) ends:\n{lines}" if lines else f"Its log ({log}) is empty."

    def last_line(self, warnings: bool = True) -> str:
        """Return the last line of this launch's log that is not known noise, or a warning unless `warnings`, or an empty string."""
        return next((line for line in reversed(_lines(self.recent_log())) if warnings or not _WARNS.search(line)), "")

    def recent_log(self) -> str:
        """Return the last `_TAIL_BYTES` that this launch wrote, without its secret."""
        with self.log.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(self.log_start, end - _TAIL_BYTES))
            text = stream.read().decode(errors="replace")
        return text.replace(self._secret, "***") if self._secret else text

    def lost(self, essential: str) -> tuple[str, str] | None:
        """Look at most once in `LOOK_INTERVAL_S` for a process that must not end before the server and has ended.

        Such processes have names that begin with `essential`; one without a name yet counts only if it failed. Only what two
        looks in a row agree on counts, since a server whose process has died may be about to end: then only its own end counts; see
        `exit_status`. Returns the name of the process, and how it ended: "exited with status 7", "has ended".
        """
        now = time.monotonic()
        if now - self._looked < LOOK_INTERVAL_S:
            return None
        self._looked = now
        family = psutil.Process(self.pid).children(recursive=True) if psutil.pid_exists(self.pid) else []
        seen = {pid: _look(pid) for pid in {self.pid, *(process.pid for process in family), *self._essential}}
        if self._main is None:  # a later child of the guardian is an orphan of the server
            self._main = min((pid for pid, look in seen.items() if look.parent == self.pid), default=None)
        elif self._main not in seen or seen[self._main].state in _ENDED:
            return None
        for pid, look in seen.items():
            parent = seen.get(look.parent) or _look(look.parent)
            if look.name.startswith(essential) or look.name == _UNNAMED:
                # Until a fork runs something else, it has its parent's name.
                self._essential |= {} if not look.parent or look.name == parent.name else {pid: look.name}
        ended: dict[int, str] = {}
        for pid, name in self._essential.items():
            status = _exit_status(pid) if seen[pid].state == psutil.STATUS_ZOMBIE else None
            if seen[pid].state in _ENDED and (name.startswith(essential) or status):
                ended[pid] = "has ended" if status is None else how_ended(status)
        still = [(self._essential[pid], how) for pid, how in sorted(ended.items()) if self._ended.get(pid) == how]
        self._ended = ended
        return next(iter(still), None)

    def stop(self) -> None:
        """End the server and everything it started; return when they have ended. Idempotent; may be called from any thread."""
        guardian.end(self._guardian, GRACE_S)
        shutil.rmtree(self.scratch, ignore_errors=True)  # the guardian did it, unless it was killed


class _Look(NamedTuple):
    """The visible part of a process: its state, the name that it gives itself, as "sglang::scheduler", and its parent."""

    state: str
    name: str
    parent: int


def _look(pid: int) -> _Look:
    """Look at a process, which may have ended."""
    try:
        process = psutil.Process(pid)
        try:
            title = " ".join(process.cmdline()).strip()
        except psutil.ZombieProcess:
            title = ""
        name = _UNNAMED if _SPAWNED in title else title[:_NAME_WIDTH] or process.name()
        return _Look(process.status(), name, process.ppid())
    except psutil.Error:
        return _Look(psutil.STATUS_DEAD, "a process", 0)


def _exit_status(pid: int) -> int | None:
    """Return the exit status, as `subprocess` has it, of a process that its parent has not reaped, or None if it cannot be read."""
    try:
        return os.waitstatus_to_exitcode(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[49]))
    except (OSError, IndexError, ValueError):
        return None


def _oom_kills() -> int:
    """Count the processes that the OOM killer has killed since boot, or return 0 if the system does not count them."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _telling_lines(log: str) -> list[str]:
    """Return the last lines of a log; if it contains a traceback, the end of the last one and the last lines."""
    lines = _lines(log)
    head = max((number for number, line in enumerate(lines) if HEADER in line), default=len(lines))
    if head >= len(lines) - TAIL_LINES:
        return lines[-TAIL_LINES:]
    # A traceback ends with its first line that is not indented: the exception.
    end = next((n for n in range(head + 1, len(lines)) if not lines[n].startswith(" ")), len(lines) - 1)
    last = lines[max(end + 1, len(lines) - TAIL_LINES // 4) :]
    first = max(head, end + 1 - (TAIL_LINES - len(last)))
    between = ["..."] if end + 1 + len(last) < len(lines) else []
    return [*lines[first : end + 1], *between, *last]


def _lines(log: str) -> list[str]:
    """List the lines of a log, cut to `LINE_WIDTH` characters, without empty lines and known noise."""
    return [line[:LINE_WIDTH].rstrip() for line in log.splitlines() if line.strip() and not _NOISE.match(line)]
