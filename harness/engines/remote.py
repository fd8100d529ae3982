"""A server that assay did not start: any OpenAI-compatible URL."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from assay.harness.engines.base import ChatRequest, Engine, Reply, never
from assay.harness.engines.client import AnyClient, Client
from assay.harness.engines.sglang import INFO_TIMEOUT_S, served_models
from assay.harness.evidence.records import Role

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class RemoteServer(Engine):
    """A server known by its URL, which assay can neither start, stop nor instrument.

    Args:
        role: which side of the comparison it is.
        url: its address; a final ``/v1`` is optional.
        request_timeout: seconds until an answer must be complete.
    """

    def __init__(self, role: Role, url: str, request_timeout: float) -> None:
        self.role = role
        self.url = url.rstrip("/").removesuffix("/v1")
        self.backend = self.url
        self.label = f"OpenAI-compatible server at {self.url}"
        self.startup_s: float | None = None
        self.launch_command = ""
        self.evidence: Path | None = None
        self._model = ""
        self._timeout_s = request_timeout
        self._client = self.client(Client)

    def client(self, kind: type[AnyClient]) -> AnyClient:
        return kind(
            self.url,
            f"the {self.role} server ({self.url})",
            api_key=os.environ.get("OPENAI_API_KEY") or "EMPTY",
            timeout_s=self._timeout_s,
            proxies=urlsplit(self.url).hostname not in _LOOPBACK,
            check=self.check,
            log_tail=str,
        )

    def start(self) -> None:
        """Check that the server answers, and find the model that it serves. Raises EngineError otherwise."""
        names = served_models(self._client)
        if len(names) != 1:
            raise self._client.error(
                f"serves {', '.join(names) or 'no model'}.", "one model", "serve a single model under this URL"
            )
        self._model = names[0]

    def stop(self) -> None:
        pass

    def check(self) -> None:
        pass

    def arguments(self) -> dict[str, Any]:
        return {}

    def flush_cache(self) -> None:
        """POST /flush_cache, which SGLang has; other servers may refuse it."""
        self._client.status("/flush_cache", INFO_TIMEOUT_S, method="POST")

    def ask(
        self,
        asks: Sequence[ChatRequest],
        concurrency: int,
        on_reply: Callable[[int, Reply], None],
        enough: Callable[[], bool] = never,
    ) -> None:
        if not self._model:
            self.start()
        self._client.ask(self._model, asks, concurrency, on_reply, enough)
