"""A server that assay starts and stops, whatever its engine: proven to be the one that answers, and watched until its end.

An engine's own server (`server`) adds what differs: what it tells about itself, how tokens are
scored, and how its cache is emptied.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self, cast

from assay.harness.engines import failures, generation, registry
from assay.harness.engines.base import Engine, Score
from assay.harness.engines.client import Client
from assay.harness.engines.inside.control import API_KEY
from assay.harness.engines.launch import HOST, Launch, launching, shell_line
from assay.harness.engines.process import ServerProcess
from assay.harness.errors import EngineError, EvidenceError
from assay.harness.evidence.envelope import EngineLimits
from assay.harness.evidence.manifest import engine_label
from assay.harness.evidence.records import Answer, Item
from assay.harness.sides import profile_of
from assay.harness.text import one_line

_PORT_ATTEMPTS = 3
_POLL_INTERVAL_S, PROBE_TIMEOUT_S = 0.25, 5.0
_LAST_LINE = 160
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class _PortTaken(Exception):
    pass


class LaunchedServer(Engine):
    """A server in its own process group, proven to be the one that answers.

    Attributes:
        launch: how it is started.
        essential: the beginning of the names of its processes that must not end before the server does.
        parts: the plain names of these processes, which follow `essential`.
    """

    essential: ClassVar[str]
    parts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, launch: Launch) -> None:
        self.url = ""
        self.launch = launch
        self.kind = launch.engine
        self.role, self.backend, self.evidence = launch.role, launch.backend, launch.evidence
        self.scores = True
        self.label = f"{profile_of(launch.engine).title} on {launch.device}"
        self.who = f"the {launch.role} server ({launch.backend})"
        self._name, self._key = "", ""
        self._arguments: dict[str, Any] = {}
        self._process: ServerProcess | None = None
        self._lock = threading.Lock()  # between a launch and a stop from another thread

    def start(self) -> None:
        """Launch the server, wait until it is ready, and prove that it is the one that answers.

        Raises:
            EngineError: it died (with its log), it was not ready in time, or another server holds its port.
            EvidenceError: its folder or its log cannot be written.
        """
        try:
            for attempt in range(1, _PORT_ATTEMPTS + 1):
                try:
                    self._start_on(_free_port())
                    return
                except _PortTaken as taken:
                    if attempt == _PORT_ATTEMPTS:
                        raise EngineError(
                            f"{self.who} could not get a port in {_PORT_ATTEMPTS} attempts: {taken}.",
                            f"a free port on {HOST}",
                            "end what holds the ports (ss -ltnp lists it), and repeat the command",
                            cause="port",
                        ) from None
                    self.stop()
        except BaseException:
            self.stop()
            raise

    def _start_on(self, port: int) -> None:
        self._name, self._key = f"assay-{self.role}-{secrets.token_hex(4)}", secrets.token_hex(24)
        own = launching(self.kind)
        argv = own.command(self.launch, port, self._name)
        ours = own.settings(self.launch, os.environ)
        self.url, self.launch_command = f"http://{HOST}:{port}", shell_line(ours, argv)
        self.startup_s, started = None, time.monotonic()
        with self._lock:
            try:
                # The key is not in the launch command, which reports show.
                environment = {**os.environ, **ours, API_KEY: self._key}
                self._process = ServerProcess(argv, environment, self.launch.evidence, self.launch.log, self._key)
            except OSError as error:
                raise EvidenceError(
                    f"{self.who} cannot be launched: {error}.", "a folder that can be written", "give another --out"
                ) from error
        client = self._client()
        self._wait_until_ready(client, self._process, started)
        self.startup_s = time.monotonic() - started
        version, told = self._told(client)
        self._arguments = json.loads(
            json.dumps(told).replace(self._key, "***")
        )  # a command line, or variables, have the key too
        self.label = engine_label(self.kind, version, self.launch.device)

    def _told(self, client: Client) -> tuple[str, dict[str, Any]]:
        """Ask a server that is ready for its version and its arguments."""
        raise NotImplementedError

    def _wait_until_ready(self, client: Client, process: ServerProcess, started: float) -> None:
        while client.status("/health", PROBE_TIMEOUT_S) != 200:
            # SGLang 0.5.23 logs this and stays up, so waiting for its exit would not work.
            if "address already in use" in process.recent_log().lower():
                raise _PortTaken(f"{self.url}: address already in use, taken while the server started")
            if process.exit_status is not None:
                raise self._dead(process)
            self._check_processes(process)
            if time.monotonic() - started > self.launch.startup_timeout:
                last = one_line(_COLOUR.sub("", process.last_line()), _LAST_LINE)
                raise client.error(
                    f"was not ready after {self.launch.startup_timeout:g} s; "
                    f"{f'its last line was: {last}' if last else 'it wrote nothing'}",
                    "/health to answer 200",
                    "raise --startup-timeout, or read its log for what it waits for",
                )
            time.sleep(_POLL_INTERVAL_S)
        names = client.models()
        if self._name not in names:  # adapters of the model are listed with it
            raise _PortTaken(f"{self.url} belongs to another server, which serves {names}")
        if client.status("/v1/models", PROBE_TIMEOUT_S, authorized=False) != 401:
            raise client.error(
                "answers requests without the key that it was given.",
                "HTTP 401, so that only this run's requests are counted",
                "install assay where the server's Python finds it: its plugin sets the key",
            )

    def client(self) -> Client:
        self.check()
        return self._client()

    def _client(self) -> Client:
        return Client(
            self.url,
            self.who,
            self.role,
            api_key=self._key,
            timeout_s=self.launch.request_timeout,
            model=self.model,
            check=self.check,
            log_tail=self._log_tail,
            unreported_cache=0,  # launched to report cached tokens; an engine may omit the field if it is 0
        )

    @property
    def model(self) -> str:
        """The model that requests name."""
        return self._name

    def stop(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.stop()

    def check(self) -> None:
        process = self._process
        if process is None:
            raise EngineError(f"{self.who} was not started.", "a running server", "start it first")
        if process.exit_status is not None:
            raise self._dead(process)
        self._check_processes(process)

    def _check_processes(self, process: ServerProcess) -> None:
        """Raise if a process has ended: the main process may stay, waiting at its own exit for those that are left."""
        if lost := process.lost(self.essential):
            raise self._dead(process, *lost)

    def _dead(self, process: ServerProcess, part: str = "", how: str = "") -> EngineError:
        return failures.ended(
            self.kind,
            self.who,
            how or process.how_it_ended,
            "during start-up" if self.startup_s is None else "after it was ready",
            process.recent_log(),
            process.log_tail(),
            process=self._plain(part) if part else "",
            out_of_memory=process.ran_out_of_memory,
        )

    def _plain(self, title: str) -> str:
        """Name a process in plain words, by its title, which the system may cut: "scheduler" for "sglang::schedul"."""
        cut = title.removeprefix(self.essential)
        return next((name for name in self.parts if cut and name.startswith(cut)), title)

    def with_flags(self, flags: tuple[str, ...]) -> Self:
        return type(self)(replace(self.launch, common=flags))

    def last_step(self) -> str:
        """Return the last line that it logged since it was started, except warnings, or an empty string."""
        return self._process.last_line(warnings=False) if self._process is not None else ""

    def generate_all(
        self, items: Sequence[Item], prompts: Sequence[Sequence[int]], tokens: Sequence[int], top_logprobs: int
    ) -> list[Answer]:
        return generation.generate_all(self, items, prompts, tokens, top_logprobs)

    def score(self, ids: Sequence[int], start: int, top_k: int, at: Sequence[int] = ()) -> Score:
        return generation.score(self, ids, start, top_k, at)

    def _log_tail(self) -> str:
        return self._process.log_tail() if self._process is not None else ""

    def arguments(self) -> dict[str, Any]:
        return registry.arguments(self.kind).settled(self._arguments)

    def limits(self, context: int) -> EngineLimits | None:
        return registry.arguments(self.kind).limits_of(self.arguments(), context)


def server(launch: Launch) -> LaunchedServer:
    """Make a server of the engine that a launch names, without starting it."""
    return cast(LaunchedServer, registry.module(launch.engine, "server").SERVER(launch))


def _free_port() -> int:
    """Find a port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
