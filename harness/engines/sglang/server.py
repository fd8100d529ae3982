"""An SGLang server, started and stopped by assay."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from assay.harness.engines.base import Engine
from assay.harness.engines.client import INFO_TIMEOUT_S, Client
from assay.harness.engines.inside.control import API_KEY
from assay.harness.engines.process import ServerProcess
from assay.harness.engines.sglang import arguments, failures, launch
from assay.harness.engines.sglang.common import agree, resolved_arguments
from assay.harness.engines.sglang.launch import Launch
from assay.harness.engines.sglang.served_fingerprint import fingerprint_of
from assay.harness.errors import EngineError, EvidenceError
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.evidence.manifest import CommonSettings, engine_label
from assay.harness.text import one_line

_PORT_ATTEMPTS = 3
POLL_INTERVAL_S, PROBE_TIMEOUT_S = 0.25, 5.0
_FLUSH_TIMEOUT_S = 10
_LAST_LINE = 160
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ESSENTIAL = "sglang::"  # the titles of its scheduler and detokenizer; it does not notice if they exit with status 0


class _PortTaken(Exception):
    pass


class SGLangServer(Engine):
    """An SGLang server in its own process group, proven to be the one that answers.

    Attributes:
        adapter: name of the adapter that requests name, if any.
    """

    def __init__(self, launch: Launch) -> None:
        self.adapter, self.url = "", ""
        self.launch = launch
        self.role, self.backend, self.evidence = launch.role, launch.backend, launch.evidence
        self.scores = True
        self.label = f"SGLang on {launch.device}"
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
                            "a free port on 127.0.0.1",
                            "end what holds the ports (ss -ltnp lists it), and repeat the command",
                            cause="port",
                        ) from None
                    self.stop()
        except BaseException:
            self.stop()
            raise

    def _start_on(self, port: int) -> None:
        self._name, self._key = f"assay-{self.role}-{secrets.token_hex(4)}", secrets.token_hex(24)
        argv = launch.command(self.launch, port, self._name)
        ours = launch.settings(self.launch, os.environ)
        self.url, self.launch_command = f"http://127.0.0.1:{port}", launch.shell_line(ours, argv)
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
        info = client.json("GET", "/server_info", timeout_s=INFO_TIMEOUT_S)
        self._arguments = json.loads(json.dumps(info).replace(self._key, "***"))  # its command line has the key, too
        self.label = engine_label("sglang", self._arguments.get("version", ""), self.launch.device)

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
            time.sleep(POLL_INTERVAL_S)
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
            model=f"{self._name}:{self.adapter}" if self.adapter else self._name,
            check=self.check,
            log_tail=self._log_tail,
            unreported_cache=0,  # launched to report cached tokens; up to 0.5.17 it omits the field if it is 0
        )

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
        """Raise if a process has ended: SGLang's main process may stay, waiting at its own exit for those that are left."""
        if lost := process.lost(_ESSENTIAL):
            raise self._dead(process, *lost)

    def _dead(self, process: ServerProcess, part: str = "", how: str = "") -> EngineError:
        return failures.ended(
            self.who,
            how or process.how_it_ended,
            "during start-up" if self.startup_s is None else "after it was ready",
            process.recent_log(),
            process.log_tail(),
            process=_plain(part) if part else "",
            out_of_memory=process.ran_out_of_memory,
        )

    def resolved_arguments(self) -> dict[str, Any]:
        return arguments.settled(resolved_arguments(self.launch))

    def settle_with(self, candidate: Engine, asked: Collection[str]) -> CommonSettings:
        assert isinstance(candidate, SGLangServer)
        return agree({"reference": self.launch, "candidate": candidate.launch}, asked=asked)

    def with_flags(self, flags: tuple[str, ...]) -> SGLangServer:
        return SGLangServer(replace(self.launch, common=flags))

    def last_step(self) -> str:
        """Return the last line that it logged since it was started, except warnings, or an empty string."""
        return self._process.last_line(warnings=False) if self._process is not None else ""

    def _log_tail(self) -> str:
        return self._process.log_tail() if self._process is not None else ""

    def arguments(self) -> dict[str, Any]:
        return arguments.settled(self._arguments)

    def fingerprint(self) -> Fingerprint | None:
        ranks = int(self._arguments.get("tp_size") or 1) * int(self._arguments.get("pp_size") or 1)
        return fingerprint_of(self, self.launch.evidence, self.launch.model, ranks)

    def flush_cache(self) -> None:
        """Empty the prefix cache, waiting up to `_FLUSH_TIMEOUT_S` seconds until the last requests have left the scheduler."""
        path, limit = f"/flush_cache?timeout={_FLUSH_TIMEOUT_S}", _FLUSH_TIMEOUT_S + PROBE_TIMEOUT_S
        self.client().text("POST", path, timeout_s=limit)


def _plain(title: str) -> str:
    """Name a process of SGLang in plain words, by its title, which the system may cut: "scheduler" for "sglang::schedul"."""
    cut = title.removeprefix(_ESSENTIAL)
    return next((name for name in ("scheduler", "detokenizer") if cut and name.startswith(cut)), title)


def _free_port() -> int:
    """Find a port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
