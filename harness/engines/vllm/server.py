"""A vLLM server, started and stopped by assay.

Whatever ends it, a vLLM server exits with status 0, and its engine and workers outlive an API server that is killed. So any exit
is a failure here, and the guardian ends the whole process group (`assay.harness.engines.process`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from assay.harness.engines.base import ProbeRequest
from assay.harness.engines.client import INFO_TIMEOUT_S, Client
from assay.harness.engines.launch import resolved
from assay.harness.engines.launched import PROBE_TIMEOUT_S, LaunchedServer
from assay.harness.engines.served_fingerprint import fingerprint_of
from assay.harness.engines.vllm import arguments, probing
from assay.harness.evidence.fingerprint import Fingerprint
from assay.harness.evidence.probes import ProbeReply

# Seconds that the last requests may take to leave the scheduler; until then the cache is not emptied.
_FLUSH_TIMEOUT_S, _FLUSH_PAUSE_S = 10.0, 0.05


class VLLMServer(LaunchedServer):
    """A vLLM server."""

    essential = "VLLM::"  # the titles of its engine and its workers
    parts = ("EngineCore", "Worker")

    def _told(self, client: Client) -> tuple[str, dict[str, Any]]:
        version = client.json("GET", "/version", timeout_s=INFO_TIMEOUT_S)
        return str(version["version"]), client.json("GET", "/server_info?config_format=json", timeout_s=INFO_TIMEOUT_S)

    def resolved_arguments(self) -> dict[str, Any]:
        return arguments.settled(resolved(self.launch, "assay.harness.engines.vllm.resolving"))

    def fingerprint(self) -> Fingerprint | None:
        ranks = int(self.arguments().get("parallel_config", {}).get("world_size") or 1)

        def write(label: str) -> None:
            self.send("/collective_rpc", {"method": "assay_fingerprint", "args": [label]})

        return fingerprint_of(self, self.launch.evidence, self.launch.model, ranks, write)

    def request_id(self, name: str) -> str:
        return f"generate-tokens-{name}"

    def probe(self, requests: Sequence[ProbeRequest], *, streamed: bool = False) -> list[ProbeReply]:
        return probing.probe(self, requests)

    def flush_cache(self) -> None:
        """Empty the prefix cache, waiting up to `_FLUSH_TIMEOUT_S` seconds until the last requests have left the scheduler.

        Raises:
            EngineError: the server failed, or requests are still running.
        """
        client, deadline = self.client(), time.monotonic() + _FLUSH_TIMEOUT_S
        while not client.json("POST", "/reset_prefix_cache", timeout_s=_FLUSH_TIMEOUT_S + PROBE_TIMEOUT_S).get(
            "success"
        ):
            if time.monotonic() > deadline:
                raise client.error(
                    f"did not empty its prefix cache in {_FLUSH_TIMEOUT_S:g} s.",
                    "an emptied cache, once no request is running",
                    "find out in the server's log which request does not end",
                )
            time.sleep(_FLUSH_PAUSE_S)


SERVER = VLLMServer
