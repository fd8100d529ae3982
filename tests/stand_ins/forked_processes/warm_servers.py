"""A template for SGLang servers: it has imported SGLang, and forks the guardian of each server, which forks the server.

Importing SGLang takes a server 7 s of CPU time. Guardian, signals and clean-up are the product's own: `guardian.guard_fork`.
Tests that are marked slow start servers without it, as users do.

``python warm_servers.py SOCKET`` is a template, until its standard input ends. ``python warm_servers.py SOCKET -m assay ...`` runs
assay with servers of the template at this socket.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from assay.harness.engines import guardian
from assay.harness.engines.sglang.launch import MODULE, STAND_INS

IMPORTED = ("sglang.srt.entrypoints.http_server", "sglang.srt.managers.scheduler", "sglang.srt.models.llama", MODULE)
READ_ON_IMPORT = {
    "SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip
"""Variables that must be the same in all servers of a template."""


class Warm(guardian.Forked):
    """A guardian that the template has forked, as `ServerProcess` uses it."""

    @property
    def pid(self) -> int:
        return int.from_bytes(self._said[:8], "little")


def start_template(path: Path) -> subprocess.Popen[bytes]:
    """Start a template that listens at a path. It ends with its standard input, or with this process."""
    environment = {**os.environ, **READ_ON_IMPORT, "PYTHONPATH": os.pathsep.join((str(STAND_INS), *filter(None, sys.path)))}
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
    template = subprocess.Popen([sys.executable, __file__, str(path)], stdin=subprocess.PIPE, env=environment, **quiet)  # type: ignore[call-overload]
    assert template.stdout.read(1), "the template has failed"
    return template  # type: ignore[no-any-return]


def start_from(path: Path) -> Callable[..., Any]:
    """Return `guardian.start` with servers of SGLang forked by the template at a path; everything else is started as it is."""
    start = guardian.start

    def forked(command: Sequence[str], scratch: Path, grace_s: float, **how: Any) -> subprocess.Popen[bytes] | Warm:
        if command[1:3] != ["-m", MODULE]:
            return start(command, scratch, grace_s, **how)
        environment = how["environment"]
        assert READ_ON_IMPORT.items() <= environment.items(), "a server whose SGLang would be imported otherwise"
        asked = {"words": command[2:], "scratch": str(scratch), "grace_s": grace_s, "folder": str(how["folder"])}
        with Warm.made() as (made, given), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
            control.connect(str(path))
            message = json.dumps({**asked, "environment": dict(environment)}).encode()
            socket.send_fds(control, [message], [*given, how["output"].fileno()])
            made._said = os.read(made._ended, 8)  # its process id
        return made

    return forked


def serve(path: str) -> NoReturn:
    """Be a template."""
    gc.disable()
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a guardian reports its own end
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen()
        os.write(1, b".")
        while True:
            ready, _, _ = select.select([0, listening], [], [])
            if 0 in ready:
                os._exit(0)
            connection, _ = listening.accept()
            message, given, _, _ = socket.recv_fds(connection, 2**20, 3)
            if message and os.fork() == 0:
                listening.close()
                connection.close()
                guard(json.loads(message), *given)
            connection.close()
            for descriptor in given:
                os.close(descriptor)


def guard(asked: Mapping[str, Any], read: int, ended: int, output: int) -> NoReturn:
    """Guard a server in this process, a fork of the template."""
    try:
        os.setsid()
        for descriptor, standard in ((read, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, standard)
        os.close(read)
        os.close(output)

        def become() -> None:
            os.close(ended)
            os.chdir(asked["folder"])
            os.environ.clear()
            os.environ.update(asked["environment"])
            sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
            sys.argv[:] = asked["words"]
            del sys.modules[MODULE]
            gc.enable()
            runpy.run_module(MODULE, run_name="__main__", alter_sys=True)

        guardian.guard_fork(become, asked["grace_s"], asked["scratch"], None, ended)
    finally:
        os._exit(1)


if __name__ == "__main__":
    if sys.argv[2:]:
        guardian.start = start_from(Path(sys.argv[1]))
        sys.argv[:] = sys.argv[3:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        serve(sys.argv[1])
