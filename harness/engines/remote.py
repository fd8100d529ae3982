"""A server that assay did not start: any OpenAI-compatible URL, spoken to with the openai client.

Keys, organisations and projects, proxies, certificates, retries and their pauses are that client's business (``OPENAI_API_KEY``,
``OPENAI_ORG_ID``, ``OPENAI_PROJECT_ID``, ``HTTPS_PROXY``, ...), so assay can compare any URL that it works with: a gateway, or
Azure's ``https://NAME.openai.azure.com/openai/v1``. It takes 4 ms of CPU for a request (``benchmarks/client.py``), which does not
matter at that distance. Answers are read as those of other servers are; streams are timed without it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from assay.harness.engines.base import ChatRequest, Engine, Reply, never
from assay.harness.engines.client import INFO_TIMEOUT_S, AnyClient, Client, Response, served_models, whole
from assay.harness.sides import Role

if TYPE_CHECKING:  # the openai client takes a second to import
    import httpx
    from openai import AsyncOpenAI

_OF_THE_WIRE = ("content-encoding", "content-length", "transfer-encoding")
"""Heads that do not hold of a content that was unpacked."""
_SHOWN = 8
"""Models that a message names."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class EndpointClient(Client):
    """A `Client` that sends its requests with the openai client."""

    def _session(self, timeout_s: float | None = None, authorized: bool = True) -> AsyncOpenAI:  # type: ignore[override]
        from openai import AsyncOpenAI

        # A redirected POST would become a GET.
        connections = _bounded()(trust_env=self._proxies, follow_redirects=False)
        return AsyncOpenAI(
            api_key=self._api_key, base_url=self.url, timeout=timeout_s or self.timeout_s, http_client=connections
        )

    async def _exchange(
        self, session: Any, method: str, path: str, body: Mapping[str, Any] | None, *, again: bool = False
    ) -> Response:
        """Send one request, or, if it may be sent `again`, as many as the openai client's retries.

        Raises:
            OSError: no answer came.
        """
        import httpx
        import openai

        options = {} if again else {"max_retries": 0}
        try:
            async with asyncio.timeout(
                None if again else session.timeout
            ):  # httpx limits the pauses of an answer, not the whole
                if method == "GET":
                    response = await session.get(path, cast_to=httpx.Response, options=options)
                else:
                    response = await session.post(path, cast_to=httpx.Response, body=body, options=options)
        except openai.APIStatusError as error:
            response = error.response
        except openai.APITimeoutError as error:
            raise TimeoutError(str(error)) from error
        except (openai.OpenAIError, httpx.HTTPError, httpx.InvalidURL) as error:
            cause = error.__cause__ or error
            raise ConnectionError(str(cause) or type(cause).__name__) from error
        return Response(response.status_code, response.text)

    async def _send(self, session: Any, path: str, body: Mapping[str, Any]) -> Response:
        return await self._exchange(session, "POST", path, body, again=True)


@cache
def _bounded() -> type[httpx.AsyncClient]:
    """The connections that the openai client makes, but for answers without end."""
    import httpx
    from openai import DefaultAsyncHttpxClient

    class Bounded(DefaultAsyncHttpxClient):
        async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
            response = await super().send(request, **{**options, "stream": True})
            try:
                content = await whole(response.aiter_bytes())
            finally:
                await response.aclose()
            heads = [
                (name, value) for name, value in response.headers.multi_items() if name.lower() not in _OF_THE_WIRE
            ]
            return httpx.Response(response.status_code, headers=heads, content=content, request=request)

    return Bounded


class RemoteServer(Engine):
    """A server known by its URL, which assay can neither start, stop nor instrument.

    Args:
        role: which side of the comparison it is.
        url: its address; a final ``/v1`` is optional.
        request_timeout: seconds until an answer must be complete.
        model: the model to ask where the server has several; a server with one is asked for that.
    """

    _speaks: type[Client] = EndpointClient

    def __init__(self, role: Role, url: str, request_timeout: float, model: str = "") -> None:
        self.role = role
        self.url = url.rstrip("/").removesuffix("/v1")
        self.backend = self.url
        self.label = f"OpenAI-compatible server at {self.url}"
        self.startup_s: float | None = None
        self.launch_command = ""
        self.evidence: Path | None = None
        self._model, self._named = "", model
        self._timeout_s = request_timeout
        self._flushes = True
        self._client = self.client(self._speaks)

    def client(self, kind: type[AnyClient]) -> AnyClient:
        return kind(
            self.url,
            f"the {self.role} server ({self.url})",
            api_key=os.environ.get("OPENAI_API_KEY") or "EMPTY",
            timeout_s=self._timeout_s,
            proxies=urlsplit(self.url).hostname not in _LOOPBACK,
            check=None,
            log_tail=str,
        )

    def start(self) -> None:
        """Check that the server answers, and find the model to ask. Raises EngineError otherwise."""
        names = served_models(self._client, min(INFO_TIMEOUT_S, self._timeout_s))
        if self._named not in names and len(names) != 1:
            shown = f"{', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
            raise self._client.error(
                f"serves {shown or 'no model'}.",
                "one model",
                "serve a single model under this URL, or name one with --model",
            )
        self._model = self._named if self._named in names else names[0]

    @property
    def model(self) -> str:
        """The model that is asked; empty before `start`."""
        return self._model

    def stop(self) -> None:
        pass

    def check(self) -> None:
        pass

    def arguments(self) -> dict[str, Any]:
        return {}

    def flush_cache(self) -> None:
        """POST /flush_cache, which SGLang has. Other servers may refuse it; one that does not answer is not asked again."""
        if self._flushes:
            timeout = min(INFO_TIMEOUT_S, self._timeout_s)
            self._flushes = self._client.status("/flush_cache", timeout, method="POST") is not None

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
