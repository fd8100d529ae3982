"""An MLC-LLM server, started by assay or known by its URL, and the event trace that it records.

The interface is that of MLC-LLM at 79d603f (July 2026), which calls itself 0.1.dev0: ``mlc_llm serve`` (``cli/serve.py``), OpenAI's
routes, and with ``--enable-debug`` those of ``debug_entrypoints.py``. ``POST /debug/dump_event_trace`` with the body
``{"model": NAME}`` answers with Chrome trace events if the server also has ``--enable-tracing``; otherwise it answers HTTP 400, and
without ``--enable-debug`` 404. ``POST /debug/reset_engine`` with the same body empties the engine, its prefix cache included.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

from assay.harness.backend import URL_FORM, is_server_url
from assay.harness.engines.client import Client
from assay.harness.engines.process import ServerProcess
from assay.harness.engines.remote import RemoteServer
from assay.harness.engines.sglang import POLL_INTERVAL_S, PROBE_TIMEOUT_S, free_port
from assay.harness.errors import EngineError, EvidenceError, UsageError
from assay.harness.sides import Role

COMMAND = "mlc_llm"
FLAGS = ("--enable-debug", "--enable-tracing")
"""Without them, a server records no trace or does not give it away."""
PREFIX = "mlc:"
"""What a model for `LaunchedMlc` is named with: ``mlc:HF://mlc-ai/Llama-3.2-1B-Instruct-q4f16_1-MLC``."""


class MlcServer(RemoteServer):
    """An MLC-LLM server known by its URL. Its own addresses are not of OpenAI's interface."""

    _speaks = Client

    def __init__(self, role: Role, url: str, request_timeout: float) -> None:
        super().__init__(role, url, request_timeout)
        self.label = f"MLC-LLM at {self.url}"

    def event_trace(self) -> list[Any]:
        """The events of all requests since the server started, as Chrome trace events.

        Raises:
            EngineError: the server records none, or does not answer with a list of events.
        """
        if not self._model:
            self.start()
        try:
            events = self._client.post_json("/debug/dump_event_trace", {"model": self._model})
        except EngineError as error:
            raise EngineError(
                error.found,
                f"a server of MLC-LLM that was started with {' and '.join(FLAGS)}",
                f"{COMMAND} serve MODEL {' '.join(FLAGS)}",
            ) from None
        if not isinstance(events, list):
            raise self._client.error(
                f"answered /debug/dump_event_trace with {str(events)[:100]!r}.",
                "a list of events",
                "name another server",
            )
        return events

    def flush_cache(self) -> None:
        """Reset the engine, which empties its prefix cache. A server without ``--enable-debug`` keeps it, and says so.

        Raises:
            EngineError: the server refuses.
        """
        if not self._model:
            self.start()
        self._client.post_json("/debug/reset_engine", {"model": self._model})


class LaunchedMlc(MlcServer):
    """An MLC-LLM server that assay starts with ``mlc_llm serve``, and stops.

    Args:
        role: which side of a comparison it is.
        model: what ``mlc_llm serve`` takes: a folder, or ``HF://`` and a repository.
        folder: its working directory, which also gets its log.
        device: as ``mlc_llm serve`` names it, for example "cuda:0"; "auto" leaves it to MLC-LLM.
        startup_timeout: seconds until it must answer; compiling a model takes minutes.
        request_timeout: seconds until an answer must be complete.
    """

    def __init__(
        self, role: Role, model: str, folder: Path, device: str, startup_timeout: float, request_timeout: float
    ) -> None:
        super().__init__(role, "", request_timeout)
        self.backend, self.label = f"{PREFIX}{model}", f"MLC-LLM on {device}"
        self._given, self._folder, self._device, self._startup_timeout = model, folder, device, startup_timeout
        self._process: ServerProcess | None = None

    def start(self) -> None:
        """Launch the server and wait until it serves the model.

        Raises:
            UsageError: there is no command ``mlc_llm``.
            EngineError: it ended, or was not ready in time; with its log.
            EvidenceError: its folder cannot be written.
        """
        found = shutil.which(COMMAND)
        if found is None:
            raise UsageError(
                f"The command {COMMAND} was not found.",
                "MLC-LLM on this machine, or the URL of a server that runs elsewhere",
                f"install MLC-LLM (llm.mlc.ai/docs/install), or start `{COMMAND} serve MODEL {' '.join(FLAGS)}` "
                "elsewhere and name its URL",
            )
        port = free_port()
        argv = [
            found, "serve", self._given, "--device", self._device, *FLAGS, "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip
        self.url, self.launch_command = f"http://127.0.0.1:{port}", shlex.join(argv)
        self._client, started = self.client(Client), time.monotonic()
        try:
            self._process = ServerProcess(argv, os.environ, self._folder, self._folder / "server.log")
        except OSError as error:
            raise EvidenceError(
                f"The MLC-LLM server cannot be launched: {error}.",
                "a folder that can be written",
                "name another folder",
            ) from error
        try:
            while self._client.status("/v1/models", PROBE_TIMEOUT_S) != 200:
                self.check()
                if time.monotonic() - started > self._startup_timeout:
                    raise EngineError(
                        f"The MLC-LLM server was not ready after {self._startup_timeout:g} s.",
                        "/v1/models to answer 200",
                        "read the log, or compile the model first",
                        details=self._process.log_tail(),
                    )
                time.sleep(POLL_INTERVAL_S)
            super().start()
        except BaseException:
            self.stop()
            raise
        self.startup_s = time.monotonic() - started

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()

    def check(self) -> None:
        process = self._process
        if process is not None and process.exit_status is not None:
            raise EngineError(
                f"The MLC-LLM server {process.how_it_ended}.",
                "a running server",
                "read its log",
                details=process.log_tail(),
            )


def mlc_server(name: str, folder: Path, device: str, startup_timeout: float, request_timeout: float) -> MlcServer:
    """The server that a name stands for: a URL, or ``mlc:MODEL``.

    Raises:
        UsageError: it is neither.
    """
    if name.startswith(("http://", "https://")):
        if not is_server_url(name):
            raise UsageError(f"{name} is not the URL of a server.", URL_FORM, "correct the URL")
        return MlcServer("reference", name, request_timeout)
    if name.startswith(PREFIX) and name != PREFIX:
        return LaunchedMlc("reference", name.removeprefix(PREFIX), folder, device, startup_timeout, request_timeout)
    raise UsageError(
        f"{name!r} names no MLC-LLM server.", f"a URL, or {PREFIX}MODEL", f"for example {PREFIX}HF://mlc-ai/MODEL"
    )
