"""A Python that has imported what most commands of assay import, and that runs each program in a fork of itself.

Tests run a hundred programs in processes of their own; a new Python takes two seconds of CPU time for the imports of each.
A fork runs ``-m MODULE``, ``-c CODE`` or a script as a new Python would: its own arguments, environment, working folder, import
path and streams, and its own end, with exit handlers, an exit code or a signal. What concerns start-up itself (imports,
encodings of streams, Ctrl-C while modules load) must be tested with a new Python.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch

MODULES = (
    "pytest",
    "assay.harness.cli.kernel",
    "assay.harness.attention.bugs.faults",
    "assay.harness.readout",
    "assay.reports.terminal",
)


class WarmPython:
    """The warm process, for the tests of one session."""

    def __init__(self) -> None:
        self._control, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno())],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )

    def run(
        self, *arguments: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a program and return what `subprocess.run` with captured text would.

        Args:
            arguments: those of Python: ``-m MODULE``, ``-c CODE`` or a script, then the program's own.
            cwd: its working folder; by default this process's.
            env: its whole environment; by default this process's.
            timeout: seconds after which it is killed.

        Raises:
            subprocess.TimeoutExpired: it was killed.
        """
        request = {"arguments": arguments, "cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env)}
        streams = [os.memfd_create(name) for name in ("stdout", "stderr")]
        try:
            message = json.dumps(request).encode()
            socket.send_fds(self._control, [len(message).to_bytes(4, "big") + message], streams)
            child = int.from_bytes(self._received(4), "big")
            self._control.settimeout(timeout)
            try:
                status = self._received(4)
            except TimeoutError:
                os.kill(child, signal.SIGKILL)
                self._control.settimeout(None)
                self._received(4)
                raise subprocess.TimeoutExpired(arguments, timeout) from None
            finally:
                self._control.settimeout(None)
            stdout, stderr = (_contents(stream) for stream in streams)
        finally:
            for stream in streams:
                os.close(stream)
        code = os.waitstatus_to_exitcode(int.from_bytes(status, "big"))
        return subprocess.CompletedProcess(arguments, code, stdout, stderr)

    def _received(self, size: int) -> bytes:
        received = b""
        while len(received) < size:
            if not (part := self._control.recv(size - len(received))):
                raise RuntimeError(f"the warm Python ended with {self._process.wait()}")
            received += part
        return received

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._control.close()
        self._process.wait()


def _contents(stream: int) -> str:
    with open(os.dup(stream), encoding="utf-8") as file:
        file.seek(0)
        return file.read()


def _serve(control: socket.socket) -> list[str]:
    """Fork for each request until the other side is gone; return in each fork, with the arguments of its program."""
    while True:
        size, streams, _, _ = socket.recv_fds(control, 4, 2)
        if not size:
            sys.exit()
        message = b""
        while len(message) < int.from_bytes(size, "big"):
            message += control.recv(int.from_bytes(size, "big") - len(message))
        request = json.loads(message)
        child = os.fork()
        if child == 0:
            control.close()
            for stream, number in zip(streams, (1, 2), strict=True):
                os.dup2(stream, number)
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["env"])
        for stream in streams:
            os.close(stream)
        if child == 0:
            return list(request["arguments"])
        control.sendall(child.to_bytes(4, "big"))
        control.sendall(os.waitpid(child, 0)[1].to_bytes(4, "big"))


def _run(kind: str, *rest: str) -> None:
    """Run a program with the arguments and the import path that a new Python gives it."""
    what = rest[0] if kind in ("-c", "-m") else kind
    folder = {"-c": "", "-m": str(Path.cwd())}.get(kind, str(Path(kind).resolve().parent))
    added = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    own = str(Path(__file__).resolve().parent)
    sys.path[:] = [folder, *added, *(part for part in sys.path if part not in (own, *added))]
    importlib.invalidate_caches()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    sys.argv[:] = [kind, *rest] if what == kind else [kind, *rest[1:]]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(kind, run_name="__main__")


def _end(code: int) -> None:
    """End a fork as Python does, but for taking apart all that was imported, which would copy its memory."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (AttributeError, OSError, ValueError):
        sys.exit(code)  # Python says what it could not write
    os._exit(code & 0xFF)


def main() -> None:
    """Import, serve, and run a program in each fork."""
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else the first collection in each fork copies the memory of all that was imported
    try:
        _run(*_serve(socket.socket(fileno=int(sys.argv[1]))))
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        _end(ended.code or 0)
    _end(0)


if __name__ == "__main__":
    main()
