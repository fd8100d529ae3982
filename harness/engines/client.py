"""The client side of the OpenAI-compatible interface, for servers that assay starts: requests out, replies in.

`assay.harness.engines.remote` has the client for other servers. This one uses
aiohttp because a request must cost assay's own process little CPU time: the goal is 1 ms with the answer on disk. Measured
with a server that answers at once and 32 requests in flight, per request: openai 2.8: 3.8 ms; httpx 0.28: 3.4 ms (1.0 ms with a
client for each worker; httpcore walks through all connections of a pool whenever a request begins or ends); aiohttp 3.14: 0.15 ms.
``python benchmarks/client.py`` repeats it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp

from assay.harness.engines.base import ChatRequest, Reply, never
from assay.harness.engines.guardian import HELPER_GRACE_S
from assay.harness.engines.process import GRACE_S
from assay.harness.engines.wire import BadReply, read_reply
from assay.harness.errors import EngineError

_WATCH_INTERVAL_S = 0.25
_FIND_OUT = "find out why in the server's log, and repeat the command, which resumes"
DEATH_WAIT_S = GRACE_S + HELPER_GRACE_S + 2.0
"""A dying server drops its connections before its exit is visible, for which the guardian ends what is left of it; a failed request
waits this long to be explained by it.
"""
RETRY_PAUSES_S = (0.5, 1.0)
"""Pauses before a request is sent again, as in the openai client with its two retries."""
_RETRIED_STATUSES = frozenset({408, 409, 429, *range(500, 600)})
"""Statuses of temporary failures, as in the openai client."""
_MAX_RETRY_AFTER_S = 60.0
"""The longest ``Retry-After`` that is followed, as in the openai client."""
_EXCERPT = 300
LARGEST_ANSWER = 1 << 26
"""Bytes of one answer, unpacked: what is larger has no end, or is a few packed zeros. With twenty alternatives a token, 30,000
tokens are half of it."""
INFO_TIMEOUT_S = 60.0
"""Seconds that a server may take to describe itself."""
BROKEN = (aiohttp.ClientError, OSError)
"""Raised if a server does not answer; a time-out is an OSError."""


Done = TypeVar("Done")


@dataclass(frozen=True)
class Response:
    """An HTTP response, read completely."""

    status: int
    text: str
    retry_after: str = ""

    @property
    def is_success(self) -> bool:
        """True if the status is 2xx."""
        return 200 <= self.status < 300


class Client:
    """Talks to one server.

    Args:
        url: where the server listens, without ``/v1``.
        who: what error messages call the server, for example "the candidate server (sage_attn)".
        api_key: sent with each request.
        timeout_s: seconds that a request may take, retries included.
        proxies: whether the proxy settings of the environment apply; they should not for a server on this machine.
        check: raises EngineError if the server's process is gone, which explains any other failure; None if assay did not start it.
        log_tail: returns the last lines of the server's log, with which every error ends; empty if there is none.
        unreported_cache: what a reply without a count of cached tokens means; None for unknown.
    """

    def __init__(
        self,
        url: str,
        who: str,
        api_key: str,
        timeout_s: float,
        proxies: bool,
        check: Callable[[], None] | None,
        log_tail: Callable[[], str],
        unreported_cache: int | None = None,
    ) -> None:
        self.url, self.who, self.timeout_s = url, who, timeout_s
        self._unreported_cache = unreported_cache
        self._proxies, self._log_tail = proxies, log_tail
        self._can_die, self._check = check is not None, check or (lambda: None)
        self._api_key = api_key

    def error(self, found: str, expected: str = "", do: str = _FIND_OUT) -> EngineError:
        """Make an EngineError about this server, with the last lines of its log."""
        return EngineError(f"{self.who} {found}", expected, do, details=self._log_tail())

    def get(self, path: str, timeout_s: float) -> Any:
        """Get the JSON document at ``path``. Raises EngineError if there is none."""
        return self._document(path, self._call("GET", path, timeout_s))

    def post(self, path: str, timeout_s: float) -> None:
        """POST to ``path``. Raises EngineError unless the status is a success."""
        self._call("POST", path, timeout_s)

    def post_json(self, path: str, body: Mapping[str, Any], *, waits: bool = True) -> Any:
        """POST ``body`` to ``path`` and return the JSON response, within the time-out of a request.

        Args:
            path: below the URL.
            body: what is sent.
            waits: whether an answer that is an error waits `DEATH_WAIT_S` to be explained by the server's death.

        Raises:
            EngineError: no JSON came back. If the server died, the error states that.
        """
        try:
            return self._document(path, self._call("POST", path, self.timeout_s, body))
        except EngineError:
            if waits:
                asyncio.run(self._wait_for_death())
            raise

    def post_events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """POST ``body`` to ``path`` and return the JSON of each event of the response. Errors are those of `post_json`."""
        response = self._call("POST", path, self.timeout_s, body)
        data = [line.removeprefix("data:").strip() for line in response.text.splitlines() if line.startswith("data:")]
        return [self._document(path, Response(response.status, each)) for each in data if each != "[DONE]"]

    def _document(self, path: str, response: Response) -> Any:
        try:
            return json.loads(response.text)
        except (ValueError, RecursionError):  # lists in lists in lists are JSON too
            raise self.error(f"answered {path} with {excerpt(response.text)}.", "JSON") from None

    def status(self, path: str, timeout_s: float, method: str = "GET", authorized: bool = True) -> int | None:
        """Return the HTTP status of ``path``, asked with the key or without; None if there is no response."""
        try:
            return self._request(method, path, timeout_s, authorized=authorized).status
        except BROKEN:
            return None

    def _call(self, method: str, path: str, timeout_s: float, body: Mapping[str, Any] | None = None) -> Response:
        try:
            response = self._request(method, path, timeout_s, body, watched=True)
        except BROKEN as error:
            asyncio.run(self._wait_for_death())
            raise self.error(
                f"did not answer {self.url}{path}: {reason(error)}.",
                "an answer",
                "check that the server runs and that this machine reaches it, and repeat the command",
            ) from error
        if not response.is_success:
            raise self.error(f"answered {path} with HTTP {response.status}: {excerpt(response.text)}.", "HTTP 200")
        return response

    def _request(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: Mapping[str, Any] | None = None,
        *,
        authorized: bool = True,
        watched: bool = False,
    ) -> Response:
        """Send one request; `watched` ends it with an EngineError as soon as the server's process is gone or stopped."""

        async def request() -> Response:
            async with self._session(timeout_s, authorized) as session:
                exchange = asyncio.ensure_future(self._exchange(session, method, path, body))
                return await (self._while_alive(exchange) if watched else exchange)

        return asyncio.run(request())

    def ask(
        self,
        model: str,
        asks: Sequence[ChatRequest],
        concurrency: int,
        on_reply: Callable[[int, Reply], None],
        enough: Callable[[], bool] = never,
    ) -> None:
        """Call `Engine.ask` with the name of the model."""
        if asks:
            asyncio.run(self._ask(model, asks, concurrency, on_reply, enough))

    async def _ask(
        self,
        model: str,
        asks: Sequence[ChatRequest],
        concurrency: int,
        on_reply: Callable[[int, Reply], None],
        enough: Callable[[], bool],
    ) -> None:
        async with self._session() as session:
            waiting = iter(enumerate(asks))

            async def work() -> None:
                for index, ask in waiting:
                    if enough():
                        return
                    reply = await self._reply(session, model, ask)
                    if reply.cached_tokens is None and self._unreported_cache is not None:
                        reply = replace(reply, cached_tokens=self._unreported_cache)
                    on_reply(index, reply)

            await self._while_alive(asyncio.gather(*(work() for _ in range(min(concurrency, len(asks))))))

    async def _while_alive(self, work: asyncio.Future[Done]) -> Done:
        """Do work that ends as soon as the server's process is seen to be gone, or stopped, and return its result."""
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if watch.done() and not work.done():
                await watch
            return await work
        finally:
            watch.cancel()
            work.cancel()
            await asyncio.gather(watch, work, return_exceptions=True)

    def _session(self, timeout_s: float | None = None, authorized: bool = True) -> aiohttp.ClientSession:
        """Make a session whose connections are kept and reused, as many as there are requests in flight."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Authorization": f"Bearer {self._api_key}"} if authorized else {},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            trust_env=self._proxies,
        )

    async def _watch(self) -> None:
        while True:
            self._check()
            await asyncio.sleep(_WATCH_INTERVAL_S)

    async def _wait_for_death(self) -> None:
        """Raise EngineError if the server's process is seen to be gone within `DEATH_WAIT_S`."""
        deadline = time.monotonic() + (DEATH_WAIT_S if self._can_die else 0.0)
        while time.monotonic() < deadline:
            self._check()
            await asyncio.sleep(_WATCH_INTERVAL_S)

    async def _reply(self, session: aiohttp.ClientSession, model: str, ask: ChatRequest) -> Reply:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self._send(session, "/v1/chat/completions", {"model": model, **chat_body(ask)})
        except TimeoutError:
            self._check()
            raise self.error(
                f"has not answered a request for {self.timeout_s:g} s.",
                "an answer within the request time-out",
                "find out why it hangs, or raise --request-timeout",
            ) from None
        except BROKEN as error:
            await self._wait_for_death()
            raise self.error(f"broke the connection: {reason(error)}.") from error
        if not response.is_success:
            raise await self._refusal(response)
        try:
            return read_reply(response.text, ask, time.monotonic() - started)
        except BadReply as error:
            raise self.error(
                f"sent something other than a chat completion: {error}. It sent: {excerpt(response.text)}.",
                "JSON with choices, a message text, a finish reason and usage",
            ) from None

    async def _send(self, session: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> Response:
        """POST, and again after a pause if the connection breaks or the server reports that it is busy or failing."""
        for pause_s in RETRY_PAUSES_S:
            try:
                response = await self._exchange(session, "POST", path, body)
            except BROKEN:
                await asyncio.sleep(pause_s)
            else:
                if response.status not in _RETRIED_STATUSES:
                    return response
                await asyncio.sleep(_retry_after_s(response) or pause_s)
        return await self._exchange(session, "POST", path, body)

    async def _exchange(
        self, session: aiohttp.ClientSession, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Response:
        # A redirected POST would become a GET.
        async with session.request(method, f"{self.url}{path}", json=body, allow_redirects=False) as response:
            return await read_response(response)

    async def _refusal(self, response: Response) -> EngineError:
        """Make the error for an unsuccessful status.

        Raises:
            EngineError: the server died, which explains its HTTP 500.
        """
        if response.status >= 500:
            await self._wait_for_death()
        return self.error(f"answered HTTP {response.status}: {excerpt(response.text)}.", "HTTP 200")


AnyClient = TypeVar("AnyClient", bound=Client)


async def read_response(response: aiohttp.ClientResponse) -> Response:
    """Read a response completely. Bytes that are not text are replaced, so that an error message can quote them."""
    content = await whole(response.content.iter_any())
    return Response(response.status, content.decode(errors="replace"), response.headers.get("Retry-After", ""))


async def whole(parts: AsyncIterable[bytes]) -> bytes:
    """The parts of an answer as one.

    Raises:
        ConnectionError: they are more than `LARGEST_ANSWER`.
    """
    content = bytearray()
    async for part in parts:
        content += part
        if len(content) > LARGEST_ANSWER:
            raise ConnectionError(f"the answer has more than {LARGEST_ANSWER:,} bytes")
    return bytes(content)


def chat_body(ask: ChatRequest) -> dict[str, Any]:
    """Make the body of a chat completion, without the model."""
    body = {
        "messages": [{"role": "user", "content": ask.prompt}],
        "temperature": 0,
        "max_tokens": ask.max_tokens,
    }
    return {**body, "logprobs": True, "top_logprobs": ask.top_logprobs} if ask.top_logprobs else body


def _retry_after_s(response: Response) -> float:
    """Return the seconds to wait, as the server asks; 0 if that is not valid."""
    try:
        seconds = float(response.retry_after)
    except ValueError:
        return 0.0
    return seconds if 0 < seconds <= _MAX_RETRY_AFTER_S else 0.0


def excerpt(body: str) -> str:
    """Quote the beginning of a response for an error message."""
    return repr(body if len(body) <= _EXCERPT else body[:_EXCERPT] + "...")


def reason(error: BaseException) -> str:
    """Describe an exception for an error message."""
    return f"{type(error).__name__}: {error}".rstrip(": .")


def served_models(client: Client, timeout_s: float = INFO_TIMEOUT_S) -> list[str]:
    """Return the names of the models that a server lists.

    Raises:
        EngineError: it lists none in OpenAI's format, or does not answer within `timeout_s` seconds.
    """
    listed = client.get("/v1/models", timeout_s)
    try:
        names = [str(model["id"]) for model in listed["data"]]
        "".join(names).encode()  # a request with half of a surrogate pair cannot be sent
        return names
    except (TypeError, KeyError, UnicodeEncodeError):
        raise EngineError(
            f"{client.who} answered /v1/models with {str(listed)[:300]}.",
            "a list of models in OpenAI's format",
            "name the URL of an OpenAI-compatible server",
        ) from None
