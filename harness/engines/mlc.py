"""An MLC-LLM server, known by its URL, and the event trace that it records.

The interface is that of MLC-LLM at 79d603f (July 2026), which calls itself 0.1.dev0: ``mlc_llm serve`` (``cli/serve.py``), OpenAI's
routes, and with ``--enable-debug`` those of ``debug_entrypoints.py``. ``POST /debug/dump_event_trace`` with the body
``{"model": NAME}`` answers with Chrome trace events if the server also has ``--enable-tracing``; otherwise it answers HTTP 400, and
without ``--enable-debug`` 404.
"""

from __future__ import annotations

from typing import Any

from assay.harness.backend import URL_FORM, is_server_url
from assay.harness.engines.client import Client
from assay.harness.engines.remote import RemoteServer
from assay.harness.errors import EngineError, UsageError
from assay.harness.sides import Role

FLAGS = ("--enable-debug", "--enable-tracing")
"""Without them, a server records no trace or does not give it away."""


class MlcServer(RemoteServer):
    """An MLC-LLM server known by its URL. Its own addresses are not of OpenAI's interface.

    Raises:
        UsageError: the URL is not one of a server.
    """

    _speaks = Client

    def __init__(self, role: Role, url: str, request_timeout: float) -> None:
        if not (url.startswith(("http://", "https://")) and is_server_url(url)):
            raise UsageError(f"{url!r} is not the URL of an MLC-LLM server.", URL_FORM, "correct the URL")
        super().__init__(role, url, request_timeout)
        self.label = f"MLC-LLM at {self.url}"

    def event_trace(self) -> list[Any]:
        """Return the events of all requests since the server started, as Chrome trace events.

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
                f"mlc_llm serve MODEL {' '.join(FLAGS)}",
            ) from None
        if not isinstance(events, list):
            raise self._client.error(
                f"answered /debug/dump_event_trace with {str(events)[:100]!r}.",
                "a list of events",
                "name another server",
            )
        return events
