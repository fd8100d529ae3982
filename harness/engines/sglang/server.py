"""An SGLang server, started and stopped by assay."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from assay.harness.engines.base import Engine, ProbeRequest
from assay.harness.engines.client import INFO_TIMEOUT_S, Client
from assay.harness.engines.launch import Launch
from assay.harness.engines.launched import PROBE_TIMEOUT_S, LaunchedServer
from assay.harness.engines.served_fingerprint import fingerprint_of
from assay.harness.engines.sglang import arguments, probing
from assay.harness.engines.sglang.common import agree, resolved_arguments
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.evidence.manifest import CommonSettings
from assay.harness.evidence.probes import ProbeReply

_FLUSH_TIMEOUT_S = 10


class SGLangServer(LaunchedServer):
    """An SGLang server.

    Attributes:
        adapter: name of the adapter that requests name, if any.
    """

    essential = "sglang::"  # the titles of its scheduler and detokenizer; it does not notice if they exit with status 0
    parts = ("scheduler", "detokenizer")

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        self.adapter = ""

    @property
    def model(self) -> str:
        return f"{self._name}:{self.adapter}" if self.adapter else self._name

    def _told(self, client: Client) -> tuple[str, dict[str, Any]]:
        info = client.json("GET", "/server_info", timeout_s=INFO_TIMEOUT_S)
        return info.get("version", ""), info

    def resolved_arguments(self) -> dict[str, Any]:
        return arguments.settled(resolved_arguments(self.launch))

    def settle_with(self, candidate: Engine, asked: Collection[str]) -> CommonSettings:
        assert isinstance(candidate, SGLangServer)
        return agree({"reference": self.launch, "candidate": candidate.launch}, asked=asked)

    def fingerprint(self) -> Fingerprint | None:
        ranks = int(self._arguments.get("tp_size") or 1) * int(self._arguments.get("pp_size") or 1)
        return fingerprint_of(self, self.launch.evidence, self.launch.model, ranks)

    def probe(self, requests: Sequence[ProbeRequest], *, streamed: bool = False) -> list[ProbeReply]:
        return probing.probe(self, requests, streamed=streamed)

    def toggle(self, features: Collection[str], probe: ProbeRequest) -> dict[str, str]:
        return probing.toggle(self, features, probe)

    def flush_cache(self) -> None:
        """Empty the prefix cache, waiting up to `_FLUSH_TIMEOUT_S` seconds until the last requests have left the scheduler."""
        path, limit = f"/flush_cache?timeout={_FLUSH_TIMEOUT_S}", _FLUSH_TIMEOUT_S + PROBE_TIMEOUT_S
        self.client().text("POST", path, timeout_s=limit)


SERVER = SGLangServer
