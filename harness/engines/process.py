"""A server's process, or that of a kernel: launched under a guardian, monitored, and ended with everything that it started."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from assay.harness.engines import guardian

GRACE_S = 2.0
"""Seconds from SIGTERM to SIGKILL. SGLang checks for a SIGTERM every 5 s and has nothing to save that is worth the wait."""
LOOK_INTERVAL_S = 1.0
"""Seconds between two looks at the states of a server's processes."""
TAIL_LINES, TAIL_BYTES, LINE_WIDTH, NAME_WIDTH = 20, 256 * 1024, 300, 60

# Never the reason for an exit: the "leaks" that nanobind (in Triton) reports at every exit, up to a hundred lines; successful
# requests; SGLang's replies to our readiness queries; and the 400 lines of usage before an argparse error.
_NOISE = re.compile(
    r"nanobind: |See https://nanobind\.|\s+- (leaked (instance|type|function) |\.\.\. skipped remainder)"
    r"|\s+\[-"
    r'|.*"(GET|POST) /\S* HTTP/1\.1" 200 OK|.*"GET /health HTTP/1\.1" 503'
)
_TRACEBACK = "Traceback (most recent call last)"


class ServerProcess:
    """One launch of a command. It is never restarted: a second launch is another `ServerProcess`."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path, secret: str = ""
    ) -> None:
        """Launch ``command`` in ``folder`` with its output appended to ``log``; ``secret`` is left out where the log is quoted.

        Raises:
            OSError: folder or log cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._secret = secret
        self._looked = 0.0
        self._essential: dict[int, str] = {}
        self._trouble: dict[int, str] = {}
        # SGLang leaves sockets and other small files in the temporary folder, so it gets one that is removed with it.
        self._scratch = tempfile.mkdtemp(prefix="assay-")
        guarded = [sys.executable, "-I", "-S", guardian.__file__, str(GRACE_S), self._scratch, *command]
        try:
            with log.open("ab") as output:
                self.log_start = output.tell()
                self._guardian = subprocess.Popen(
                    guarded,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=folder,
                    env={**environment, "TMPDIR": self._scratch},
                    start_new_session=True,  # out of reach of the terminal's Ctrl-C
                )
        except BaseException:
            shutil.rmtree(self._scratch, ignore_errors=True)
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
        """In words: "exited with status 2", "was killed by SIGKILL"."""
        status = self.exit_status
        if status is None:
            return "is running"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"

    def log_tail(self) -> str:
        """The most informative last lines of this launch's log, indented, under the log's path."""
        lines = "\n".join(f"  {line}" for line in telling_lines(self.recent_log()))
        return f"Its log ({self.log}) ends:\n{lines}" if lines else f"Its log ({self.log}) is empty."

    def last_line(self) -> str:
        """The last line of this launch's log that is not known noise; empty if there is none."""
        return next(iter(_lines(self.recent_log())[-1:]), "")

    def wrote(self, text: str) -> bool:
        """Whether ``text`` (in lower case) occurs, in any case, in the last `TAIL_BYTES` of this launch's log."""
        return text in self.recent_log().lower()

    def recent_log(self) -> str:
        """The last `TAIL_BYTES` of what this launch wrote, with its secret left out."""
        with self.log.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(self.log_start, end - TAIL_BYTES))
            text = stream.read().decode(errors="replace")
        return text.replace(self._secret, "***") if self._secret else text

    def trouble(self, essential: str) -> str:
        """What a process of the server has come to, in words; empty if nothing is wrong. Looks at most once in `LOOK_INTERVAL_S`.

        Only what two looks in a row have seen counts: a debugger stops a process for a moment, and a server whose process has died
        may be about to end.

        Args:
            essential: how those processes call themselves that must not end before the server does.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_INTERVAL_S:
            return ""
        self._looked = now
        states = {pid: _state(pid) for pid in {self.pid, *guardian.descendants(self.pid), *self._essential}}
        self._essential |= {pid: name for pid in states if (name := name_of(pid)).startswith(essential)}
        found = {pid: "is stopped, as by SIGSTOP" for pid, state in states.items() if state in "Tt"}
        found |= {pid: "has ended" for pid in self._essential if states[pid] in "XZ"}
        still = sorted(found.items() & self._trouble.items())
        self._trouble = found
        return next((f"{self._essential.get(pid) or name_of(pid)} (process {pid}) {what}" for pid, what in still), "")

    def stop(self) -> None:
        """End the server and everything it started; return when they have ended. Idempotent; may be called from any thread."""
        assert self._guardian.stdin is not None
        self._guardian.stdin.close()
        with suppress(ProcessLookupError):
            self._guardian.send_signal(signal.SIGCONT)  # a stopped guardian would not notice
        try:
            self._guardian.wait(GRACE_S + guardian.HELPER_GRACE_S + guardian.UNKILLABLE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._guardian.kill()  # the parent-death signal then ends the server too
            self._guardian.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)  # the guardian did it, unless it was killed


def _state(pid: int) -> str:
    """The state of a process as in ``/proc/<pid>/stat``: "T" is stopped, "t" is stopped by a debugger. "X" if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def name_of(pid: int) -> str:
    """What a process calls itself, for example "sglang::scheduler"."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return title[:NAME_WIDTH] or Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "a process"


def telling_lines(log: str, most: int = TAIL_LINES) -> list[str]:
    """The last lines of a log; if it contains a traceback, the end of the last traceback and the last lines.

    Lines are cut to `LINE_WIDTH` characters. Empty lines and known noise are omitted.
    """
    lines = _lines(log)
    heads = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    if not heads or heads[-1] >= len(lines) - most:
        return lines[-most:]
    # A traceback ends with its first line that is not indented: the exception.
    end = next((n for n in range(heads[-1] + 1, len(lines)) if not lines[n].startswith(" ")), len(lines) - 1)
    last = lines[max(end + 1, len(lines) - most // 4) :]
    first = max(heads[-1], end + 1 - (most - len(last)))
    between = ["..."] if end + 1 + len(last) < len(lines) else []
    return [*lines[first : end + 1], *between, *last]


def _lines(log: str) -> list[str]:
    """The lines of a log, cut to `LINE_WIDTH` characters, without empty lines and known noise."""
    return [line[:LINE_WIDTH].rstrip() for line in log.splitlines() if line.strip() and not _NOISE.match(line)]
