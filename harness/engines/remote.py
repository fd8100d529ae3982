"""A server that assay did not start: any OpenAI-compatible URL."""

from __future__ import annotations

import os
from dataclasses import replace

from assay.harness.engines.base import Engine
from assay.harness.engines.client import INFO_TIMEOUT_S, Client
from assay.harness.sides import Role

_NAMED_MODELS = 8


class RemoteServer(Engine):
    """A server known by its URL, which assay can neither start, stop nor instrument.

    Args:
        role: which side of the comparison it is.
        url: its address; a final ``/v1`` is optional.
        model: the model to ask if the server has several; a server with one model is asked for that.
    """

    def __init__(self, role: Role, url: str, request_timeout: float, model: str = "") -> None:
        self.role = role
        self.url = url.rstrip("/").removesuffix("/v1")
        self.backend = self.url
        self.who = f"the {role} server ({self.url})"
        self.label = f"OpenAI-compatible server at {self.url}"
        self._named, self._flushes = model, True
        self._info_timeout_s = min(INFO_TIMEOUT_S, request_timeout)
        self._client = Client(
            self.url,
            self.who,
            role,
            api_key=os.environ.get("OPENAI_API_KEY") or "EMPTY",
            timeout_s=request_timeout,
        )

    def start(self) -> None:
        """Check that the server answers, and find the model to ask. Raises EngineError otherwise."""
        names = self._client.models(self._info_timeout_s)
        if self._named not in names and len(names) != 1:
            shown = f"{', '.join(names[:_NAMED_MODELS])}{', ...' if len(names) > _NAMED_MODELS else ''}"
            raise self._client.error(
                f"serves {shown or 'no model'}.",
                "one model",
                "serve a single model under this URL, or name one with --model",
            )
        self._client = replace(self._client, model=self._named if self._named in names else names[0])

    def client(self) -> Client:
        if not self._client.model:
            self.start()
        return self._client

    def stop(self) -> None:
        pass

    def check(self) -> None:
        pass

    def flush_cache(self) -> None:
        """POST /flush_cache, which SGLang has. Other servers may refuse it; a server that does not answer is not asked again."""
        if self._flushes:
            self._flushes = self._client.status("/flush_cache", self._info_timeout_s, method="POST") is not None
